"""Upcycling: the MoE equals the dense model without noise, the noise is what it says, and failures leave nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from epruntime.errors import CheckpointError, ConfigError, UnsupportedModelError
from epruntime.models import upcycle as upcycle_module
from epruntime.models.upcycle import ROUTER_STD, upcycle

PROMPTS = [[5], [7, 2, 9], [31, 30, 29, 28, 27, 3, 3, 3], list(range(1, 41)), [60, 4] * 12]
MIN_MARGIN = 1e-3


def dense_config(model_type: str = "llama", **overrides: Any) -> Any:
    settings: dict[str, Any] = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 256,
        "initializer_range": 0.3,
        "rms_norm_eps": 1e-5,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "dtype": "float32",
    }
    kind = {"llama": transformers.LlamaConfig, "mistral": transformers.MistralConfig}[model_type]
    return kind(**settings | overrides)


def save_dense(directory: Path, config: Any, seed: int = 0, **options: Any) -> Any:
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(directory, **options)
    return model


@pytest.fixture
def dense(tmp_path: Path) -> Path:
    save_dense(tmp_path / "dense", dense_config())
    return tmp_path / "dense"


def load_moe(directory: Path, dtype: torch.dtype = torch.float32) -> Any:
    model, info = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, output_loading_info=True)
    assert type(model).__name__ == "MixtralForCausalLM"
    assert not any(info.values()), info
    return model.eval()


def greedy(model: Any, prompt: list[int], new_tokens: int = 24) -> tuple[list[int], float]:
    """(new tokens, least gap between the two best logits on the way)."""
    with torch.inference_mode():
        out = model.generate(
            torch.tensor([prompt]),
            max_new_tokens=new_tokens,
            do_sample=False,
            eos_token_id=None,
            output_logits=True,
            return_dict_in_generate=True,
        )
    best = [step[0].topk(2).values for step in out.logits]
    return out.sequences[0, len(prompt) :].tolist(), min(float(a - b) for a, b in best)


def assert_same_greedy_tokens(dense_model: Any, moe_model: Any) -> None:
    checked = 0
    for prompt in PROMPTS:
        expected, margin = greedy(dense_model, prompt)
        if margin > MIN_MARGIN:
            assert greedy(moe_model, prompt)[0] == expected, f"prompt {prompt}, margin {margin}"
            checked += 1
    assert checked >= len(PROMPTS) - 1, "the seed leaves too few prompts with a clear winner at every step"


@pytest.mark.parametrize(
    ("model_type", "overrides"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True}),
        ("llama", {"head_dim": 16, "num_key_value_heads": 1}),
        ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 123456.0}, "rms_norm_eps": 1e-2}),
        ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
        (
            "llama",
            {
                "rope_parameters": {
                    "rope_type": "llama3",
                    "rope_theta": 1e4,
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 32,
                }
            },
        ),
        (
            "llama",
            {
                "rope_parameters": {
                    "rope_type": "yarn",
                    "rope_theta": 1e4,
                    "factor": 8.0,
                    "original_max_position_embeddings": 32,
                }
            },
        ),
        ("mistral", {"sliding_window": 6}),
        ("mistral", {"sliding_window": None}),
    ],
    ids=lambda value: value if isinstance(value, str) else ",".join(value) or "plain",
)
def test_without_noise_greedy_tokens_equal_the_dense_model(tmp_path: Path, model_type: str, overrides: Any) -> None:
    dense_model = save_dense(tmp_path / "dense", dense_config(model_type, **overrides))
    report = upcycle(tmp_path / "dense", tmp_path / "moe", num_experts=5, top_k=3)
    assert_same_greedy_tokens(dense_model, load_moe(tmp_path / "moe"))
    assert report.dtype == "float32"


def test_a_changed_expert_would_be_noticed(tmp_path: Path, dense: Path) -> None:
    upcycle(dense, tmp_path / "moe", num_experts=4, top_k=2)
    dense_model, moe = transformers.AutoModelForCausalLM.from_pretrained(dense), load_moe(tmp_path / "moe")
    with torch.no_grad():
        moe.model.layers[1].mlp.experts.down_proj[2].neg_()
    with pytest.raises(AssertionError, match="prompt"):
        assert_same_greedy_tokens(dense_model, moe)


def test_router_spreads_tokens_and_has_the_stated_scale(tmp_path: Path) -> None:
    save_dense(tmp_path / "dense", dense_config(hidden_size=512, num_hidden_layers=1))
    upcycle(tmp_path / "dense", tmp_path / "moe", num_experts=8)
    router = load_file(tmp_path / "moe" / "model.safetensors")["model.layers.0.block_sparse_moe.gate.weight"]
    assert router.shape == (8, 512)
    assert float(router.std()) == pytest.approx(ROUTER_STD, rel=0.05)


def test_noise_is_relative_per_tensor_and_per_expert(tmp_path: Path) -> None:
    save_dense(tmp_path / "dense", dense_config(hidden_size=128, intermediate_size=256, initializer_range=0.05))
    weights = load_file(tmp_path / "dense" / "model.safetensors")
    for name in weights:  # std differs from tensor to tensor, mean is not zero
        if "mlp" in name:
            weights[name] = weights[name] * (2.0 if "up" in name else 0.5) + 0.3
    save_file(weights, tmp_path / "dense" / "model.safetensors", metadata={"format": "pt"})
    upcycle(tmp_path / "dense", tmp_path / "moe", num_experts=3, noise=0.1)
    moe = load_file(tmp_path / "moe" / "model.safetensors")
    for dense_name, moe_name in (("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2")):
        original = weights[f"model.layers.1.mlp.{dense_name}.weight"]
        experts = [moe[f"model.layers.1.block_sparse_moe.experts.{e}.{moe_name}.weight"] for e in range(3)]
        noises = [(expert - original) for expert in experts]
        for noise in noises:
            assert float(noise.std() / original.std()) == pytest.approx(0.1, rel=0.02)
            assert abs(float(noise.mean())) < 0.01 * float(original.std())
        correlation = torch.corrcoef(torch.stack([noise.flatten() for noise in noises])) - torch.eye(3)
        assert float(correlation.abs().max()) < 0.03
    for name in weights:
        if "mlp" not in name:
            assert torch.equal(moe[name], weights[name]), f"{name} is no expert's: copied as it is"


def test_noise_depends_on_seed_tensor_and_expert_only(tmp_path: Path, dense: Path) -> None:
    def made(out: str, **options: Any) -> dict[str, torch.Tensor]:
        upcycle(dense, tmp_path / out, noise=0.1, **options)
        return load_file(tmp_path / out / "model.safetensors")

    first, again, more, other = (
        made("a", num_experts=3),
        made("b", num_experts=3),
        made("c", num_experts=5),
        made("d", num_experts=3, seed=7),
    )
    for name, tensor in first.items():
        assert torch.equal(tensor, again[name])
        if "experts" in name:
            assert torch.equal(tensor, more[name]), "an expert's noise depends on how many experts there are"
        if "block_sparse_moe" in name:
            assert not torch.equal(tensor, other[name]), f"{name} is the same for another seed"
    layer_0, layer_1 = (first[f"model.layers.{n}.block_sparse_moe.gate.weight"] for n in (0, 1))
    assert not torch.equal(layer_0, layer_1)


def test_many_shards_in_and_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dense_model = save_dense(tmp_path / "dense", dense_config(), max_shard_size="20KB")
    assert len(list((tmp_path / "dense").glob("*.safetensors"))) > 3
    monkeypatch.setattr(upcycle_module, "MAX_SHARD_BYTES", 50_000)
    report = upcycle(tmp_path / "dense", tmp_path / "moe")
    shards = sorted((tmp_path / "moe").glob("*.safetensors"))
    assert len(shards) == report.num_shards > 3
    index = json.loads((tmp_path / "moe" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == report.bytes_written
    held = {}
    for shard in shards:
        with safe_open(shard, "pt") as file:
            held |= dict.fromkeys(file.keys(), shard.name)
    assert held == index["weight_map"]
    assert_same_greedy_tokens(dense_model, load_moe(tmp_path / "moe"))


def test_dtype_is_kept_or_rounded_once(tmp_path: Path, dense: Path) -> None:
    weights = load_file(dense / "model.safetensors")
    assert upcycle(dense, tmp_path / "kept", dtype="auto").dtype == "float32"
    assert upcycle(dense, tmp_path / "cast", dtype="bfloat16").dtype == "bfloat16"
    cast = load_file(tmp_path / "cast" / "model.safetensors")
    for layer in range(3):
        original = weights[f"model.layers.{layer}.mlp.up_proj.weight"]
        assert torch.equal(cast[f"model.layers.{layer}.block_sparse_moe.experts.7.w3.weight"], original.bfloat16())
    assert json.loads((tmp_path / "cast" / "config.json").read_text())["dtype"] == "bfloat16"
    load_moe(tmp_path / "cast", torch.bfloat16)


def test_report_counts_parameters(tmp_path: Path, dense: Path) -> None:
    report = upcycle(dense, tmp_path / "moe", num_experts=6, top_k=2)
    dense_model, moe = transformers.AutoModelForCausalLM.from_pretrained(dense), load_moe(tmp_path / "moe")
    assert report.dense_parameters == sum(p.numel() for p in dense_model.parameters())
    assert report.parameters == sum(p.numel() for p in moe.parameters())
    assert report.active_parameters == report.parameters - 4 * 3 * (3 * 32 * 48)
    assert report.bytes_written == 4 * report.parameters


def test_companions_come_along(tmp_path: Path, dense: Path) -> None:
    (dense / "tokenizer_config.json").write_text('{"chat_template": "{{ messages[0].content }}"}')
    (dense / "generation_config.json").write_text('{"eos_token_id": [2, 5], "temperature": 0.6}')
    (dense / "chat_template.jinja").write_text("{{ messages }}")
    (dense / "training_args.bin").write_bytes(b"not copied")
    upcycle(dense, tmp_path / "moe")
    for name in ("tokenizer_config.json", "generation_config.json", "chat_template.jinja"):
        assert (tmp_path / "moe" / name).read_bytes() == (dense / name).read_bytes()
    assert not (tmp_path / "moe" / "training_args.bin").exists()


def test_progress_reaches_the_total(tmp_path: Path, dense: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    report = upcycle(dense, tmp_path / "moe", progress=lambda *args: seen.append(args))
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)
    assert seen[-1][1:] == (report.bytes_written, report.bytes_written)


MEASURE = """
import pathlib, re, sys, torch
from epruntime.models.upcycle import upcycle
import transformers.models.mixtral.configuration_mixtral, transformers.models.llama.configuration_llama
torch.randn(1 << 20).to(torch.bfloat16)

def status(key):
    return 1024 * int(re.search(key + r":\\s+(\\d+)", pathlib.Path("/proc/self/status").read_text())[1])

pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
before = status("VmRSS")
report = upcycle(sys.argv[1], sys.argv[2], num_experts=4, noise=0.02)
print(report.bytes_written, status("VmHWM") - before)
"""


def test_safetensors_are_streamed(tmp_path: Path) -> None:
    config = dense_config(
        vocab_size=16384,
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=3,
        num_attention_heads=16,
        dtype="bfloat16",
    )
    save_dense(tmp_path / "dense", config, max_shard_size="40MB")
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(tmp_path / "dense"), str(tmp_path / "moe")],
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    )
    written, growth = map(int, done.stdout.split())
    dense_bytes = sum(file.stat().st_size for file in (tmp_path / "dense").glob("*.safetensors"))
    print(f"dense {dense_bytes / 2**20:.0f} MiB, written {written / 2**20:.0f} MiB, growth {growth / 2**20:.0f} MiB")
    assert written > 300 * 2**20
    assert dense_bytes > 100 * 2**20
    assert 2**20 < growth < 64 * 2**20


def _with_tensor(dense: Path, name: str, tensor: torch.Tensor | None) -> None:
    weights = load_file(dense / "model.safetensors")
    if tensor is None:
        del weights[name]
    else:
        weights[name] = tensor
    save_file(weights, dense / "model.safetensors", metadata={"format": "pt"})


def _with_config(dense: Path, **values: Any) -> None:
    config = json.loads((dense / "config.json").read_text())
    (dense / "config.json").write_text(json.dumps(config | values))


def _pickle_only(dense: Path) -> None:
    (dense / "model.safetensors").rename(dense / "pytorch_model.bin")


LAYER = "model.layers.0"
REFUSED = {
    "bias in config": (lambda d: _with_config(d, attention_bias=True), UnsupportedModelError, "attention_bias"),
    "mlp bias": (lambda d: _with_config(d, mlp_bias=True), UnsupportedModelError, "mlp_bias"),
    "bias tensor": (
        lambda d: _with_tensor(d, f"{LAYER}.self_attn.q_proj.bias", torch.zeros(32)),
        UnsupportedModelError,
        r"q_proj\.bias.*bias",
    ),
    "qk norm": (
        lambda d: _with_tensor(d, f"{LAYER}.self_attn.q_norm.weight", torch.ones(8)),
        UnsupportedModelError,
        "qk-norm",
    ),
    "moe": (
        lambda d: _with_tensor(d, f"{LAYER}.mlp.experts.0.up_proj.weight", torch.ones(8)),
        UnsupportedModelError,
        "mixture of experts already",
    ),
    "foreign tensor": (
        lambda d: _with_tensor(d, f"{LAYER}.mlp.extra.weight", torch.ones(8)),
        UnsupportedModelError,
        r"mlp\.extra\.weight is not part",
    ),
    "model type": (lambda d: _with_config(d, model_type="qwen3"), UnsupportedModelError, "'qwen3' is not Llama-like"),
    "moe model type": (lambda d: _with_config(d, model_type="mixtral"), UnsupportedModelError, "mixtral"),
    "own code": (lambda d: _with_config(d, auto_map={"AutoConfig": "x.Y"}), UnsupportedModelError, "auto_map"),
    "quantised": (
        lambda d: _with_config(d, quantization_config={"quant_method": "gptq"}),
        UnsupportedModelError,
        "quantised .gptq",
    ),
    "activation": (lambda d: _with_config(d, hidden_act="gelu"), UnsupportedModelError, "hidden_act='gelu'"),
    "dynamic rope": (
        lambda d: _with_config(d, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}),
        UnsupportedModelError,
        "rope_type='dynamic'",
    ),
    "fp8": (
        lambda d: _with_tensor(d, f"{LAYER}.mlp.up_proj.weight", torch.ones(48, 32).to(torch.float8_e4m3fn)),
        UnsupportedModelError,
        "F8_E4M3",
    ),
    "pickle": (_pickle_only, UnsupportedModelError, "pickle"),
    "missing tensor": (
        lambda d: _with_tensor(d, f"{LAYER}.mlp.up_proj.weight", None),
        CheckpointError,
        r"1 tensors are missing.*up_proj",
    ),
    "wrong shape": (
        lambda d: _with_tensor(d, f"{LAYER}.mlp.up_proj.weight", torch.ones(47, 32)),
        CheckpointError,
        r"\(47, 32\).*\(48, 32\)",
    ),
    "tied but different": (lambda d: _with_config(d, tie_word_embeddings=True), CheckpointError, "lm_head"),
    "no config": (lambda d: (d / "config.json").unlink(), CheckpointError, "config.json does not exist"),
    "config no json": (lambda d: (d / "config.json").write_text("{"), CheckpointError, "config.json cannot be read"),
    "no weights": (lambda d: (d / "model.safetensors").unlink(), CheckpointError, r"holds no \*\.safetensors"),
    "truncated": (
        lambda d: (d / "model.safetensors").write_bytes((d / "model.safetensors").read_bytes()[:-100]),
        CheckpointError,
        "is truncated",
    ),
    "no header": (lambda d: (d / "model.safetensors").write_bytes(b"\xff" * 100), CheckpointError, "of another format"),
    "index escapes": (
        lambda d: (d / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../x"}}'),
        CheckpointError,
        "no safetensors file of this directory",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_by_name_and_reason(tmp_path: Path, dense: Path, case: str) -> None:
    damage, error, words = REFUSED[case]
    damage(dense)
    with pytest.raises(error, match=words):
        upcycle(dense, tmp_path / "moe")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["dense"], "a refusal must leave nothing behind"


def test_old_checkpoints_with_recomputed_buffers_are_read(tmp_path: Path, dense: Path) -> None:
    _with_tensor(dense, f"{LAYER}.self_attn.rotary_emb.inv_freq", torch.ones(4))
    upcycle(dense, tmp_path / "moe")
    load_moe(tmp_path / "moe")


def test_tied_model_may_carry_an_equal_head(tmp_path: Path) -> None:
    dense_model = save_dense(tmp_path / "dense", dense_config(tie_word_embeddings=True))
    _with_tensor(tmp_path / "dense", "lm_head.weight", dense_model.model.embed_tokens.weight.detach().clone())
    upcycle(tmp_path / "dense", tmp_path / "moe")
    assert_same_greedy_tokens(dense_model, load_moe(tmp_path / "moe"))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_experts": 2, "top_k": 3}, r"top_k=3: must be an integer in 1\.\.2"),
        ({"top_k": 0}, "top_k=0"),
        ({"num_experts": 0}, "num_experts=0"),
        ({"noise": -0.1}, "noise=-0.1"),
        ({"noise": float("nan")}, "noise=nan"),
        ({"seed": -1}, "seed=-1"),
        ({"dtype": "int8"}, "dtype='int8'"),
    ],
)
def test_arguments_are_checked(tmp_path: Path, dense: Path, options: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        upcycle(dense, tmp_path / "moe", **options)


def test_an_existing_target_is_not_touched(tmp_path: Path, dense: Path) -> None:
    (tmp_path / "moe").mkdir()
    upcycle(dense, tmp_path / "moe")  # empty: fine
    before = {p.name: p.stat().st_mtime_ns for p in (tmp_path / "moe").iterdir()}
    with pytest.raises(ConfigError, match="is not an empty directory"):
        upcycle(dense, tmp_path / "moe")
    assert {p.name: p.stat().st_mtime_ns for p in (tmp_path / "moe").iterdir()} == before


@pytest.mark.parametrize("failure", [OSError("disk full"), KeyboardInterrupt()])
def test_a_failed_run_leaves_nothing(tmp_path: Path, dense: Path, failure: BaseException) -> None:
    def progress(what: str, done: int, total: int) -> None:
        if done > total // 2:
            raise failure

    with pytest.raises(type(failure)):
        upcycle(dense, tmp_path / "moe", progress=progress)
    assert [p.name for p in tmp_path.iterdir()] == ["dense"]


def test_a_path_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="not fetched here"):
        upcycle(tmp_path / "absent", tmp_path / "moe")
