"""Loading one rank's slice: equal to what from_pretrained loads, and no byte more than needed."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from safetensors import safe_open

from epruntime.errors import CheckpointError
from epruntime.models import adapter, text_part
from epruntime.models.conformance import COVERED
from epruntime.models.info import ModelInfo
from epruntime.models.loader import inspect_model, load_model
from epruntime.testing import tiny_models
from epruntime.testing.holder import Holder
from epruntime.testing.ragged import compare, local_runtime


def _on_the_interface(reference: Any, theirs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The library's tensors, those of experts in the form [E, 2I, H], [E, H, I] where the family keeps another, without
    those that text has no use for."""
    config = reference.config
    if config.model_type == "dbrx":
        for name in [n for n in theirs if n.endswith(".experts.mlp.w1")]:
            prefix = name.removesuffix("mlp.w1")
            w1, v1, w2 = (
                theirs.pop(f"{prefix}mlp.{matrix}").view(config.ffn_config.moe_num_experts, -1, config.d_model)
                for matrix in ("w1", "v1", "w2")
            )
            theirs[f"{prefix}gate_up_proj"] = torch.cat((w1, v1), dim=1)
            theirs[f"{prefix}down_proj"] = w2.transpose(1, 2)
    if config.model_type == "longcat_flash":
        for name in [n for n in theirs if n.endswith(".experts.gate_up_proj")]:
            theirs[name] = theirs[name][: config.n_routed_experts]
    if config.model_type == "ernie4_5_vl_moe":
        theirs = {name: tensor for name, tensor in theirs.items() if ".vision_moe." not in name}
        rotary = "model.language_model.rotary_emb"  # 5.16 has the second as a plain attribute
        theirs[f"{rotary}.original_inv_freq"] = theirs[f"{rotary}.inv_freq"]
    return theirs


def _check_equal(path: Path, local: Sequence[int], dtype: torch.dtype) -> None:
    """Every parameter and buffer equals the library's, experts cut to `local`."""
    holder = Holder(local)
    loaded = load_model(path, dtype=str(dtype).removeprefix("torch."), moe=holder)
    reference = text_part.from_pretrained(path, adapter.read_config(path), dtype)
    if text_part.is_multimodal(reference.config):
        text_part.keep_language_model(reference)
    experts = {name for name, module in loaded.module.named_modules() if hasattr(module, "has_gate")}
    mine = dict(loaded.module.named_parameters()) | dict(loaded.module.named_buffers())
    theirs = _on_the_interface(reference, dict(reference.named_parameters()) | dict(reference.named_buffers()))
    moved = set()
    for name, tensor in theirs.items():
        module, _, short = name.rpartition(".")
        if module not in experts:
            assert mine[name].dtype == tensor.dtype, name
            assert torch.equal(mine[name], tensor), name
            continue
        moved.add(name)
        weights = holder.weights[int(next(p for p in name.split(".") if p.isdigit()))]
        field = {
            "gate_up_proj": "up_SIH",
            "up_proj": "up_SIH",
            "down_proj": "down_SHI",
            "down_proj_bias": "down_bias_SH",
            "gate_up_proj_bias": "up_bias_SI",
            "up_proj_bias": "up_bias_SI",
        }[short]
        assert torch.equal(getattr(weights, field), tensor[list(local)]), name
    assert set(mine) == set(theirs) - moved
    assert loaded.load_report.read_bytes == loaded.load_report.needed_bytes


@pytest.mark.parametrize("model_type", tiny_models.available(COVERED))
def test_equals_from_pretrained(model_type: str, tmp_path: Path) -> None:
    """Ids out of order, non-contiguous and repeated, in fp32 and cast to bf16 (routers and biases may stay fp32)."""
    _, model = tiny_models.build(model_type)
    tiny_models.save(model, tmp_path)
    _check_equal(tmp_path, (6, 1, 2, 3), torch.float32)
    _check_equal(tmp_path, (7, 2, 3, 7, 3, 4), torch.bfloat16)


@pytest.mark.parametrize("model_type", ["mixtral", "gpt_oss", "deepseek_v3"])
def test_rank_without_experts(model_type: str, tmp_path: Path) -> None:
    _, model = tiny_models.build(model_type)
    tiny_models.save(model, tmp_path)
    _check_equal(tmp_path, (), torch.float32)


@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe"])
def test_already_fused_checkpoint(model_type: str, tmp_path: Path) -> None:
    """A checkpoint in the library's own fused layout is sliced by rows."""
    _, model = tiny_models.build(model_type)
    model.config.save_pretrained(tmp_path)
    state = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    safetensors.torch.save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert any(name.endswith("experts.gate_up_proj") for name in state)
    _write_architectures(tmp_path, type(model).__name__)
    _check_equal(tmp_path, (0, 5), torch.float32)
    _check_equal(tmp_path, (4, 5, 5, 4, 6), torch.float32)


@pytest.mark.parametrize("zero_experts", [4, 0])
def test_longcat_in_the_layout_of_the_library(zero_experts: int, tmp_path: Path) -> None:
    """The library's own layout has rows for experts that are the identity, too."""
    _, model = tiny_models.build("longcat_flash", zero_expert_num=zero_experts)
    model.save_pretrained(tmp_path, save_original_format=False)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        shape = file.get_slice("model.layers.0.mlp.experts.gate_up_proj").get_shape()
    assert shape[0] == 8 + zero_experts
    _check_equal(tmp_path, (0, 7), torch.float32)
    _check_equal(tmp_path, (4, 5, 5, 4, 6), torch.bfloat16)


def test_a_tensor_that_no_model_has_and_no_index_lists(tmp_path: Path) -> None:
    """What a single file may hold beside the model, a shard may hold too; whatever else the index leaves out, not."""
    _, model = tiny_models.build("mixtral")
    tiny_models.save(model, tmp_path, max_shard_size="100KB")
    shard = min(tmp_path.glob("*.safetensors"))
    tensors = safetensors.torch.load_file(shard)
    stray = "model.layers.0.self_attn.rotary_emb.inv_freq"
    safetensors.torch.save_file({**tensors, stray: torch.ones(8)}, shard, metadata={"format": "pt"})
    _check_equal(tmp_path, (3, 4), torch.float32)
    assert load_model(tmp_path, dtype="auto", moe=Holder((0,))).load_report.ignored == (stray,)
    safetensors.torch.save_file({**tensors, "model.lora_a": torch.ones(8)}, shard, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"disagree about 1 tensors: model\.lora_a"):
        inspect_model(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    data = json.loads(index.read_text())
    del data["weight_map"]["model.norm.weight"]
    index.write_text(json.dumps(data))
    safetensors.torch.save_file(tensors, shard, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"disagree about 1 tensors: model\.norm\.weight"):
        inspect_model(tmp_path)


def _write_architectures(path: Path, name: str) -> None:
    data = json.loads((path / "config.json").read_text())
    data["architectures"] = [name]
    (path / "config.json").write_text(json.dumps(data))


def test_sharded_checkpoint(tmp_path: Path) -> None:
    _, model = tiny_models.build("qwen2_moe")
    tiny_models.save(model, tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    _check_equal(tmp_path, (3, 4), torch.float32)


@pytest.mark.parametrize("kept", ["model.embed_tokens.weight", "lm_head.weight", "both"])
def test_tied_embeddings(kept: str, tmp_path: Path) -> None:
    _, model = tiny_models.build("mixtral", tie_word_embeddings=True)
    tiny_models.save(model, tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as source:
        tensors = {name: source.get_tensor(name) for name in source.keys()}  # noqa: SIM118
    (present,) = [n for n in tensors if n in ("model.embed_tokens.weight", "lm_head.weight")]
    weight = tensors.pop(present)
    names = ("model.embed_tokens.weight", "lm_head.weight") if kept == "both" else (kept,)
    tensors |= {name: weight.clone() for name in names}
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors")
    loaded = load_model(tmp_path, dtype="float32", moe=local_runtime())
    inner: Any = loaded.module
    assert inner.lm_head.weight is inner.model.embed_tokens.weight
    assert torch.equal(inner.lm_head.weight, weight)
    found = compare(model, loaded)
    assert found.error < 8 * found.eager_error


def test_draft_layers_are_not_read(tmp_path: Path) -> None:
    """DeepSeek-V3 checkpoints hold a layer for speculative decoding that is no part of the model."""
    _, model = tiny_models.build("deepseek_v3", num_hidden_layers=2)
    tiny_models.save(model, tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as source:
        tensors = {name: source.get_tensor(name) for name in source.keys()}  # noqa: SIM118
    tensors["model.layers.61.eh_proj.weight"] = torch.zeros(1000)
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors")
    loaded = load_model(tmp_path, dtype="auto", moe=local_runtime())
    report = loaded.load_report
    assert report.ignored == ("model.layers.61.eh_proj.weight",)
    assert report.checkpoint_bytes - report.read_bytes == 4000


def test_draft_layers_are_known_by_what_they_hold(tmp_path: Path) -> None:
    """Of a model with another number of layers, the draft layer has another number than transformers knows."""
    _, model = tiny_models.build("glm4_moe", num_hidden_layers=2)
    tiny_models.save(model, tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as source:
        tensors = {name: source.get_tensor(name) for name in source.keys()}  # noqa: SIM118
    layer = {n.replace("layers.1.", "layers.2."): x.clone() for n, x in tensors.items() if ".layers.1." in n}
    assert any(".experts." in name for name in layer)
    safetensors.torch.save_file(tensors | layer, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="have no place in the model"):
        inspect_model(tmp_path)
    layer |= {f"model.layers.2.{name}.weight": torch.zeros(8) for name in ("eh_proj", "enorm", "shared_head.norm")}
    safetensors.torch.save_file(tensors | layer, tmp_path / "model.safetensors")
    report = load_model(tmp_path, dtype="auto", moe=local_runtime()).load_report
    assert set(report.ignored) == set(layer)


_COUNT = """
import sys
from epruntime.models.loader import inspect_model, load_model
from epruntime.testing.holder import Holder

def rchar():
    return int(open("/proc/self/io").readline().split()[1])

path, dtype = sys.argv[1], sys.argv[2]
local = [int(x) for x in sys.argv[3].split(",") if x]
load_model(sys.argv[4], dtype="auto", moe=Holder([0]))  # everything that is imported late is imported now
before = rchar()
model = load_model(path, dtype=dtype, moe=Holder(local))
read = rchar() - before
print(read, model.load_report.needed_bytes, model.load_report.header_bytes, model.load_report.checkpoint_bytes)
"""


@pytest.mark.parametrize(
    ("model_type", "local"),
    [
        ("qwen3_moe", "0,1,2,3,4,5,6,7"),
        ("qwen3_moe", "2,3"),
        ("gpt_oss", "5,5"),
        ("deepseek_v3", "1,6,1"),
        ("mixtral", ""),
    ],
)
def test_bytes_read(model_type: str, local: str, tmp_path: Path) -> None:
    """The kernel's own count of bytes read by the process: at most 1.05 x the needed ones, plus headers."""
    _, small = tiny_models.build(model_type, num_hidden_layers=1, **_one_layer(model_type))
    warm = tiny_models.save(small, tmp_path / "warm")
    _, model = tiny_models.build(model_type, hidden_size=256, moe_intermediate_size=256, intermediate_size=512)
    path = tiny_models.save(model, tmp_path / "model")
    out = subprocess.run(
        [sys.executable, "-c", _COUNT, str(path), "auto", local, str(warm)],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    read, needed, headers, whole = map(int, out.stdout.split())
    with safe_open(path / "model.safetensors", "pt") as source:
        sizes = {name: _bytes_of(source.get_slice(name)) for name in source.keys()}  # noqa: SIM118
    assert whole == sum(sizes.values())
    expected = sum(size for name, size in sizes.items() if ".experts." not in name)
    share = len({x for x in local.split(",") if x}) / 8  # an expert that is there twice is read once
    expected += int(share * sum(size for name, size in sizes.items() if ".experts." in name))
    assert needed == expected
    # config.json and generation_config.json are read too, some of them more than once
    assert read <= 1.05 * needed + headers + 32768, (read, needed, headers)


def _one_layer(model_type: str) -> dict[str, Any]:
    if model_type == "gpt_oss":
        return {"layer_types": ["full_attention"]}
    return {"first_k_dense_replace": 0} if model_type == "deepseek_v3" else {}


def _bytes_of(part: Any) -> int:
    count = {"F32": 4, "BF16": 2}[part.get_dtype()]
    for size in part.get_shape():
        count *= size
    return count


def test_info(tmp_path: Path) -> None:
    _, model = tiny_models.build("deepseek_v3", eos_token_id=2)
    tiny_models.save(model, tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 9, 5, 128]}))
    info = inspect_model(tmp_path)
    assert info.architecture == "DeepseekV3ForCausalLM"
    assert (info.dtype, info.vocab_size, info.num_layers, info.num_experts, info.top_k) == ("float32", 128, 3, 8, 2)
    assert (info.moe_layers, info.eos_token_ids, info.max_position_embeddings) == ((1, 2), (2, 5, 9), 512)
    assert info.eos_warning.startswith("generation_config.json names eos_token_id 128, but vocab_size=128")
    # latent 16 and rotary key 8, fp32, three layers: nothing else is cached
    assert info.kv_bytes_per_token == 3 * (16 + 8) * 4
    assert inspect_model(tmp_path, dtype="bfloat16").kv_bytes_per_block(16) == 16 * 3 * 24 * 2
    assert info.num_parameters == sum(p.numel() for p in model.state_dict().values())
    assert ModelInfo.from_dict(json.loads(json.dumps(info.to_dict()))) == info


def test_progress_and_no_leftover_weights(tmp_path: Path) -> None:
    _, model = tiny_models.build("olmoe")
    tiny_models.save(model, tmp_path)
    seen: list[tuple[str, int, int]] = []
    loaded = load_model(tmp_path, dtype="auto", moe=Holder((0, 1)), progress=lambda *args: seen.append(args))
    done = [d for _, d, _ in seen]
    assert done == sorted(done)
    assert seen[-1] == ("weights", loaded.load_report.needed_bytes, loaded.load_report.needed_bytes)
    assert not any(".experts." in name for name, _ in loaded.module.named_parameters())
    loaded.close()
    assert not list(loaded.module.parameters())


def test_no_cache_object_is_made(tmp_path: Path) -> None:
    """Models without latents run with no cache at all: transformers must not make one of its own each step."""
    from epruntime.testing.ragged import RaggedDriver

    _, model = tiny_models.build("granitemoe")
    tiny_models.save(model, tmp_path)
    loaded = load_model(tmp_path, dtype="auto", moe=local_runtime())
    seen: list[Any] = []
    loaded.module.register_forward_hook(lambda _m, _i, output: seen.append(output))
    RaggedDriver(loaded).step([("a", torch.arange(3, 8))])
    values = [getattr(seen[0], name, None) for name in ("cache", "past_key_values")]
    assert values == [None, None]
