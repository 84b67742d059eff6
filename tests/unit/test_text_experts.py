"""Experts for text and experts for images in one checkpoint (ernie4_5_vl_moe): what is read of it, what is refused."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from saved_model import tensors_of, write

from epruntime.errors import CheckpointError, UnsupportedModelError
from epruntime.models import adapter
from epruntime.models.loader import features_of_model, inspect_model, load_model
from epruntime.models.small_config import small_config
from epruntime.testing import tiny_models
from epruntime.testing.holder import Holder

TYPE, EXPERTS, LAYERS = "ernie4_5_vl_moe", 8, (1, 2)
MLP = "model.layers.1.mlp"
BIAS = f"{MLP}.moe_statics.e_score_correction_bias"
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.save(tiny_models.build(TYPE)[1], tmp_path_factory.mktemp(TYPE))


def _expert(name: str) -> int | None:
    match = re.search(r"\.experts\.(\d+)\.", name)
    return int(match[1]) if match else None


def test_a_rank_reads_its_own_experts_for_text_alone(saved: Path) -> None:
    tensors, holder = tensors_of(saved), Holder((6, 1))
    model = load_model(saved, dtype="float32", moe=holder)
    assert {_expert(name) for name in tensors} == {None, *range(2 * EXPERTS)}
    for_images = {n for n in tensors if (_expert(n) or 0) >= EXPERTS or n.endswith("gate.weight_1")}
    towers = {n for n in tensors if n.startswith(("model.vision_model.", "model.resampler_model."))}
    biases = {n for n in tensors if n.endswith("e_score_correction_bias")}
    rest = {n for n in tensors if _expert(n) in (None, 1, 6)} - for_images - towers - biases
    assert for_images
    assert towers
    read = sum(tensors[n].nbytes for n in rest) + sum(tensors[n].nbytes // 2 for n in biases)
    assert model.load_report.read_bytes == read
    parameters = dict(model.module.named_parameters())
    assert not [name for name in parameters if "vision" in name]
    for layer in LAYERS:
        mlp, weights = f"model.layers.{layer}.mlp", holder.weights[layer]
        for slot, expert in enumerate((6, 1)):
            gate, up, down = (tensors[f"{mlp}.experts.{expert}.{n}_proj.weight"] for n in ("gate", "up", "down"))
            assert torch.equal(weights.up_SIH[slot], torch.cat((gate, up)))
            assert torch.equal(weights.down_SHI[slot], down)
        router = f"model.language_model.layers.{layer}.mlp.text_moe.gate"
        assert torch.equal(parameters[f"{router}.weight"], tensors[f"{mlp}.gate.weight"].t())
        stored = tensors[f"{mlp}.moe_statics.e_score_correction_bias"]
        assert torch.equal(parameters[f"{router}.moe_statics.e_score_correction_bias"], stored[:1])


def test_the_librarys_own_layout(tmp_path: Path) -> None:
    """Experts for text and those for images apart, those of a layer in one tensor."""
    model = tiny_models.build(TYPE)[1]
    model.save_pretrained(tmp_path, save_original_format=False)
    tensors, holder = tensors_of(tmp_path), Holder((6, 1))
    found = load_model(tmp_path, dtype="float32", moe=holder)
    experts = "model.language_model.layers.1.mlp.text_moe.experts"
    assert torch.equal(holder.weights[1].up_SIH, tensors[f"{experts}.gate_up_proj"][[6, 1]])
    assert torch.equal(holder.weights[1].down_SHI, tensors[f"{experts}.down_proj"][[6, 1]])
    for_images = {name for name in tensors if ".mlp.vision_moe." in name}
    assert for_images
    assert for_images <= set(found.load_report.ignored)


def _without(*names: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {name: tensor for name, tensor in tensors.items() if name not in names}


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (_without(f"{MLP}.experts.7.up_proj.weight"), "missing experts: 7"),
        (lambda t: t | {f"{MLP}.experts.16.down_proj.weight": torch.zeros(64, 32)}, "too many: 16"),
        (lambda t: t | {f"{MLP}.experts.3.down_proj.weight": torch.zeros(64, 16)}, "differ in shape"),
        (_without(f"{MLP}.gate.weight"), "gate.weight"),
        (lambda t: t | {f"{MLP}.gate.weight_2": torch.zeros(64, 8)}, "gate.weight_2"),
        (lambda t: t | {f"{MLP}.gate.weight_12": torch.zeros(64, 8)}, "gate.weight_12"),
        (lambda t: t | {f"{MLP}.gate.weight": torch.zeros(64, 9)}, r"\(9, 64\), the model needs \(8, 64\)"),
        (lambda t: t | {f"{MLP}.experts.9.stray.weight": torch.zeros(2)}, "stray"),
        (lambda t: t | {f"{MLP}.vision_moe.stray": torch.zeros(2)}, "stray"),
        (lambda t: t | {"model.layers.77.mlp.experts.9.up_proj.weight": torch.zeros(2)}, "77"),
        (lambda t: t | {BIAS: t[BIAS][:1].clone()}, r"\(1, 8\) cannot be cut into 2"),
        (lambda t: t | {BIAS: t[BIAS][:, :7].clone()}, r"shape \(1, 7\), config.json calls for \(1, 8\)"),
    ],
)
def test_a_damaged_checkpoint_is_refused(
    damage: Callable[[Tensors], Tensors], words: str, saved: Path, tmp_path: Path
) -> None:
    shutil.copy(saved / "config.json", tmp_path)
    write(tmp_path, damage(tensors_of(saved)))
    with pytest.raises(CheckpointError, match=words):
        inspect_model(tmp_path)


def test_a_missing_expert_for_images_is_not_missed(saved: Path, tmp_path: Path) -> None:
    """As with towers: nobody needs it. Numbers say which are for text, not how many there are."""
    shutil.copy(saved / "config.json", tmp_path)
    tensors = {name: tensor for name, tensor in tensors_of(saved).items() if _expert(name) != 9}
    write(tmp_path, tensors)
    holder, whole = Holder((7,)), Holder((7,))
    load_model(tmp_path, dtype="float32", moe=holder)
    load_model(saved, dtype="float32", moe=whole)
    assert torch.equal(holder.weights[1].down_SHI, whole.weights[1].down_SHI)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"mlp_layer_types": ["dense"] * 3}, "experts in no layer"),
        ({"moe_intermediate_size": [32]}, "cannot build this model from its config.json"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}}, "do not fit"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, "cannot build this model"),
    ],
)
def test_configurations_that_cannot_be_right_are_refused(fields: dict[str, object], words: str) -> None:
    config = small_config(TYPE, **fields)
    with pytest.raises(UnsupportedModelError, match=words):
        features_of_model(adapter.build_meta_model(config, torch.float32), config)
