"""DenseSource: where the tensors of a dense checkpoint come from, a bounded piece at a time.

Safetensors are read with preadv, never mapped: mapped pages would count as this process's memory. GGUF goes through
the loader of transformers, which holds the whole model.
"""

from __future__ import annotations

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from epruntime.errors import CheckpointError, UnsupportedModelError
from epruntime.models.checkpoint import open_checkpoint
from epruntime.models.safetensors import TensorEntry

#: Elements of one piece: 4 MiB in fp32. Part of the recipe: noise is drawn a piece at a time.
CHUNK_ELEMENTS = 1 << 20

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


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


class SafetensorsSource(DenseSource):
    """Tensors of `*.safetensors` in a directory, through its index where there is one.

    Raises:
        CheckpointError: no such files, or damaged ones.
        UnsupportedModelError: pickle weights only, or a tensor that is none of fp32, fp16 and bf16.
    """

    kind = "safetensors"

    def __init__(self, directory: Path) -> None:
        checkpoint = open_checkpoint(directory, {})
        checkpoint.refuse_unlisted()
        self._entries: dict[str, TensorEntry] = checkpoint.tensors
        self._files: dict[Path, int] = {}
        for name, entry in self._entries.items():
            if entry.dtype not in _DTYPES:
                raise UnsupportedModelError(
                    f"{entry.file}: tensor {name} is of {entry.dtype}; only fp32, fp16 and bf16 checkpoints can be "
                    "upcycled (dequantise it first)"
                )

    def infos(self) -> dict[str, TensorInfo]:
        return {name: TensorInfo(shape=e.shape, dtype=e.dtype) for name, e in self._entries.items()}

    def chunks(self, name: str) -> Iterator[torch.Tensor]:
        entry = self._entries[name]
        file = self._files.get(entry.file)
        if file is None:
            file = self._files[entry.file] = os.open(entry.file, os.O_RDONLY | os.O_CLOEXEC)
        left, offset = math.prod(entry.shape), entry.offset
        buffer = torch.empty(min(left, CHUNK_ELEMENTS), dtype=entry.dtype)
        while left:
            piece = buffer[: min(left, CHUNK_ELEMENTS)]
            view = piece.view(torch.uint8).numpy().data
            _read_fully(file, view, offset, entry)
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


def _read_fully(file: int, view: memoryview, offset: int, entry: TensorEntry) -> None:
    done = 0
    while done < len(view):
        count = os.preadv(file, [view[done:]], offset + done)
        if count <= 0:
            raise CheckpointError(f"{entry.file}: ends at byte {offset + done}, inside tensor {entry.name}")
        done += count
