"""End-of-sequence ids: what a checkpoint's files name, in transformers' order, and class defaults only behind them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from epruntime.errors import CheckpointError
from epruntime.models.adapter import as_ids, read_config
from epruntime.models.eos import eos_token_ids
from epruntime.models.small_config import small_config
from epruntime.models.text_part import language_config

#: A multimodal type whose language model's class has an id by default, and one of text alone.
MULTIMODAL, TEXT = "kimi_k25", "deepseek_v3"
DEFAULT = 1


def ids(model_type: str, path: Path, *, top: Any = ..., inner: Any = ..., generation: Any = ...) -> tuple[int, ...]:
    """`...`: the file does not say."""
    raw = small_config(model_type).to_dict()
    for part, value in ((raw, top), (raw.get("text_config", {}), inner)):
        part.pop("eos_token_id", None)
        if value is not ...:
            part["eos_token_id"] = value
    (path / "config.json").write_text(json.dumps(raw))
    config = read_config(path)
    if not isinstance(generation, int | list):
        ours = eos_token_ids(config, raw, [])
        theirs = transformers.GenerationConfig.from_model_config(config).eos_token_id
        assert ours == tuple(sorted(as_ids(theirs)))
        return ours
    return eos_token_ids(config, raw, as_ids(generation))


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
    assert ids(MULTIMODAL, tmp_path, **said) == expected


@pytest.mark.parametrize(
    ("said", "expected"),
    [({"top": 4}, (4,)), ({}, (DEFAULT,)), ({"generation": 6}, (6,)), ({"top": 4, "generation": 6}, (4, 6))],
)
def test_of_a_text_model(said: dict[str, Any], expected: tuple[int, ...], tmp_path: Path) -> None:
    assert ids(TEXT, tmp_path, **said) == expected


@pytest.mark.parametrize("wrong", ["2", [[1]], [1, None], True, {"a": 1}, 1.0])
def test_what_is_no_token_id_is_refused(wrong: Any) -> None:
    config = small_config(TEXT)
    config.__dict__["eos_token_id"] = wrong  # past what transformers itself refuses
    with pytest.raises(CheckpointError, match=r"config\.json: eos_token_id"):
        eos_token_ids(config, {"eos_token_id": wrong}, [])
