"""Checkpoints that are refused, each with the reason in words."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers
from safetensors import safe_open

from epruntime.errors import CheckpointError, EPRuntimeError, UnsupportedModelError
from epruntime.models import adapter, text_part
from epruntime.models.conformance import COVERED
from epruntime.models.loader import inspect_model, load_model
from epruntime.models.refusal import REFUSED
from epruntime.models.small_config import small_config
from epruntime.testing import tiny_models
from epruntime.testing.ragged import local_runtime


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    _, model = tiny_models.build("mixtral", num_hidden_layers=1)
    return tiny_models.save(model, tmp_path_factory.mktemp("mixtral"))


@pytest.fixture
def copy(mixtral: Path, tmp_path: Path) -> Path:
    for file in mixtral.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def _config(path: Path, **changes: Any) -> None:
    data = json.loads((path / "config.json").read_text())
    data.update(changes)
    (path / "config.json").write_text(json.dumps({k: v for k, v in data.items() if v is not ...}))


def _tensors(path: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    file = path / "model.safetensors"
    with safe_open(file, "pt") as source:
        tensors = {name: source.get_tensor(name).clone() for name in source.keys()}  # noqa: SIM118
    change(tensors)
    safetensors.torch.save_file(tensors, file)


def _names(path: Path, ending: str) -> list[str]:
    with safe_open(path / "model.safetensors", "pt") as source:
        return [name for name in source.keys() if name.endswith(ending)]  # noqa: SIM118


def _refused(path: Path, kind: type[EPRuntimeError], *words: str) -> None:
    for call in (lambda: inspect_model(path), lambda: load_model(path, dtype="auto", moe=local_runtime())):
        with pytest.raises(kind) as caught:
            call()
        for word in words:
            assert word in str(caught.value)


def test_dense_model(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    _refused(tmp_path, UnsupportedModelError, "LlamaForCausalLM", "dense model")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"auto_map": {"AutoModelForCausalLM": "m.M"}, "model_type": "no_such_type"},
            ["no_such_type", "modelling code", "auto_map"],
        ),
        ({"auto_map": {"AutoModelForCausalLM": "m.M"}, "architectures": ["MyForCausalLM"]}, ["MyForCausalLM"]),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, ["quantised", "gptq"]),
        ({"vision_config": {"hidden_size": 8}}, ["multimodal", "vision_config"]),
        ({"model_type": "no_such_type"}, ["no_such_type", "epruntime models"]),
        ({"model_type": "mixtrel"}, ["mixtrel", "did you mean mixtral?"]),
        ({"model_type": ...}, ["model_type"]),
        (
            {"architectures": ["MixtralForSequenceClassification"]},
            ["MixtralForSequenceClassification", "MixtralForCausalLM"],
        ),
        ({"dtype": "float16"}, ["float16", "bfloat16"]),
        ({"rope_parameters": {"rope_type": "axial", "rope_theta": 1e4}}, ["axial"]),
        (
            {
                "rope_parameters": {
                    "rope_type": "longrope",
                    "rope_theta": 1e4,
                    "short_factor": [1.0] * 8,
                    "long_factor": [2.0] * 5,
                    "original_max_position_embeddings": 16,
                }
            },
            ["longrope", "request by request"],
        ),
        ({"num_local_experts": "many"}, ["config.json"]),
    ],
)
def test_config(changes: dict[str, Any], words: list[str], copy: Path) -> None:
    _config(copy, **changes)
    _refused(copy, UnsupportedModelError, *words)


@pytest.mark.parametrize(
    ("changes", "kind", "words"),
    [
        ({"max_position_embeddings": 0}, CheckpointError, ["max_position_embeddings=0"]),
        ({"num_hidden_layers": 10**7}, CheckpointError, ["num_hidden_layers=10000000", "tensors in all"]),
        ({"num_experts_per_tok": 0}, UnsupportedModelError, ["top-k 0"]),
        ({"num_experts_per_tok": 9}, UnsupportedModelError, ["do not fit each other"]),
    ],
)
def test_sizes_that_cannot_be(
    changes: dict[str, Any], kind: type[EPRuntimeError], words: list[str], copy: Path
) -> None:
    _config(copy, **changes)
    _refused(copy, kind, *words)


def test_an_architecture_in_other_letters_is_the_same(tmp_path: Path) -> None:
    """Phi-3.5-MoE is published as PhiMoEForCausalLM; transformers writes PhimoeForCausalLM."""
    _, model = tiny_models.build("phimoe", num_hidden_layers=1)
    tiny_models.save(model, tmp_path)
    for name in ("PhiMoEForCausalLM", "Phi_moe_ForCausalLM"):
        _config(tmp_path, architectures=[name])
        assert inspect_model(tmp_path).architecture == "PhimoeForCausalLM"
    _config(tmp_path, architectures=["PhiMoEForSequenceClassification"])
    _refused(tmp_path, UnsupportedModelError, "PhiMoEForSequenceClassification", "PhimoeForCausalLM only")


@pytest.mark.parametrize(
    ("model_type", "architecture"), [("sarvam_moe", "SarvamMoEForCausalLM"), ("sarvam_mla", "SarvamMLAForCausalLM")]
)
def test_a_class_that_transformers_serves_by_another_one(model_type: str, architecture: str, tmp_path: Path) -> None:
    if not tiny_models.available([model_type]):
        pytest.skip(f"this transformers has no {model_type}")
    tiny_models.save(tiny_models.build(model_type)[1], tmp_path)
    _config(tmp_path, architectures=[architecture])
    assert inspect_model(tmp_path).model_type == model_type
    _config(tmp_path, architectures=[architecture.replace("CausalLM", "SequenceClassification")])
    _refused(tmp_path, UnsupportedModelError, "SequenceClassification")


def test_a_language_model_by_its_published_name(tmp_path: Path) -> None:
    tiny_models.save(tiny_models.build("kimi_k25")[1], tmp_path)
    text = json.loads((tmp_path / "config.json").read_text())["text_config"]
    _config(tmp_path, text_config=text | {"model_type": "kimi_k2"})
    assert inspect_model(tmp_path).model_type == "kimi_k25"


def test_an_adapter_beside_the_weights(copy: Path) -> None:
    """transformers would apply it where peft is installed."""
    (copy / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    _refused(copy, CheckpointError, "adapter", "merge_and_unload", "remove adapter_config.json")
    for file in copy.glob("*.safetensors"):
        file.unlink()
    _refused(copy, CheckpointError, "adapter", "merge_and_unload")


def test_a_table_smaller_than_the_vocabulary(tmp_path: Path) -> None:
    _, model = tiny_models.build("gemma4_text", hidden_size_per_layer_input=8, vocab_size_per_layer_input=100)
    tiny_models.save(model, tmp_path)
    _refused(tmp_path, CheckpointError, "vocab_size=128", "embed_tokens_per_layer", "vocab_size_per_layer_input=100")


@pytest.mark.parametrize("expert", [-1, 8])
def test_a_token_that_is_sent_to_no_expert(expert: int, tmp_path: Path) -> None:
    _, model = tiny_models.build("deepseek_v4")
    tiny_models.save(model, tmp_path)
    (name,) = _names(tmp_path, "tid2eid")

    def damage(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name][110, 1] = expert

    load_model(tmp_path, dtype="auto", moe=local_runtime())
    _tensors(tmp_path, damage)
    with pytest.raises(CheckpointError, match=rf"tid2eid sends token id 110 to expert {expert}; .* 0 to 7"):
        load_model(tmp_path, dtype="auto", moe=local_runtime())


@pytest.mark.parametrize(
    ("model_type", "overrides"), [("llama4_text", {"moe_layers": []}), ("qwen3_moe", {"mlp_only_layers": [0, 1, 2]})]
)
def test_experts_in_no_layer(model_type: str, overrides: dict[str, Any], tmp_path: Path) -> None:
    _, model = tiny_models.build(model_type, **overrides)
    tiny_models.save(model, tmp_path)
    _refused(tmp_path, UnsupportedModelError, f"{type(model).__name__}: config.json puts experts in no layer")


@pytest.mark.parametrize("eos", ["</s>", [[2]], [2, "</s>"], {"a": 1}])
def test_end_of_sequence_that_is_no_token_id(eos: Any, copy: Path) -> None:
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    _refused(copy, CheckpointError, "generation_config.json", "eos_token_id")


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.0.block_sparse_moe.experts.3.w2.weight"])
@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int32])
def test_integers_in_place_of_weights(name: str, dtype: torch.dtype, copy: Path) -> None:
    """Quantised weights of a checkpoint whose config.json does not say so."""
    _tensors(copy, lambda tensors: tensors.update({name: tensors[name].to(dtype)}))
    _refused(copy, UnsupportedModelError, name, str(dtype), "quantised")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "model.safetensors.index.json"])
@pytest.mark.timeout(60)
def test_a_pipe_in_place_of_a_file_is_not_waited_for(name: str, copy: Path) -> None:
    (copy / name).unlink(missing_ok=True)
    os.mkfifo(copy / name)
    if name.endswith("index.json"):
        assert inspect_model(copy).num_experts == 8  # model.safetensors is there: the index is not needed
    else:
        _refused(copy, CheckpointError, name, "not a regular file")


@pytest.mark.parametrize("model_type", sorted(REFUSED))
def test_refused_types_are_named(model_type: str, copy: Path) -> None:
    assert model_type not in COVERED
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    if model_type not in CONFIG_MAPPING_NAMES:
        pytest.skip(f"transformers {transformers.__version__} has no {model_type}")
    (copy / "config.json").write_text(json.dumps({"model_type": model_type}))
    _refused(copy, UnsupportedModelError, model_type, REFUSED[model_type])


def test_uncovered_type_and_feature(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(COVERED, "mixtral", frozenset())
    inspect_model(copy)
    _config(copy, sliding_window=8)
    _refused(copy, UnsupportedModelError, "mixtral", "no conformance test", "window")
    monkeypatch.delitem(COVERED, "mixtral")
    _refused(copy, UnsupportedModelError, "mixtral", "no conformance test covers this model type")


@pytest.mark.parametrize(
    "model_type",
    ["bloom", "blt", "cpmant", "falcon_mamba", "mpt", "musicgen", "pi0", "pix2struct", "qwen2_5_omni", "t5gemma2",
     "udop", "vision-encoder-decoder", "whisper", "xlstm"],
)  # fmt: skip
def test_a_configuration_of_another_kind_is_refused(model_type: str, copy: Path) -> None:
    if not adapter.is_native(model_type):
        pytest.skip(f"transformers {transformers.__version__} has no {model_type}")
    (copy / "config.json").write_text(json.dumps({"model_type": model_type}))
    with pytest.raises(EPRuntimeError):  # and no AttributeError
        inspect_model(copy)


def test_tensors_of_which_the_model_has_nothing(tmp_path: Path) -> None:
    """Fused projections where the queries of the configuration are not of low rank: found before a weight is read."""
    config = small_config("kimi_k25")
    config.text_config.q_lora_rank = None
    tiny_models.save(text_part.whole_class(config)._from_config(config, dtype=torch.float32), tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        if not any("wqkv" in name for name in file.keys()):  # noqa: SIM118  it is no mapping
            pytest.skip(f"transformers {transformers.__version__} does not fuse them")
    with pytest.raises(CheckpointError, match=r"does not have: .*k_proj"):
        inspect_model(tmp_path)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda up, gate: {}, r"missing: moe\.up_proj\.weight"),
        (lambda up, gate: {"up": up[:, :, 1:]}, "unequal shapes"),
        (lambda up, gate: {"up": up[:, 4:], "gate": torch.cat((gate, up[:, :4]), 1)}, "unequal shapes"),
        (lambda up, gate: {"up": up[:, 1:], "gate": gate[:, 1:]}, "the model needs"),
    ],
)
def test_a_conversion_that_cannot_be_done_is_refused_before_a_weight_is_read(
    damage: Callable[..., dict[str, torch.Tensor]], words: str, tmp_path: Path
) -> None:
    """Experts of one tensor for all of a kind, of which two make one: no plain stacking."""
    tiny_models.save(tiny_models.build("step3p7")[1], tmp_path)
    tensors = safetensors.torch.load_file(tmp_path / "model.safetensors")
    prefix = next(name for name in tensors if name.endswith("moe.up_proj.weight")).removesuffix("up_proj.weight")
    up, gate = tensors.pop(f"{prefix}up_proj.weight"), tensors[f"{prefix}gate_proj.weight"]
    tensors |= {f"{prefix}{name}_proj.weight": value.contiguous() for name, value in damage(up, gate).items()}
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=words):
        inspect_model(tmp_path)


def test_a_window_of_the_cache_alone(tmp_path: Path) -> None:
    """transformers' cache would drop keys that its masks let every query see."""
    tiny_models.save(tiny_models.build("qwen3_vl_moe")[1], tmp_path)
    inspect_model(tmp_path)
    text = json.loads((tmp_path / "config.json").read_text())["text_config"]
    _config(tmp_path, text_config=text | {"sliding_window": 8})
    _refused(tmp_path, UnsupportedModelError, "sliding_window=8", "layer 0")


def test_missing_tensors_are_listed(copy: Path) -> None:
    def drop(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["model.norm.weight"], tensors["model.layers.0.self_attn.q_proj.weight"]

    _tensors(copy, drop)
    _refused(copy, CheckpointError, "2 tensors", "model.norm.weight", "model.layers.0.self_attn.q_proj.weight")


def test_missing_expert_is_named(copy: Path) -> None:
    def drop(tensors: dict[str, torch.Tensor]) -> None:
        (name,) = [n for n in tensors if ".experts.5.w1" in n]
        del tensors[name]

    _tensors(copy, drop)
    _refused(copy, CheckpointError, "missing experts: 5", "w1")


def test_missing_projection_of_all_experts(copy: Path) -> None:
    def drop(tensors: dict[str, torch.Tensor]) -> None:
        for name in [n for n in tensors if ".w3." in n]:
            del tensors[name]

    _tensors(copy, drop)
    _refused(copy, CheckpointError, "w3")


def test_one_expert_too_many(copy: Path) -> None:
    def add(tensors: dict[str, torch.Tensor]) -> None:
        for name in [n for n in tensors if ".experts.7." in n]:
            tensors[name.replace(".7.", ".8.")] = tensors[name].clone()

    _tensors(copy, add)
    _refused(copy, CheckpointError, "0 to 7", "found 9", "too many: 8")


def test_extra_tensors_are_listed(copy: Path) -> None:
    _tensors(copy, lambda tensors: tensors.update({"model.layers.0.lora_a": torch.zeros(2)}))
    _refused(copy, CheckpointError, "no place", "model.layers.0.lora_a")


@pytest.mark.parametrize(
    "name", ["model.norm.weight", "model.embed_tokens.weight", "model.layers.0.block_sparse_moe.experts.3.w2.weight"]
)
def test_wrong_shape(name: str, copy: Path) -> None:
    def cut(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name] = tensors[name][:-1].clone()

    _tensors(copy, cut)
    _refused(copy, CheckpointError, "shape")


def test_pickle_only(copy: Path) -> None:
    (copy / "model.safetensors").unlink()
    (copy / "pytorch_model.bin").write_bytes(b"")
    _refused(copy, UnsupportedModelError, "pickle", "pytorch_model.bin")


def test_nothing_there(copy: Path) -> None:
    (copy / "model.safetensors").unlink()
    _refused(copy, CheckpointError, "no *.safetensors")
    _refused(copy / "absent", CheckpointError, "no directory")
    (copy / "config.json").write_text("{")
    _refused(copy, CheckpointError, "config.json")


@pytest.mark.parametrize(
    ("index", "words"),
    [
        ({"weight_map": {"a": "../model.safetensors"}}, "no safetensors file of this directory"),
        ({"weight_map": {"a": "absent.safetensors"}}, "absent.safetensors"),
        ({"weight_map": {"a": "model.safetensors"}}, "disagree"),
        ({"weight_map": {}}, "no weight_map"),
        ({"weight_map": {"a": ["model.safetensors"]}}, "no safetensors file of this directory"),
        ([], "no JSON object"),
    ],
)
def test_bad_index(index: Any, words: str, copy: Path) -> None:
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    _refused(copy, CheckpointError, words)


def test_two_models_in_one_directory(copy: Path) -> None:
    """transformers takes the single file; which of the two is meant, nobody can know."""
    model = tiny_models.build("mixtral", seed=1)[1]
    model.save_pretrained(copy, max_shard_size="500KB")
    assert (copy / "model.safetensors").exists()
    assert (copy / "model.safetensors.index.json").exists()
    _refused(copy, CheckpointError, "two models", "Remove the one")
    (copy / "model.safetensors").unlink()
    inspect_model(copy)


def test_an_index_that_an_earlier_model_left(copy: Path) -> None:
    (copy / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "absent.safetensors"}}))
    _refused(copy, CheckpointError, "absent.safetensors", "remove model.safetensors.index.json")


@pytest.mark.parametrize("name", ["transformers_weights", "configuration_files"])
def test_config_that_names_other_files(name: str, copy: Path) -> None:
    _config(copy, **{name: ["other"]})
    _refused(copy, UnsupportedModelError, name, "usual names")


def test_truncated_file(copy: Path) -> None:
    data = (copy / "model.safetensors").read_bytes()
    (copy / "model.safetensors").write_bytes(data[:-10])
    _refused(copy, CheckpointError, "truncated")


def test_remote_code_is_never_imported(copy: Path) -> None:
    marker = copy / "ran"
    (copy / "m.py").write_text(f"open({str(marker)!r}, 'w')\n")
    _config(copy, auto_map={"AutoConfig": "m.C", "AutoModelForCausalLM": "m.M"}, model_type="unknown_remote")
    _refused(copy, UnsupportedModelError, "never run")
    # a type that transformers itself defines is served by transformers' own code
    _config(copy, model_type="mixtral")
    assert inspect_model(copy).architecture == "MixtralForCausalLM"
    assert not marker.exists()
