"""Headers of safetensors files: read, or refused in words; in bounded time and memory, and with no other exception."""

from __future__ import annotations

import itertools
import json
import resource
import struct
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from epruntime.errors import CheckpointError, UnsupportedModelError
from epruntime.models.safetensors import MAX_HEADER_BYTES, read_header
from epruntime.testing.patience import soon

FUZZ = settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

NUMBER = st.integers(-4, 40) | st.sampled_from([2**31, 2**53, 2**62, 2**63, 2**64, -(2**63), 10**30]) | st.floats()
JUNK = st.recursive(
    st.none() | st.booleans() | NUMBER | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
DTYPE = st.sampled_from(["F32", "BF16", "F16", "I64", "U8", "BOOL", "F8_E4M3", "f32", ""])
TENSOR = st.fixed_dictionaries(
    {"dtype": DTYPE | JUNK, "shape": st.lists(NUMBER, max_size=3) | JUNK, "data_offsets": st.lists(NUMBER, max_size=3)},
    optional={"extra": JUNK},
)  # fmt: skip
HEADER = st.dictionaries(st.text(max_size=4) | st.just("__metadata__"), TENSOR | JUNK, max_size=4)
#: pieces of JSON, which need not fit together: names twice, NaN, open brackets
TEXT = st.lists(
    st.sampled_from(['{"a":', "{", "}", "[", "]", ",", '"a"', ":", "NaN", "-Infinity", "1e999", '"\\ud800"', "null"])
    | st.text(max_size=3),
    max_size=12,
).map("".join)


def _file(tmp_path: Path, header: bytes, data: bytes, length: int | None = None) -> Path:
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", len(header) if length is None else length) + header + data)
    return path


def _read(path: Path) -> bool:
    """Whether the file was taken; refused in words if not."""
    size = path.stat().st_size
    try:
        entries = read_header(path)
    except (CheckpointError, UnsupportedModelError):
        return False
    # what is taken covers the data exactly, each byte once
    spans = sorted((entry.offset, entry.offset + entry.num_bytes) for entry in entries.values())
    assert all(end == begin for (_, end), (begin, _) in itertools.pairwise(spans))
    assert not spans or spans[-1][1] == size
    return True


@FUZZ
@given(header=HEADER, data=st.binary(max_size=40))
@example(header={}, data=b"")
@example(header={"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, data=b"\0" * 8)
@example(header={"a": {"dtype": "F32", "shape": [0], "data_offsets": [-4, -4]}}, data=b"")
@example(header={"a": {"dtype": "F32", "shape": [1.0], "data_offsets": [0, 4]}}, data=b"\0" * 4)
@example(header={"a": {"dtype": "U8", "shape": [2**62, 4], "data_offsets": [0, 0]}}, data=b"")
@example(header={"a": {"dtype": [], "shape": {}, "data_offsets": [0, 0]}}, data=b"")
def test_headers_of_the_right_form(tmp_path, header, data):
    _read(_file(tmp_path, json.dumps(header).encode(), data))


@FUZZ
@given(text=TEXT, data=st.binary(max_size=8))
@example(text='{"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}, "a": 3}', data=b"x")
@example(text='{"a": {"dtype": "U8", "dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}', data=b"x")
@example(text='{"a": {"dtype": "U8", "shape": [NaN], "data_offsets": [0, 1]}}', data=b"x")
@example(text='{"\\ud800": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}', data=b"x")
@example(text="[" * 100_000, data=b"")
@example(text='{"a":' * 50_000, data=b"")
@example(text='{"a": {"dtype": "U8", "shape": [' + "1" * 5000 + '], "data_offsets": [0, 1]}}', data=b"x")
def test_pieces_of_json(tmp_path, text, data):
    _read(_file(tmp_path, text.encode("utf-8", "surrogatepass"), data))


@FUZZ
@given(length=st.integers(0, 2**64 - 1) | st.integers(0, 64), rest=st.binary(max_size=64), cut=st.integers(0, 80))
@example(length=2**64 - 1, rest=b"{}", cut=80)
@example(length=MAX_HEADER_BYTES + 1, rest=b"{}", cut=80)
@example(length=2, rest=b"\xff\xfe", cut=80)
@example(length=2, rest=b"{}", cut=9)
@example(length=2, rest=b"{}", cut=0)
def test_any_length_any_bytes_cut_anywhere(tmp_path, length, rest, cut):
    path = _file(tmp_path, rest, b"", length)
    path.write_bytes(path.read_bytes()[:cut])
    _read(path)


@pytest.mark.parametrize("length", [MAX_HEADER_BYTES + 1, 2**63, 50_000_000])
def test_a_header_as_long_as_it_claims_costs_no_memory(tmp_path, length):
    """A file of 2 GiB of nothing (sparse): refused on its length, or on its first bytes, without reading all."""
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", length))
    with path.open("r+b") as file:
        file.truncate(2 << 30)
    before, begin = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
    assert not _read(path)
    assert time.monotonic() - begin < soon(5)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 400_000  # kB; the bytes and their text


def test_many_tensors_take_no_quadratic_time(tmp_path):
    """20 000 empty tensors, which all begin at the same byte."""
    header: dict[str, Any] = {str(i): {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]} for i in range(20_000)}
    begin = time.monotonic()
    assert _read(_file(tmp_path, json.dumps(header).encode(), b""))
    assert time.monotonic() - begin < soon(10)
