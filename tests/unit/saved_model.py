"""The two files of a tiny saved model, read and written anew."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import safetensors.torch
import torch


def tensors_of(path: Path) -> dict[str, torch.Tensor]:
    return safetensors.torch.load_file(path / "model.safetensors")


def write(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    safetensors.torch.save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def configure(path: Path, **changes: Any) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | changes))
