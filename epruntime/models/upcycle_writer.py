"""ShardWriter: writes safetensors shards tensor by tensor, piece by piece, with an index."""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

DTYPE_NAMES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


class ShardWriter:
    """Lays out tensors of one dtype over shards, then takes their data in that same order.

    Args:
        directory: where the shards go; it exists.
        tensors: (name, shape) of every tensor, in the order in which their data will come.
        dtype: dtype of all tensors.
        max_shard_bytes: a shard ends before the tensor that would pass this size; a tensor is never split.
    """

    def __init__(
        self, directory: Path, tensors: Sequence[tuple[str, tuple[int, ...]]], dtype: torch.dtype, max_shard_bytes: int
    ) -> None:
        self._directory, self._dtype = directory, dtype
        self.total_bytes = 0
        shards: list[list[tuple[str, tuple[int, ...], int]]] = [[]]
        shard_bytes = 0
        for name, shape in tensors:
            num_bytes = math.prod(shape) * dtype.itemsize
            if shards[-1] and shard_bytes + num_bytes > max_shard_bytes:
                shards.append([])
                shard_bytes = 0
            shards[-1].append((name, shape, num_bytes))
            shard_bytes += num_bytes
            self.total_bytes += num_bytes
        self._shards = shards

    @property
    def num_shards(self) -> int:
        return len(self._shards)

    def write(self, data: Iterable[Iterable[torch.Tensor]]) -> None:
        """Writes all shards, and the index if there are several.

        Args:
            data: per tensor, in the order given to the constructor, its elements as flat pieces of `dtype`.
        """
        tensors = iter(data)
        weight_map: dict[str, str] = {}
        for number, shard in enumerate(self._shards, start=1):
            name = (
                "model.safetensors"
                if self.num_shards == 1
                else f"model-{number:05d}-of-{self.num_shards:05d}.safetensors"
            )
            with (self._directory / name).open("wb") as file:
                file.write(self._header(shard))
                for tensor, shape, num_bytes in shard:
                    written = 0
                    for piece in next(tensors):
                        written += file.write(piece.contiguous().view(torch.uint8).numpy().data)
                    assert written == num_bytes, f"{tensor} {shape}: wrote {written} of {num_bytes} bytes"
                    weight_map[tensor] = name
                file.flush()
                os.fsync(file.fileno())
        assert next(tensors, None) is None, "data for more tensors than were laid out"
        if self.num_shards > 1:
            index = {"metadata": {"total_size": self.total_bytes}, "weight_map": weight_map}
            (self._directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")

    def _header(self, shard: list[tuple[str, tuple[int, ...], int]]) -> bytes:
        entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for name, shape, num_bytes in shard:
            entries[name] = {
                "dtype": DTYPE_NAMES[self._dtype],
                "shape": list(shape),
                "data_offsets": [offset, offset + num_bytes],
            }
            offset += num_bytes
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # the data starts aligned
        return struct.pack("<Q", len(text)) + text
