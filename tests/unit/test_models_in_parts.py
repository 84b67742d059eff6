"""A checkpoint of a model that answers by several in turn, text and then speech: the part that writes is served."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from saved_model import configure, tensors_of, write

from epruntime.errors import CheckpointError, UnsupportedModelError
from epruntime.models import text_part
from epruntime.models.eos import end_ids
from epruntime.models.loader import inspect_model, load_model
from epruntime.models.small_config import small_config
from epruntime.testing import tiny_models
from epruntime.testing.ragged import RaggedDriver, local_runtime

WHOLE, PART = "qwen3_omni_moe", "qwen3_omni_moe_thinker"
LANGUAGE = ("thinker.model.", "thinker.lm_head.")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same weights, saved by the class of all models and by that of the one that writes."""
    folder = tmp_path_factory.mktemp("parts")
    model = tiny_models.build(WHOLE, dtype=torch.bfloat16)[1]
    tiny_models.save(model, folder / WHOLE)
    model.save_pretrained(folder / PART)
    return {WHOLE: folder / WHOLE, PART: folder / PART}


@pytest.fixture
def copied(saved: dict[str, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved[WHOLE], tmp_path / WHOLE))


def test_nothing_but_its_language_model_is_read(saved: dict[str, Path]) -> None:
    model = load_model(saved[WHOLE], dtype="auto", moe=local_runtime())
    sizes = {name: tensor.nbytes for name, tensor in tensors_of(saved[WHOLE]).items()}
    others = {name for name in sizes if not name.startswith(LANGUAGE)}
    assert {name.split(".")[0] for name in others} == {"thinker", "talker", "code2wav"}
    assert set(model.load_report.ignored) == others
    assert model.load_report.read_bytes == sum(sizes.values()) - sum(sizes[name] for name in others)
    assert (model.info.model_type, model.info.architecture) == (WHOLE, "Qwen3OmniMoeThinkerForConditionalGeneration")
    assert not [name for name, _ in model.module.named_parameters() if "visual" in name or "audio" in name]


def test_both_checkpoints_are_the_same_model(saved: dict[str, Path]) -> None:
    ids = torch.arange(3, 14)
    logits = []
    for path in saved.values():
        model = load_model(path, dtype="float32", moe=local_runtime())
        # whatever dtype config.json gives to a part
        assert {p.dtype for p in model.module.parameters()} == {torch.float32}
        logits += RaggedDriver(model).step([("a", ids)])
    assert torch.equal(*logits)


def test_tensors_of_other_parts_need_not_be_there(copied: Path) -> None:
    write(copied, {name: tensor for name, tensor in tensors_of(copied).items() if name.startswith(LANGUAGE)})
    assert inspect_model(copied).num_layers == 3


def test_speech_that_is_switched_off_may_be_in_the_files(copied: Path) -> None:
    configure(copied, enable_audio_output=False)
    assert inspect_model(copied).num_layers == 3


@pytest.mark.parametrize(
    "stray", ["thinker.model.layers.0.mlp.stray.weight", "thinker.stray.weight", "stray.weight", "model.stray.weight"]
)
def test_a_stray_tensor_is_refused(stray: str, copied: Path) -> None:
    write(copied, tensors_of(copied) | {stray: torch.zeros(2)})
    with pytest.raises(CheckpointError, match="stray"):
        inspect_model(copied)


@pytest.mark.parametrize("needed", ["thinker.model.embed_tokens.weight", "thinker.lm_head.weight"])
def test_a_missing_tensor_is_refused(needed: str, copied: Path) -> None:
    write(copied, {name: tensor for name, tensor in tensors_of(copied).items() if name != needed})
    with pytest.raises(CheckpointError, match=r"missing: .*(embed_tokens|lm_head)"):
        inspect_model(copied)


def test_a_quantised_part_of_a_part_is_refused(copied: Path) -> None:
    part = json.loads((copied / "config.json").read_text())["thinker_config"]
    part["text_config"]["quantization_config"] = {"quant_method": "gptq"}
    configure(copied, thinker_config=part)
    with pytest.raises(UnsupportedModelError, match=r"quantised \(method gptq\)"):
        inspect_model(copied)


def test_where_its_outputs_end(copied: Path) -> None:
    """The language model's configuration says it, and what `generate` of the whole model hands to the part."""
    (copied / "generation_config.json").unlink()
    assert inspect_model(copied).eos_token_ids == (2,)
    assert end_ids(small_config(WHOLE, vocab_size=160_000), {}, [2]).ids == (2, 151645)
    assert end_ids(small_config(WHOLE), {}, [2]).ids == (2,)  # no id of so few tokens
    assert end_ids(small_config(PART, vocab_size=160_000), {}, [2]).ids == (2,)


def test_the_part_that_writes() -> None:
    config = small_config(WHOLE)
    assert text_part.writing_config(config) is config.thinker_config
    assert text_part.language_config(config) is config.thinker_config.text_config
    assert text_part.architectures(config) == [
        "Qwen3OmniMoeThinkerForConditionalGeneration",
        "Qwen3OmniMoeForConditionalGeneration",
    ]
    assert text_part.writing_config(config.thinker_config) is config.thinker_config
