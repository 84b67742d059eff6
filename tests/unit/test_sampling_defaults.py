"""generation_config.json: what becomes a default, what is ignored and said, what refuses the checkpoint."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from epruntime.engine.defaults import SamplingDefaults
from epruntime.errors import CheckpointError, InvalidRequestError
from epruntime.models.generation_config import read_generation_config
from epruntime.models.info import ModelInfo
from epruntime.models.loader import inspect_model
from epruntime.sampling_params import SamplingParams
from epruntime.testing import tiny_models


def _write(path: Path, content: Any) -> Path:
    (path / "generation_config.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_every_field_and_its_name_here(tmp_path: Path) -> None:
    content = {
        "temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.05, "repetition_penalty": 1.05,
        "max_new_tokens": 2048, "do_sample": True, "eos_token_id": [5, 2], "bos_token_id": 1, "pad_token_id": 0,
        "transformers_version": "4.51.0", "max_length": 20, "num_beams": 1,
    }  # fmt: skip
    found = read_generation_config(_write(tmp_path, content))
    assert found.sampling == {
        "temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.05, "repetition_penalty": 1.05, "max_tokens": 2048,
    }  # fmt: skip
    assert found.eos_token_ids == (5, 2)
    assert not found.ignored


@pytest.mark.parametrize(
    ("content", "sampling"),
    [
        ({"do_sample": False}, {"temperature": 0.0}),
        ({"do_sample": False, "temperature": 0.6, "top_p": 0.9}, {"temperature": 0.0, "top_p": 0.9}),
        ({"temperature": 0.6}, {"temperature": 0.6}),
        ({"do_sample": None, "temperature": None, "top_k": None}, {}),
        ({"temperature": 1, "top_k": 0}, {"temperature": 1, "top_k": 0}),
        ({}, {}),
    ],
)
def test_do_sample_and_null(content: dict[str, Any], sampling: dict[str, Any], tmp_path: Path) -> None:
    found = read_generation_config(_write(tmp_path, content))
    assert found.sampling == sampling
    assert not found.ignored


def test_no_file(tmp_path: Path) -> None:
    found = read_generation_config(tmp_path)
    assert (found.eos_token_ids, found.sampling, found.ignored) == ((), {}, {})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -1),
        ("temperature", "0.6"),
        ("temperature", True),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_k", 2.5),
        ("top_k", -7),
        ("top_p", 0),
        ("top_p", 1.5),
        ("top_p", [0.9]),
        ("min_p", 2),
        ("repetition_penalty", 0),
        ("repetition_penalty", {}),
        ("max_new_tokens", 0),
        ("max_new_tokens", "many"),
        ("do_sample", "false"),
        ("do_sample", 0),
    ],
)
def test_a_value_that_makes_no_sense_is_left_out_and_named(name: str, value: Any, tmp_path: Path) -> None:
    content = {"temperature": 0.5, "top_p": 0.8, name: value}
    found = read_generation_config(_write(tmp_path, content))
    assert list(found.ignored) == [name]
    assert name in found.ignored[name] or name == "max_new_tokens"
    assert repr(value) in found.ignored[name]
    assert found.sampling == {k: v for k, v in {"temperature": 0.5, "top_p": 0.8}.items() if k != name}


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "7", '{"eos_token_id": "x"}', '{"eos_token_id": [true]}', '{"eos_token_id": 1.5}']
)
def test_files_that_refuse_the_checkpoint(content: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"generation_config\.json"):
        read_generation_config(_write(tmp_path, content))


def test_it_comes_with_the_model_info(tmp_path: Path) -> None:
    _, model = tiny_models.build("mixtral")
    tiny_models.save(model, tmp_path)
    _write(tmp_path, {"temperature": 0.6, "max_new_tokens": 7, "top_p": 3, "eos_token_id": [9]})
    info = inspect_model(tmp_path)
    assert info.default_sampling == {"temperature": 0.6, "max_tokens": 7}
    assert list(info.ignored_sampling) == ["top_p"]
    assert info.eos_token_ids == (2, 9)
    assert ModelInfo.from_dict(json.loads(json.dumps(info.to_dict()))) == info


INFO = {
    "default_sampling": {"temperature": 0.6, "top_k": 20, "max_tokens": 100},
    "ignored_sampling": {"top_p": "top_p=3: must be in (0, 1]"},
}


def test_what_is_given_wins_then_the_model_then_sampling_params() -> None:
    defaults = SamplingDefaults(INFO, source="auto")
    params = defaults.params(temperature=0, seed=4)
    assert (params.temperature, params.top_k, params.max_tokens, params.seed) == (0, 20, 100, 4)
    assert params.top_p == SamplingParams().top_p
    assert defaults.params() == SamplingParams(temperature=0.6, top_k=20, max_tokens=100)
    assert defaults.params(max_tokens=None).max_tokens is None, "None is a value: as long as there is room"
    assert defaults.values == INFO["default_sampling"]


def test_none_turns_it_off(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        defaults = SamplingDefaults(INFO, source="none")
    assert defaults.params() == SamplingParams()
    assert not defaults.values
    assert not caplog.records


@pytest.mark.parametrize(
    ("name", "value"),
    [("suppress_tokens", [5]), ("min_new_tokens", 3), ("num_beams", 4), ("bad_words_ids", [[7]]), ("typical_p", 0.9)],
)
def test_what_would_change_tokens_and_is_not_read_is_said(name: str, value: Any, tmp_path: Path) -> None:
    found = read_generation_config(_write(tmp_path, {name: value, "top_k": 4}))
    assert list(found.ignored) == [name]
    assert repr(value) in found.ignored[name]
    assert found.sampling == {"top_k": 4}


def test_values_without_effect_are_not_spoken_of(tmp_path: Path) -> None:
    content = {"suppress_tokens": [], "min_new_tokens": 0, "num_beams": 1, "typical_p": 1.0, "bad_words_ids": None}
    assert not read_generation_config(_write(tmp_path, content)).ignored


def test_what_is_ignored_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        SamplingDefaults(INFO, source="auto")
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "top_p=3" in warnings[0]
    assert any("temperature=0.6" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize(
    ("given", "field", "words"),
    [
        ({"temprature": 1}, "temprature", "did you mean temperature"),
        ({"best_of": 2}, "best_of", "not a sampling parameter"),
        ({"temperature": -1}, "temperature", "-1"),
        ({"min_tokens": 101}, "min_tokens", "max_tokens=100"),
    ],
)
def test_refusals(given: dict[str, Any], field: str, words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words) as caught:
        SamplingDefaults(INFO, source="auto").params(**given)
    assert caught.value.field == field
