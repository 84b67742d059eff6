"""Reader of safetensors files: a checked header, and exact byte ranges read straight into their place.

Nothing is mapped and nothing is unpickled. A header is data from outside: its size is bounded, its JSON
must be of the known form, and every tensor's range must be inside the file, of the right length, and
disjoint from the others, or the file is refused. Format: https://github.com/huggingface/safetensors.
"""

from __future__ import annotations

import json
import os
import stat
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from epruntime.errors import CheckpointError, UnsupportedModelError

#: The reference implementation's own bound.
MAX_HEADER_BYTES = 100_000_000
_MAX_READ = 1 << 30  # one preadv call returns at most 2 GiB - 4 KiB

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True, kw_only=True)
class TensorEntry:
    """One tensor of a file: `offset` is absolute, in bytes."""

    name: str
    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name occurs twice")
    return found


def read_header(path: Path) -> dict[str, TensorEntry]:
    """Tensors of one file by name.

    Raises:
        CheckpointError: the file is truncated or its header is not a valid one.
        UnsupportedModelError: a tensor has a dtype that is not supported (for example an fp8 one).
    """
    try:
        # O_NONBLOCK: a pipe opens at once, and is refused below, instead of waiting for a writer
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be opened: {error.strerror}") from error
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError(f"{path}: is not a regular file")
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)  # no readahead past the header
        prefix = os.pread(descriptor, 8, 0)
        if len(prefix) < 8:
            raise CheckpointError(f"{path}: {status.st_size} bytes is too short for a safetensors file")
        (length,) = struct.unpack("<Q", prefix)
        if length > min(MAX_HEADER_BYTES, status.st_size - 8):
            raise CheckpointError(
                f"{path}: states a header of {length} bytes; the file has {status.st_size} and "
                f"{MAX_HEADER_BYTES} is the most accepted. It is damaged or of another format"
            )
        text = os.pread(descriptor, length, 8)
    finally:
        os.close(descriptor)
    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=_no_duplicates)
        if not isinstance(header, dict):
            raise ValueError("it is no object")
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: its header is not valid: {error}") from error
    header.pop("__metadata__", None)
    entries = {name: _entry(path, name, raw, base=8 + length) for name, raw in header.items()}
    _check_ranges(path, entries, data_start=8 + length, file_size=status.st_size)
    return entries


def _entry(path: Path, name: str, raw: object, *, base: int) -> TensorEntry:
    where = f"{path}: tensor {name!r}"

    def numbers(value: object) -> bool:
        return isinstance(value, list) and all(type(n) is int and 0 <= n < 1 << 62 for n in value)

    if not isinstance(raw, dict) or set(raw) != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"{where}: needs exactly dtype, shape and data_offsets")
    shape, offsets, dtype_name = raw["shape"], raw["data_offsets"], raw["dtype"]
    if not numbers(shape) or not numbers(offsets) or len(offsets) != 2 or len(shape) > 16:
        raise CheckpointError(f"{where}: shape {shape!r} or data_offsets {offsets!r} is not valid")
    dtype = DTYPES.get(dtype_name) if isinstance(dtype_name, str) else None
    if dtype is None:
        raise UnsupportedModelError(f"{where}: dtype {dtype_name!r} is not supported (supported: {', '.join(DTYPES)})")
    begin, end = offsets
    expected = dtype.itemsize
    for size in shape:
        expected *= size
    if end - begin != expected:
        raise CheckpointError(f"{where}: {dtype_name} {shape} takes {expected} bytes, data_offsets span {end - begin}")
    return TensorEntry(name=name, file=path, dtype=dtype, shape=tuple(shape), offset=base + begin, num_bytes=expected)


def _check_ranges(path: Path, entries: dict[str, TensorEntry], *, data_start: int, file_size: int) -> None:
    position, last = data_start, "the header"
    for entry in sorted(entries.values(), key=lambda e: (e.offset, e.num_bytes)):
        if entry.offset < position:
            raise CheckpointError(f"{path}: tensor {entry.name!r} overlaps {last}")
        if entry.offset > position:
            raise CheckpointError(
                f"{path}: {entry.offset - position} bytes before tensor {entry.name!r} belong to none"
            )
        position, last = entry.offset + entry.num_bytes, f"tensor {entry.name!r}"
    if position != file_size:
        what = "is truncated" if position > file_size else "has bytes past its last tensor"
        raise CheckpointError(f"{path}: {what}: {file_size} bytes, its header describes {position}")


class RangeReader:
    """Reads byte ranges of entries into tensors; keeps files open until closed, and counts bytes.

    A context manager. `bytes_read` counts tensor bytes only, not headers.
    """

    _STAGING_BYTES = 16 << 20

    def __init__(self) -> None:
        self._descriptors: dict[Path, int] = {}
        self.bytes_read = 0

    def __enter__(self) -> RangeReader:
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()

    def prefetch(self, entry: TensorEntry, first: int, last: int) -> None:
        """Asks the kernel to start reading rows first..last-1, which a `read` will want soon."""
        row_bytes = entry.num_bytes // (entry.shape or (1,))[0] if entry.num_bytes else 0
        if row_bytes and first < last:
            os.posix_fadvise(
                self._open(entry.file),
                entry.offset + first * row_bytes,
                (last - first) * row_bytes,
                os.POSIX_FADV_WILLNEED,
            )

    def read(self, entry: TensorEntry, first: int, last: int, out: torch.Tensor) -> None:
        """Reads rows first..last-1 of the first dimension (a 0-dim tensor has one row) into `out`, cast to its dtype.

        Same dtype and contiguous `out`: straight into place. Otherwise through a small staging buffer,
        so that no second copy of a large tensor exists.
        """
        shape = entry.shape or (1,)
        assert 0 <= first <= last <= shape[0], (entry, first, last)
        assert out.numel() * shape[0] == (last - first) * _numel(shape), entry
        if first == last or out.numel() == 0:
            return
        row_bytes = entry.num_bytes // shape[0]
        start = entry.offset + first * row_bytes
        if out.dtype == entry.dtype and out.is_contiguous() and out.device.type == "cpu":
            self._into(entry.file, start, out)
            return
        rows_out = out.reshape(last - first, -1) if out.is_contiguous() else out.view(last - first, *out.shape[1:])
        rows_per_read = max(1, self._STAGING_BYTES // row_bytes)
        for row in range(0, last - first, rows_per_read):
            count = min(rows_per_read, last - first - row)
            staging = torch.empty(count * row_bytes // entry.dtype.itemsize, dtype=entry.dtype)
            self._into(entry.file, start + row * row_bytes, staging)
            rows_out[row : row + count].copy_(staging.view(rows_out[row : row + count].shape))

    def _open(self, file: Path) -> int:
        if file not in self._descriptors:
            descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
            # The kernel's own readahead would fetch the neighbours, which are other ranks' experts.
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
            self._descriptors[file] = descriptor
        return self._descriptors[file]

    def _into(self, file: Path, offset: int, out: torch.Tensor) -> None:
        descriptor = self._open(file)
        view = memoryview(out.detach().reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
        done = 0
        while done < len(view):
            got = os.preadv(descriptor, [view[done : done + _MAX_READ]], offset + done)
            if got == 0:
                raise CheckpointError(
                    f"{file}: ends at byte {offset + done}, in the middle of a tensor; it was changed while being read"
                )
            done += got
        self.bytes_read += done


def _numel(shape: tuple[int, ...]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total
