"""DenseSource: where the tensors of a dense checkpoint come from, a bounded piece at a time.

Safetensors are read with pread, never mapped: mapped pages would count as this process's memory. GGUF goes through
the loader of transformers, which holds the whole model.
"""

from __future__ import annotations

import json
import math
import os
import struct
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from epruntime.errors import CheckpointError, UnsupportedModelError

#: Elements of one piece: 4 MiB in fp32. Part of the recipe: noise is drawn a piece at a time.
CHUNK_ELEMENTS = 1 << 20

#: The format's own limit on the header (https://github.com/huggingface/safetensors, "Format").
MAX_HEADER_BYTES = 100_000_000

SAFETENSORS_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorInfo:
    """Shape and dtype of one dense tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)


class DenseSource(ABC):
    """Named tensors of one dense checkpoint."""

    #: "safetensors" or "gguf"
    kind: str

    @abstractmethod
    def infos(self) -> dict[str, TensorInfo]:
        """All tensors by name, without reading their data."""

    @abstractmethod
    def chunks(self, name: str) -> Iterator[torch.Tensor]:
        """The tensor's elements in order, as flat pieces of CHUNK_ELEMENTS (the last one may be shorter).

        A piece may be overwritten once the next one is asked for.

        Raises:
            CheckpointError: the file ends early or cannot be read.
        """

    @abstractmethod
    def close(self) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class _Place:
    """Where a tensor's bytes lie."""

    path: Path
    offset: int
    info: TensorInfo


class SafetensorsSource(DenseSource):
    """Tensors of `*.safetensors` in a directory, through its index where there is one.

    Raises:
        CheckpointError: no such files, or a damaged header.
        UnsupportedModelError: pickle weights only, or tensors of a quantised dtype.
    """

    kind = "safetensors"

    def __init__(self, directory: Path) -> None:
        self._places: dict[str, _Place] = {}
        self._files: dict[Path, int] = {}
        for path in _safetensors_files(directory):
            for name, place in read_header(path).items():
                if name in self._places:
                    raise CheckpointError(f"tensor {name} is in both {self._places[name].path} and {path}")
                self._places[name] = place

    def infos(self) -> dict[str, TensorInfo]:
        return {name: place.info for name, place in self._places.items()}

    def chunks(self, name: str) -> Iterator[torch.Tensor]:
        place = self._places[name]
        file = self._files.get(place.path)
        if file is None:
            file = self._files[place.path] = os.open(place.path, os.O_RDONLY)
        left, offset = place.info.num_elements, place.offset
        buffer = torch.empty(min(left, CHUNK_ELEMENTS), dtype=place.info.dtype)
        while left:
            piece = buffer[: min(left, CHUNK_ELEMENTS)]
            view = piece.view(torch.uint8).numpy().data
            _read_fully(file, view, offset, place.path, name)
            yield piece
            left -= piece.numel()
            offset += len(view)

    def close(self) -> None:
        while self._files:
            os.close(self._files.popitem()[1])


class StateDictSource(DenseSource):
    """Tensors that are already in memory, as the loader of transformers left them."""

    kind = "gguf"

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def infos(self) -> dict[str, TensorInfo]:
        return {name: TensorInfo(shape=tuple(t.shape), dtype=t.dtype) for name, t in self._tensors.items()}

    def chunks(self, name: str) -> Iterator[torch.Tensor]:
        yield from self._tensors[name].detach().contiguous().reshape(-1).split(CHUNK_ELEMENTS)

    def close(self) -> None:
        self._tensors = {}


def _safetensors_files(directory: Path) -> list[Path]:
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise CheckpointError(f"{index} is not a safetensors index: {error!r}") from error
        for name in names:
            if not isinstance(name, str) or Path(name).name != name or not (directory / name).is_file():
                raise CheckpointError(f"{index} names {name!r}, which is not a file of {directory}")
        return [directory / name for name in names]
    files = sorted(directory.glob("*.safetensors"))
    if files:
        return files
    pickles = sorted(p.name for p in directory.iterdir() if p.suffix in (".bin", ".pt", ".pth"))
    if pickles:
        raise UnsupportedModelError(
            f"{directory} holds pickle weights only ({', '.join(pickles[:3])}), which are never read: "
            "convert them to safetensors first"
        )
    raise CheckpointError(f"{directory} holds neither *.safetensors nor *.gguf")


def read_header(path: Path) -> dict[str, _Place]:
    """Parses and checks the header of one safetensors file.

    Raises:
        CheckpointError: the header is damaged, or a tensor lies outside the file.
        UnsupportedModelError: a tensor's dtype is none of fp32, fp16, bf16.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
            raise CheckpointError(f"{path}: header of {length} bytes in a file of {size}: not a safetensors file")
        text = file.read(length)
    try:
        header: dict[str, Any] = json.loads(text)
        entries = {
            name: (e["dtype"], tuple(int(n) for n in e["shape"]), *(int(o) for o in e["data_offsets"]))
            for name, e in header.items()
            if name != "__metadata__"
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: damaged safetensors header: {error!r}") from error
    places: dict[str, _Place] = {}
    for name, (dtype, shape, *offsets) in entries.items():
        if dtype not in SAFETENSORS_DTYPES:
            raise UnsupportedModelError(
                f"{path}: tensor {name} has dtype {dtype}; only F32, F16 and BF16 checkpoints can be upcycled "
                "(dequantise it first)"
            )
        info = TensorInfo(shape=shape, dtype=SAFETENSORS_DTYPES[dtype])
        begin, end = offsets if len(offsets) == 2 else (-1, -1)
        if not 0 <= begin <= end <= size - 8 - length or end - begin != info.num_elements * info.dtype.itemsize:
            raise CheckpointError(
                f"{path}: tensor {name} of shape {shape} and dtype {dtype} claims bytes {begin}..{end} of "
                f"{size - 8 - length}: the file is damaged or incomplete"
            )
        places[name] = _Place(path=path, offset=8 + length + begin, info=info)
    return places


def _read_fully(file: int, view: memoryview, offset: int, path: Path, name: str) -> None:
    done = 0
    while done < len(view):
        count = os.preadv(file, [view[done:]], offset + done)
        if count <= 0:
            raise CheckpointError(f"{path}: ends at byte {offset + done}, inside tensor {name}")
        done += count
