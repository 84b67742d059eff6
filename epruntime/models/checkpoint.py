"""A checkpoint directory: config.json as plain data, and every tensor's place in its safetensors files."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from epruntime.errors import CheckpointError, UnsupportedModelError
from epruntime.models.safetensors import TensorEntry, read_header

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_ADAPTER = "adapter_config.json"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """An opened checkpoint: headers were read and checked, no tensor was.

    Attributes:
        raw_config: config.json as it is.
        tensors: by name.
        header_bytes: bytes read of headers and index.
        unlisted: tensors that the files hold and the index does not name.
    """

    path: Path
    raw_config: dict[str, Any]
    tensors: dict[str, TensorEntry]
    header_bytes: int
    unlisted: tuple[str, ...] = ()

    @property
    def num_parameters(self) -> int:
        return sum(t.num_bytes // t.dtype.itemsize for t in self.tensors.values())

    @property
    def num_bytes(self) -> int:
        return sum(t.num_bytes for t in self.tensors.values())

    def main_dtype(self) -> torch.dtype:
        """Dtype of most elements among floating-point tensors."""
        count: Counter[torch.dtype] = Counter()
        for tensor in self.tensors.values():
            if tensor.dtype.is_floating_point:
                count[tensor.dtype] += tensor.num_bytes // tensor.dtype.itemsize
        return count.most_common(1)[0][0] if count else torch.float32

    def refuse_unlisted(self, ignored: Collection[str] = ()) -> None:
        """Refuses tensors that the index does not name, but for those that are no part of the model.

        Raises:
            CheckpointError: there are others.
        """
        wrong = sorted(set(self.unlisted).difference(ignored))
        if wrong:
            raise _disagreement(self.path, wrong)


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises CheckpointError, with the path, for whatever else there is."""
    if path.exists() and not path.is_file():
        raise CheckpointError(f"{path} is not a regular file")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} does not exist: {path.parent} is no checkpoint directory") from error
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{path} holds no JSON object")
    return data


def read_raw_config(path: Path) -> dict[str, Any]:
    """config.json of a checkpoint directory.

    Raises:
        CheckpointError: there is none, or it is no JSON object; an adapter lies there, which nobody would apply.
    """
    if not path.is_dir():
        raise CheckpointError(
            f"{path} is no directory: a model is a directory with config.json and *.safetensors; download it first"
        )
    if (path / _ADAPTER).is_file():
        raise CheckpointError(
            f"{path} holds an adapter (LoRA, {_ADAPTER}), and adapters are not applied: merge it into its base model "
            f"(peft's merge_and_unload) and save that; if these weights are the merged ones, remove {_ADAPTER}"
        )
    return read_json(path / "config.json")


def _files(path: Path) -> list[Path]:
    if (path / _INDEX).is_file():
        weight_map = read_json(path / _INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{path / _INDEX} has no weight_map")
        for name in weight_map.values():
            if not isinstance(name, str) or name != Path(name).name or not name.endswith(".safetensors"):
                raise CheckpointError(f"{path / _INDEX} names {name!r}, which is no safetensors file of this directory")
        names = set(weight_map.values())
        absent = sorted(n for n in names if not (path / n).is_file())
        other = (path / _SINGLE).is_file() and _SINGLE not in names
        if absent:
            hint = f"; if {_SINGLE} is the whole model, remove {_INDEX}" if other else ""
            raise CheckpointError(f"{path}: the index names files that are not there: {', '.join(absent)}{hint}")
        if other:
            raise CheckpointError(
                f"{path} holds {_SINGLE}, and {_INDEX} names other files: two models, or what is left of an earlier "
                "one. Remove the one that is not meant"
            )
        return [path / name for name in sorted(names)]
    if (path / _SINGLE).is_file():
        return [path / _SINGLE]
    found = sorted(path.glob("*.safetensors"))
    if len(found) == 1:
        return found
    if found:
        raise CheckpointError(
            f"{path} has {len(found)} safetensors files, but neither {_SINGLE} nor {_INDEX} that "
            "says which of them make the model"
        )
    pickles = sorted(p.name for pattern in _PICKLES for p in path.glob(pattern))
    if pickles:
        raise UnsupportedModelError(
            f"{path} holds pickle files only ({', '.join(pickles[:3])}): reading one can run "
            "any code, so none is read. Convert the checkpoint to safetensors"
        )
    raise CheckpointError(f"{path} holds no *.safetensors file")


def open_checkpoint(path: Path, raw_config: dict[str, Any]) -> Checkpoint:
    """Reads and checks the headers of all files of a checkpoint. What is `unlisted` is left to who knows the model.

    Raises:
        CheckpointError: damaged, incomplete or ambiguous. UnsupportedModelError: pickle files, unknown dtypes.
    """
    files = _files(path)
    tensors: dict[str, TensorEntry] = {}
    header_bytes = 0
    for file in files:
        entries = read_header(file)
        for name, entry in entries.items():
            if name in tensors:
                raise CheckpointError(f"tensor {name!r} is in {tensors[name].file.name} and in {file.name}")
            tensors[name] = entry
        header_bytes += file.stat().st_size - sum(e.num_bytes for e in entries.values())
    if (path / _INDEX).is_file():
        header_bytes += (path / _INDEX).stat().st_size
        unlisted = _check_index(path, tensors)
    else:
        unlisted = ()
    return Checkpoint(path=path, raw_config=raw_config, tensors=tensors, header_bytes=header_bytes, unlisted=unlisted)


def _check_index(path: Path, tensors: dict[str, TensorEntry]) -> tuple[str, ...]:
    """Every tensor that the index names is in the file that it names. Returns those that it does not name."""
    weight_map = read_json(path / _INDEX)["weight_map"]
    wrong = sorted(n for n, file in weight_map.items() if n not in tensors or file != tensors[n].file.name)
    if wrong:
        raise _disagreement(path, wrong)
    return tuple(sorted(tensors.keys() - weight_map.keys()))


def _disagreement(path: Path, names: list[str]) -> CheckpointError:
    return CheckpointError(
        f"{path}: the index and the files disagree about {len(names)} tensors: "
        f"{', '.join(names[:8])}{', ...' if len(names) > 8 else ''}"
    )


def split_rows(checkpoint: Checkpoint, endings: dict[str, tuple[str, ...]]) -> Checkpoint:
    """Some tensors cut along their first dimension into equal ones, which are found in the same bytes.

    Args:
        endings: ending of a tensor's name -> the endings that its parts have, in order.

    Raises:
        CheckpointError: a tensor's first dimension is no multiple of the number of parts.
    """
    tensors: dict[str, TensorEntry] = {}
    for name, entry in checkpoint.tensors.items():
        ending = next((e for e in endings if name.endswith(e)), None)
        if ending is None:
            tensors[name] = entry
            continue
        parts = len(endings[ending])
        if not entry.shape or parts < 1 or entry.shape[0] % parts:
            raise CheckpointError(f"{checkpoint.path}: {name} of shape {entry.shape} cannot be cut into {parts} parts")
        shape, size = (entry.shape[0] // parts, *entry.shape[1:]), entry.num_bytes // parts
        for number, new in enumerate(endings[ending]):
            part_name = name.removesuffix(ending) + new
            tensors[part_name] = replace(
                entry, name=part_name, shape=shape, offset=entry.offset + number * size, num_bytes=size
            )
    return replace(checkpoint, tensors=tensors)


def first_rows(checkpoint: Checkpoint, endings: dict[str, tuple[int, int]]) -> Checkpoint:
    """Tensors of which the first rows alone are used, without the others.

    Args:
        endings: ending of a tensor's name -> (rows that it has, rows that are used). One of another size stays as it
            is, for the check of shapes.
    """
    tensors = dict(checkpoint.tensors)
    for name, entry in checkpoint.tensors.items():
        rows, used = next((sizes for ending, sizes in endings.items() if name.endswith(ending)), (0, 0))
        if rows and entry.shape[:1] == (rows,):
            tensors[name] = replace(entry, shape=(used, *entry.shape[1:]), num_bytes=entry.num_bytes // rows * used)
    return replace(checkpoint, tensors=tensors)
