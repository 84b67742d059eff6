"""The package that ranks on a Ray cluster run: this process's own, with its C++ kernels.

`ray job submit --working-dir .` uploads a checkout without what its .gitignore names: without the built extensions.
And what it uploads comes first on every node's PYTHONPATH, in front of an epruntime that is installed there. So

job's entry -> complete_package: extensions beside the uploaded modules (found elsewhere, or built; once per node)
launcher -> package_to_ship: that directory goes to all ranks through Ray's py_modules, which come before the working
directory

Imports neither Ray nor torch.
"""

from __future__ import annotations

import importlib
import logging
import os
import runpy
import shutil
import site
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.machinery import EXTENSION_SUFFIXES, PathFinder
from pathlib import Path
from types import SimpleNamespace

from epruntime import envs

logger = logging.getLogger("epruntime.launchers.ray_package")

#: the compiled modules of the package, without their suffix.
EXTENSIONS = ("_C", "_kv")
#: seconds that the compiler gets.
_BUILD_S = 600.0


def package_directory() -> Path:
    """The directory of this process's epruntime."""
    return Path(__file__).resolve().parents[1]


def package_to_ship() -> Path | None:
    """The package directory, if ranks on other nodes would not have it by themselves; None if it is installed here, as
    it then must be on all nodes."""
    package = package_directory()
    installed = {Path(entry).resolve() for entry in (*site.getsitepackages(), site.getusersitepackages())}
    return None if package.parent in installed else package


def complete_package(package: Path | None = None) -> str:
    """Puts the C++ extensions beside the package's modules if they are not there.

    Args:
        package: directory of the package; default: this process's own.

    Returns:
        what was done, in words; "" if they were there already.

    Raises:
        KernelsMissing: they could not be had; ranks would run the slower plain-torch paths.
    """
    if envs.get("EPRUNTIME_DISABLE_EXTENSION"):
        return ""
    package = package_directory() if package is None else package
    if all(_extension(package, name) for name in EXTENSIONS):
        return ""
    root = package.parent
    if not (root / "setup.py").is_file():
        raise KernelsMissing(f"{package} was installed without its C++ kernels, and there is no setup.py beside it")
    reasons: list[str] = []
    # Another copy of the package whose extensions were made from the same C++ files.
    wanted = _source_hash(root)
    for other in _other_copies(package):
        found = [_extension(other, name) for name in EXTENSIONS]
        if all(path is not None and wanted in path.read_bytes() for path in found):
            _place([path for path in found if path is not None], package)
            return f"C++ kernels taken from {other}, which was built from the same sources"
        reasons.append(f"{other} has none" if not any(found) else f"those of {other} are of other sources")
    try:
        with tempfile.TemporaryDirectory(prefix="epruntime-build-") as folder:
            _place(_build(root, Path(folder)), package)
    except KernelsMissing as error:
        raise KernelsMissing("; ".join([*reasons, str(error)])) from error
    return "C++ kernels built on this node"


class KernelsMissing(Exception):
    """The C++ extensions can neither be found nor built; says why."""


def _extension(package: Path, name: str) -> Path | None:
    """The file of a compiled module that this Python can load."""
    paths = (package / f"{name}{suffix}" for suffix in EXTENSION_SUFFIXES)
    return next((path for path in paths if path.is_file()), None)


def _other_copies(package: Path) -> Iterator[Path]:
    """Directories of further copies of the package that this Python can import, also by an editable install."""
    seen = {package.resolve()}
    specs = [PathFinder.find_spec("epruntime", [entry]) for entry in dict.fromkeys(sys.path)]
    for finder in sys.meta_path:
        if finder is not PathFinder and hasattr(finder, "find_spec"):
            specs.append(finder.find_spec("epruntime", None))
    for spec in specs:
        for place in (spec.submodule_search_locations or ()) if spec is not None else ():
            path = Path(place).resolve()
            if path not in seen:
                seen.add(path)
                yield path


def _source_hash(root: Path) -> bytes:
    """What setup.py bakes into extensions made from this checkout."""
    try:
        # Not as __main__: it only defines its functions then.
        made = SimpleNamespace(**runpy.run_path(str(root / "setup.py"), run_name="setup"))
        return str(made.csrc_hash()).encode()
    except (ImportError, OSError) as error:
        raise KernelsMissing(f"{root / 'setup.py'} cannot be read ({error}); setuptools must be installed") from error


def _build(root: Path, folder: Path) -> list[Path]:
    """Compiles the extensions of a checkout; returns their files, in `folder`."""
    library = folder / "lib"
    command = [sys.executable, "setup.py", "-q", "build_ext", "--build-lib", str(library), "--build-temp"]
    logger.warning("this job's working directory has no C++ kernels: building them, which takes about a minute")
    try:
        done = subprocess.run(
            [*command, str(folder / "temp")], cwd=root, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            errors="replace", timeout=_BUILD_S, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise KernelsMissing(f"they could not be built: {error}") from error
    found = [_extension(library / "epruntime", name) for name in EXTENSIONS]
    if done.returncode != 0 or not all(found):
        words = "\n".join((done.stdout + done.stderr).strip().splitlines()[-8:])
        raise KernelsMissing(f"they could not be built:\n{words}")
    return [path for path in found if path is not None]


def _place(files: list[Path], package: Path) -> None:
    """Copies files into the package; whole at once, as two jobs may share a directory."""
    try:
        for source in files:
            fresh = package / f"{source.name}.{os.getpid()}"
            shutil.copyfile(source, fresh)
            fresh.replace(package / source.name)
    except OSError as error:
        raise KernelsMissing(f"they cannot be put into {package}: {error}") from error
    importlib.invalidate_caches()
