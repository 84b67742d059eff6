"""The safetensors reader: exact ranges into place, and every damaged header refused with words."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from epruntime.errors import CheckpointError, EPRuntimeError, UnsupportedModelError
from epruntime.models.safetensors import RangeReader, read_header


def _write(path: Path, header: Any, data: bytes = b"", *, length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def _tensor(shape: list[Any], offsets: list[Any], dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def test_reads_what_safetensors_wrote(tmp_path: Path) -> None:
    tensors = {
        "a": torch.randn(6, 5),
        "b": torch.randn(7, dtype=torch.float64),
        "c": torch.randn(3, 4, 2).bfloat16(),
        "scalar": torch.tensor(2.5),
        "ids": torch.arange(9),
        "empty": torch.empty(0, 4),
        "flag": torch.tensor([True]),
    }
    safetensors.torch.save_file(tensors, tmp_path / "x.safetensors", metadata={"format": "pt"})
    entries = read_header(tmp_path / "x.safetensors")
    assert set(entries) == set(tensors)
    with RangeReader() as reader:
        for name, tensor in tensors.items():
            out = torch.empty(entries[name].shape, dtype=entries[name].dtype)
            reader.read(entries[name], 0, (entries[name].shape or (1,))[0], out)
            assert torch.equal(out, tensor), name
        assert reader.bytes_read == sum(t.numel() * t.element_size() for t in tensors.values())
        rows = torch.empty(2, 5)
        reader.read(entries["a"], 3, 5, rows)
        assert torch.equal(rows, tensors["a"][3:5])


def test_casts_and_strided_destinations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = torch.randn(9, 4, 3)
    safetensors.torch.save_file({"w": source}, tmp_path / "x.safetensors")
    entry = read_header(tmp_path / "x.safetensors")["w"]
    monkeypatch.setattr(RangeReader, "_STAGING_BYTES", 100)  # two rows of 48 bytes: several reads
    with RangeReader() as reader:
        half = torch.empty(9, 4, 3, dtype=torch.bfloat16)
        reader.read(entry, 0, 9, half)
        assert torch.equal(half, source.bfloat16())
        wide = torch.full((9, 4, 6), -1.0)
        reader.read(entry, 0, 9, wide[..., 3:])
        assert torch.equal(wide[..., 3:], source)
        assert bool((wide[..., :3] == -1).all())


@pytest.mark.parametrize(
    ("header", "data", "words"),
    [
        ({"a": _tensor([2], [0, 8])}, b"\0" * 7, "truncated"),
        ({"a": _tensor([2], [0, 8])}, b"\0" * 9, "past its last tensor"),
        ({"a": _tensor([2], [0, 7])}, b"\0" * 7, "takes 8 bytes"),
        ({"a": _tensor([2], [8, 0])}, b"\0" * 8, "takes 8 bytes"),
        ({"a": _tensor([2], [0, 8]), "b": _tensor([2], [4, 12])}, b"\0" * 12, "overlaps"),
        ({"a": _tensor([2], [4, 12])}, b"\0" * 12, "belong to none"),
        ({"a": _tensor([-2], [0, 8])}, b"\0" * 8, "not valid"),
        ({"a": _tensor([True, 2], [0, 8])}, b"\0" * 8, "not valid"),
        ({"a": _tensor([2.0], [0, 8])}, b"\0" * 8, "not valid"),
        ({"a": _tensor([1 << 61, 1 << 61], [0, 0])}, b"", "takes"),
        ({"a": {"dtype": "F32", "shape": [2]}}, b"\0" * 8, "needs exactly"),
        ({"a": "F32"}, b"", "needs exactly"),
        ([], b"", "no object"),
        (b"{", b"", "not valid"),
        (b"\xff\xfe", b"", "not valid"),
        (b"[" * 100_000, b"", "not valid"),
        (
            b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
            b"\0" * 4,
            "twice",
        ),
    ],
)
def test_damaged_header(header: Any, data: bytes, words: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=words) as caught:
        read_header(_write(tmp_path / "x.safetensors", header, data))
    assert "x.safetensors" in str(caught.value)


def test_header_size_is_bounded(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="states a header of"):
        read_header(_write(tmp_path / "x.safetensors", {}, length=1 << 62))
    (tmp_path / "y.safetensors").write_bytes(b"abc")
    with pytest.raises(CheckpointError, match="too short"):
        read_header(tmp_path / "y.safetensors")
    with pytest.raises(CheckpointError, match="cannot be opened"):
        read_header(tmp_path / "absent.safetensors")
    with pytest.raises(CheckpointError, match="not a regular file"):
        read_header(tmp_path)


@pytest.mark.parametrize("dtype", ["F8_E4M3", "U4", None, 3])
def test_unknown_dtype(dtype: Any, tmp_path: Path) -> None:
    path = _write(tmp_path / "x.safetensors", {"w": _tensor([2], [0, 2], dtype)}, b"\0" * 2)
    with pytest.raises(UnsupportedModelError, match="dtype"):
        read_header(path)


def test_file_that_shrinks_while_read(tmp_path: Path) -> None:
    safetensors.torch.save_file({"w": torch.randn(64)}, tmp_path / "x.safetensors")
    entry = read_header(tmp_path / "x.safetensors")["w"]
    os.truncate(tmp_path / "x.safetensors", entry.offset + 100)
    with RangeReader() as reader, pytest.raises(CheckpointError, match="changed while being read"):
        reader.read(entry, 0, 64, torch.empty(64))


@given(st.binary(max_size=200), st.integers(0, 250))
def test_any_bytes_are_read_or_refused(tmp_path_factory: pytest.TempPathFactory, text: bytes, length: int) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzz.safetensors"
    path.write_bytes(struct.pack("<Q", length) + text)
    try:
        entries = read_header(path)
    except EPRuntimeError:
        return
    assert all(e.offset + e.num_bytes <= path.stat().st_size for e in entries.values())
