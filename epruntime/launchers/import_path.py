"""PYTHONPATH of a rank process."""

from __future__ import annotations

import os
import site
from pathlib import Path

import epruntime


def import_path() -> list[str]:
    """This process's own PYTHONPATH, and where this package lies unless it is installed."""
    path = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    root = str(Path(epruntime.__file__).resolve().parent.parent)
    installed = [*site.getsitepackages(), site.getusersitepackages()]
    return path if root in path or root in installed else [*path, root]
