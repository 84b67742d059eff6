"""Damaged tokenizer files are refused by name, whatever the library makes of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from epruntime.engine.tokenizer import load_tokenizer
from epruntime.errors import CheckpointError


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer.json": "{"},
        {"tokenizer.json": "{}"},
        {"tokenizer.json": "[]"},
        {"tokenizer.json": "{}", "tokenizer_config.json": "[]"},
        {"tokenizer_config.json": '{"tokenizer_class": "NoSuchTokenizer"}'},
        {"tokenizer_config.json": '{"tokenizer_class": 5}'},
        {"tokenizer.model": "no model"},
    ],
    ids=str,
)
def test_damaged_files(files: dict[str, str], tmp_path: Path) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(CheckpointError, match="cannot load the tokenizer") as caught:
        load_tokenizer(tmp_path, required=False)
    assert str(tmp_path) in str(caught.value)


def test_no_files(tmp_path: Path) -> None:
    assert load_tokenizer(tmp_path, required=False) is None
    with pytest.raises(CheckpointError, match="holds no tokenizer"):
        load_tokenizer(tmp_path, required=True)
