"""The language model of a multimodal checkpoint: what is read of it, what may be left over, and what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from saved_model import configure, tensors_of, write

from epruntime.errors import CheckpointError, UnsupportedModelError
from epruntime.models import adapter, text_part
from epruntime.models.conformance import COVERED, LANGUAGES, SINCE
from epruntime.models.loader import inspect_model, load_model
from epruntime.models.small_config import small_config
from epruntime.testing import tiny_models
from epruntime.testing.holder import Holder
from epruntime.testing.ragged import local_runtime

#: By the class of the whole model, by that of a causal LM in it, and one that may hold any language model.
TYPES = ("qwen3_vl_moe", "llama4", "mistral3")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("multimodal")
    return {t: tiny_models.save(tiny_models.build(t)[1], folder / t) for t in TYPES}


@pytest.fixture
def copy_of(saved: dict[str, Path], tmp_path: Path) -> Callable[[str], Path]:
    return lambda model_type: Path(shutil.copytree(saved[model_type], tmp_path / model_type))


@pytest.mark.parametrize("model_type", TYPES)
def test_towers_are_not_read(model_type: str, saved: dict[str, Path]) -> None:
    model = load_model(saved[model_type], dtype="float32", moe=local_runtime())
    sizes = {name: tensor.nbytes for name, tensor in tensors_of(saved[model_type]).items()}
    towers = {name for name in sizes if name.startswith(("model.visual.", "vision_", "multi_modal"))}
    assert towers
    assert set(model.load_report.ignored) == towers
    assert model.load_report.read_bytes == sum(sizes.values()) - sum(sizes[name] for name in towers)
    assert not [name for name, _ in model.module.named_parameters() if "vis" in name]
    assert model.info.model_type == model_type
    assert (
        model.info.shared_bytes + sum(n * size for n, size in model.info.expert_bytes) == model.load_report.read_bytes
    )


@pytest.mark.parametrize("model_type", TYPES)
def test_only_tensors_of_towers_may_be_left_over(model_type: str, copy_of: Callable[[str], Path]) -> None:
    path = copy_of(model_type)
    tensors = tensors_of(path)
    tower = next(name for name in tensors if name.startswith(("model.visual.", "vision_")))
    write(path, {name: tensor for name, tensor in tensors.items() if name != tower})
    inspect_model(path)  # nobody needs it
    write(path, tensors | {"model.language_model.layers.0.mlp.stray.weight": torch.zeros(2)})
    with pytest.raises(CheckpointError, match="stray"):
        inspect_model(path)
    needed = next(name for name in tensors if "embed_tokens" in name)
    write(path, {name: tensor for name, tensor in tensors.items() if name != needed})
    with pytest.raises(CheckpointError, match="embed_tokens"):
        inspect_model(path)


def test_a_quantised_part_is_refused(copy_of: Callable[[str], Path]) -> None:
    path = copy_of("qwen3_vl_moe")
    text = json.loads((path / "config.json").read_text())["text_config"]
    configure(path, text_config=text | {"quantization_config": {"quant_method": "compressed-tensors"}})
    with pytest.raises(UnsupportedModelError, match=r"quantised \(method compressed-tensors\)"):
        inspect_model(path)


def test_another_language_model_than_the_tested_one_is_refused(tmp_path: Path) -> None:
    assert set(LANGUAGES) <= set(COVERED)
    config = type(small_config("mistral3"))(
        text_config=small_config("mixtral"), vision_config=small_config("mistral3").vision_config
    )
    text_part.whole_class(config)._from_config(config).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="a mixtral, and no conformance test covers another than mistral4"):
        inspect_model(tmp_path)


def test_a_multimodal_type_without_a_test_is_refused(
    copy_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = copy_of("qwen3_vl_moe")
    monkeypatch.delitem(COVERED, "qwen3_vl_moe")
    with pytest.raises(
        UnsupportedModelError, match=r"multimodal checkpoint \(text_config, vision_config\).*`epruntime"
    ):
        inspect_model(path)


@pytest.mark.parametrize("model_type", ["qwen3_5_moe", "dots3_note", "llama4"])
@pytest.mark.parametrize("outer", [True, False])
@pytest.mark.parametrize("inner", [True, False])
def test_a_head_is_tied_where_it_is_in_the_whole_model(
    model_type: str, outer: bool, inner: bool, tmp_path: Path
) -> None:
    """transformers has a causal LM class for these types, whose head is the whole model's."""
    if SINCE.get(model_type, (0, 0)) > adapter.version():
        pytest.skip("this transformers has no such type")
    config = small_config(model_type)
    config.tie_word_embeddings, config.text_config.tie_word_embeddings = outer, inner
    whole = text_part.whole_class(config)._from_config(config, dtype=torch.float32).eval()
    whole.save_pretrained(tmp_path)
    tied = whole.get_output_embeddings().weight is whole.get_input_embeddings().weight
    assert tied == (inner if model_type == "llama4" else outer)
    if not tied:
        assert any("lm_head" in name for name in tensors_of(tmp_path))
    inspect_model(tmp_path)
    reference = text_part.from_pretrained(tmp_path, adapter.read_config(tmp_path), torch.float32)
    assert torch.equal(reference.get_output_embeddings().weight, whole.get_output_embeddings().weight)
    heads = {name: tensor for name, tensor in tensors_of(tmp_path).items() if "lm_head" not in name}
    write(tmp_path, heads)
    if tied:
        inspect_model(tmp_path)
        return
    with pytest.raises(CheckpointError, match=r"missing: .*lm_head"):
        inspect_model(tmp_path)


def test_the_class_that_is_served() -> None:
    """transformers' own choice: a causal LM reads its part, where there is one for the type."""
    names = {t: text_part.class_for(small_config(t))[0].__name__ for t in (*TYPES, "mixtral")}
    assert names == {
        "qwen3_vl_moe": "Qwen3VLMoeForConditionalGeneration",
        "llama4": "Llama4ForCausalLM",
        "mistral3": "Mistral3ForConditionalGeneration",
        "mixtral": "MixtralForCausalLM",
    }
    assert text_part.architectures(small_config("llama4")) == ["Llama4ForCausalLM", "Llama4ForConditionalGeneration"]


def test_nothing_is_left_out_of_a_text_model() -> None:
    model = adapter.build_meta_model(small_config("mixtral"), torch.float32)
    assert text_part.left_out(model) is None


@pytest.mark.parametrize("transposed", [False, True])
def test_experts_that_are_stored_in_either_orientation(transposed: bool, tmp_path: Path) -> None:
    """Published Qwen3-VL-MoE checkpoints hold [E, H, 2I], those that the library saves [E, 2I, H]: told by the shape.

    A rank reads some of the experts; the shape that counts is that of all.
    """
    path = tiny_models.save(tiny_models.build("qwen3_vl_moe", moe_intermediate_size=40)[1], tmp_path)
    tensors = tensors_of(path)
    experts = [name for name in tensors if ".mlp.experts." in name]
    if transposed:
        write(path, {n: t.transpose(1, 2).contiguous() if n in experts else t for n, t in tensors.items()})
    holder = Holder((1, 6))
    load_model(path, dtype="float32", moe=holder)
    for name in experts:
        weights = holder.weights[int(next(part for part in name.split(".") if part.isdigit()))]
        found = weights.up_SIH if "gate_up" in name else weights.down_SHI
        assert torch.equal(found, tensors[name][[1, 6]]), name


def test_a_square_matrix_of_a_part_of_the_experts_is_not_turned(tmp_path: Path) -> None:
    model = tiny_models.build("qwen3_vl_moe", hidden_size=64, moe_intermediate_size=64)[1]
    path = tiny_models.save(model, tmp_path)
    holder = Holder((3,))
    load_model(path, dtype="float32", moe=holder)
    stored = tensors_of(path)["model.language_model.layers.0.mlp.experts.down_proj"]
    assert stored.shape == (8, 64, 64)
    assert torch.equal(holder.weights[0].down_SHI, stored[[3]])
