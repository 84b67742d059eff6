"""What an install brings along, and what setup.py does where a compiler is absent or a source is broken."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

from epruntime.ops import extension

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def names(requirements: list[str]) -> set[str]:
    return {re.split(r"[\[<>=!~;@ ]", text)[0] for text in requirements}


@pytest.fixture(scope="module")
def setup_module() -> ModuleType:
    """setup.py as a module: its functions, without running setup()."""
    source = (ROOT / "setup.py").read_text().replace("\nsetup(**arguments())\n", "\n")
    spec = importlib.util.spec_from_loader("epruntime_setup", loader=None)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    module.__file__ = str(ROOT / "setup.py")
    exec(compile(source, "setup.py", "exec"), module.__dict__)  # noqa: S102
    return module


def build(copy: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    shutil.copy(ROOT / "setup.py", copy)
    shutil.copy(ROOT / "pyproject.toml", copy)
    (copy / "epruntime").mkdir()
    shutil.copy(ROOT / "epruntime/version.py", copy / "epruntime")
    (copy / "epruntime/__init__.py").touch()
    (copy / "README.md").touch()
    (copy / "LICENSE").touch()
    return subprocess.run(
        [sys.executable, "setup.py", "build_ext", "--inplace"],
        cwd=copy,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
        check=False,
    )


def test_the_base_install_is_the_client() -> None:
    assert names(PROJECT["dependencies"]) == {"grpcio", "protobuf"}


def test_extras() -> None:
    extras = PROJECT["optional-dependencies"]
    assert {"serve", "ray", "cuda12", "cuda13", "gguf", "dev"} <= set(extras)
    assert "torch>=2.11,<2.15" in extras["serve"]
    assert "transformers>=5.16,<5.25" in extras["serve"]
    assert names(extras["cuda12"]) == {"cupy-cuda12x"}
    assert names(extras["cuda13"]) == {"cupy-cuda13x"}


def test_pinned_versions_leave_torch_to_the_user() -> None:
    lines = (ROOT / "requirements/constraints.txt").read_text().splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9_.\-]+==[0-9][^ ]*", pin) for pin in pins)
    assert "torch" not in names(pins)
    # Every direct requirement is pinned, so that two set-ups a month apart are the same.
    pinned = {name.lower().replace("_", "-") for name in names(pins)}
    extras = PROJECT["optional-dependencies"]
    direct = names(PROJECT["dependencies"]) | names(extras["serve"] + extras["ray"] + extras["gguf"] + extras["dev"])
    assert direct - {"torch"} <= pinned


def test_the_loaded_kernels_were_built_from_these_sources(setup_module: ModuleType) -> None:
    native = extension.load()
    if native is None:
        pytest.skip(extension.why_absent())
    assert native.csrc_hash() == setup_module.csrc_hash(), "csrc changed since the build: run make setup"
    assert importlib.import_module("epruntime._kv").csrc_hash() == setup_module.csrc_hash(), "run make setup"


def test_where_a_compiler_is_the_kernels_are_there(setup_module: ModuleType) -> None:
    """Otherwise every kernel test would be skipped without a word."""
    if not setup_module.why_not() and not os.environ.get("EPRUNTIME_DISABLE_EXTENSION"):
        assert extension.load() is not None, extension.why_absent()


def test_no_compiler_is_no_error(tmp_path: Path) -> None:
    empty = tmp_path / "bin"
    empty.mkdir()
    copy = tmp_path / "project"
    copy.mkdir()
    done = build(copy, PATH=str(empty), CXX="")
    assert done.returncode == 0, done.stdout
    assert "built without the C++ kernels: no C++ compiler was found" in done.stdout
    assert "plain-torch paths" in done.stdout


def test_a_compiler_that_cannot_compile_is_no_error(tmp_path: Path) -> None:
    broken = tmp_path / "broken-cxx"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    copy = tmp_path / "project"
    copy.mkdir()
    done = build(copy, CXX=str(broken))
    assert done.returncode == 0, done.stdout
    assert "cannot compile an empty C++20 program" in done.stdout


def test_a_compiler_asked_for_and_absent_is_not_replaced(tmp_path: Path) -> None:
    copy = tmp_path / "project"
    copy.mkdir()
    done = build(copy, CXX="/nonexistent/c++")
    assert done.returncode == 0, done.stdout
    assert "built without the C++ kernels: CXX=/nonexistent/c++ was not found" in done.stdout


def test_an_error_in_the_sources_is_one(tmp_path: Path, setup_module: ModuleType) -> None:
    if reason := setup_module.why_not():
        pytest.skip(reason)
    (tmp_path / "csrc").mkdir()
    (tmp_path / "csrc/bindings.cpp").write_text("#error on purpose\n")
    done = build(tmp_path)
    assert done.returncode != 0
    assert "on purpose" in done.stdout


def test_importing_the_package_needs_no_torch() -> None:
    code = (
        "import sys; sys.modules.update(dict.fromkeys(('torch', 'numpy', 'ray', 'msgpack', 'transformers')));"
        "import epruntime; from epruntime import Client, SamplingParams"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
