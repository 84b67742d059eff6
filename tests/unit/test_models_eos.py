"""End-of-sequence ids: what a checkpoint's files name, in transformers' order, and class defaults only behind them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from epruntime.errors import CheckpointError
from epruntime.models.adapter import as_ids, read_config
from epruntime.models.eos import EndIds, end_ids
from epruntime.models.small_config import small_config
from epruntime.models.text_part import language_config
from epruntime.testing import tiny_models

#: A multimodal type whose language model's class has an id by default, and one of text alone.
MULTIMODAL, TEXT = "kimi_k25", "deepseek_v3"
DEFAULT = 1


def ends(model_type: str, path: Path, *, top: Any = ..., inner: Any = ..., generation: Any = ...) -> EndIds:
    """`...`: the file does not say."""
    raw = small_config(model_type).to_dict()
    for part, value in ((raw, top), (raw.get("text_config", {}), inner)):
        part.pop("eos_token_id", None)
        if value is not ...:
            part["eos_token_id"] = value
    (path / "config.json").write_text(json.dumps(raw))
    config = read_config(path)
    if not isinstance(generation, int | list):
        ours = end_ids(config, raw, [])
        theirs = transformers.GenerationConfig.from_model_config(config).eos_token_id
        vocab = range(language_config(config).vocab_size)
        assert ours.ids == tuple(sorted(token for token in as_ids(theirs) if token in vocab))
        return ours
    return end_ids(config, raw, as_ids(generation))


def test_the_default_of_the_test_is_one(tmp_path: Path) -> None:
    raw = small_config(MULTIMODAL).to_dict()
    del raw["text_config"]["eos_token_id"]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert language_config(read_config(tmp_path)).eos_token_id == DEFAULT


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({"top": 4}, (4,)),
        ({"top": [9, 4]}, (4, 9)),
        ({"inner": 5}, (5,)),
        ({"top": 4, "inner": 5}, (4,)),
        ({"top": None, "inner": 5}, (5,)),
        ({}, (DEFAULT,)),
        ({"inner": None}, ()),
        ({"generation": 6}, (6,)),
        ({"generation": [6, 7], "top": 4}, (4, 6, 7)),
        ({"generation": 6, "inner": 5}, (5, 6)),
    ],
)
def test_of_a_multimodal_checkpoint(said: dict[str, Any], expected: tuple[int, ...], tmp_path: Path) -> None:
    assert ends(MULTIMODAL, tmp_path, **said) == EndIds(ids=expected, warning="")


@pytest.mark.parametrize(
    ("said", "expected"),
    [({"top": 4}, (4,)), ({}, (DEFAULT,)), ({"generation": 6}, (6,)), ({"top": 4, "generation": 6}, (4, 6))],
)
def test_of_a_text_model(said: dict[str, Any], expected: tuple[int, ...], tmp_path: Path) -> None:
    assert ends(TEXT, tmp_path, **said) == EndIds(ids=expected, warning="")


@pytest.mark.parametrize("wrong", ["2", [[1]], [1, None], True, {"a": 1}, 1.0])
def test_what_is_no_token_id_is_refused(wrong: Any) -> None:
    config = small_config(TEXT)
    config.__dict__["eos_token_id"] = wrong  # past what transformers itself refuses
    with pytest.raises(CheckpointError, match=r"config\.json: eos_token_id"):
        end_ids(config, {"eos_token_id": wrong}, [])


BOUNDS = "vocab_size=128: ids go from 0 to 127"  # of the small configuration


@pytest.mark.parametrize(
    ("said", "left", "told"),
    [
        ({"top": [4, 128]}, (4,), f"config.json names eos_token_id 128, but {BOUNDS}"),
        ({"top": 4, "generation": [-1, 127]}, (4, 127), f"generation_config.json names eos_token_id -1, but {BOUNDS}"),
        (
            {"top": [-2, 4], "generation": [2**40, 200]},
            (4,),
            f"config.json names eos_token_id -2; generation_config.json names eos_token_id {2**40}, 200, but {BOUNDS}",
        ),
    ],
)
def test_some_beyond_the_vocabulary(said: dict[str, Any], left: tuple[int, ...], told: str, tmp_path: Path) -> None:
    found = ends(TEXT, tmp_path, **said)
    assert found.ids == left
    assert found.warning.startswith(told)
    assert found.warning.endswith(f"; outputs end at {', '.join(map(str, left))}")


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ({"top": 128}, "config.json names eos_token_id 128, but"),
        ({"top": -1, "generation": [500]}, "config.json names eos_token_id -1; generation_config.json names"),
    ],
)
def test_all_beyond_the_vocabulary(said: dict[str, Any], told: str, tmp_path: Path) -> None:
    found = ends(TEXT, tmp_path, **said)
    assert found.ids == ()
    assert found.warning.startswith("no output ends by itself, ")
    assert f"within the model's vocabulary: {told}" in found.warning


def test_a_default_beyond_the_vocabulary_is_told_to_be_one(tmp_path: Path) -> None:
    config = small_config(TEXT)
    config.eos_token_id = 128
    told = "transformers' DeepseekV3Config, by default, names eos_token_id 128"
    assert told in end_ids(config, {}, []).warning


def test_transformers_goes_on_past_an_id_that_the_model_has_no_logits_for() -> None:
    """What `generate` does with such ids: it neither stops nor refuses."""
    _, model = tiny_models.build("mixtral")
    vocab_size = model.config.vocab_size
    prompt = torch.tensor([[5, 6, 7]])

    def generated(*ids: int) -> int:
        output = model.generate(prompt, eos_token_id=list(ids), pad_token_id=0, do_sample=False, max_new_tokens=8)
        return int(output.shape[1]) - prompt.shape[1]

    assert generated(vocab_size, 2**20) == 8
    assert generated(vocab_size, *range(vocab_size)) == 1  # so the comparison would show an end
