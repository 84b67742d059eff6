"""The client SDK stands on the base install alone."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent

#: Everything that the extras bring, and what must not be needed to import the client and the command line.
BLOCKED = (
    "torch", "numpy", "msgpack", "transformers", "safetensors", "ray", "tqdm", "jinja2", "grpc_health",
    "grpc_reflection", "gguf", "accelerate", "cupy", "fastapi",
)  # fmt: skip

_BLOCKER = f"""
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {BLOCKED!r}:
            raise ModuleNotFoundError(f"blocked: {{name}}", name=name)

sys.meta_path.insert(0, Blocker())
"""

#: Imports everything public of the base install, and shows that the client works to the point where it needs a server.
USE = """
import epruntime
from epruntime import AsyncClient, Client, SamplingParams
from epruntime.errors import UnavailableError
from epruntime.cli.main import main, make_parser

make_parser()
with Client("127.0.0.1:1", timeout=10) as client:
    try:
        client.generate("x", SamplingParams(temperature=0))
    except UnavailableError as error:
        assert "127.0.0.1:1" in str(error), error
    else:
        raise AssertionError("something listens on port 1")
code = main(["serve", "model"])
assert code == 1, code
"""


def _run(python: str, code: str, **env: str) -> subprocess.CompletedProcess:
    return subprocess.run([python, "-c", code], env={**os.environ, **env}, capture_output=True, text=True, timeout=120)


def test_client_and_command_line_need_no_extra():
    done = _run(sys.executable, _BLOCKER + USE, PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stderr
    assert re.search(r"epruntime serve: \w+ is not installed; .*pip install 'epruntime\[serve\]'", done.stderr)


def test_an_engine_without_its_extra_is_refused_in_words():
    done = _run(sys.executable, _BLOCKER + "from epruntime import LLM", PYTHONPATH=str(ROOT))
    assert re.search(
        r"epruntime\.LLM needs \w+, which is not installed; .*pip install 'epruntime\[serve\]'", done.stderr
    )


def test_declared_versions_are_what_the_generated_modules_run_with():
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    lowest = dict(re.match(r"(\w+)>=([\d.]+)", d).groups() for d in pyproject["project"]["dependencies"])
    messages = (ROOT / "epruntime/proto/inference_pb2.py").read_text()
    service = (ROOT / "epruntime/proto/inference_pb2_grpc.py").read_text()
    generated = {
        "protobuf": re.search(r"Protobuf Python Version: ([\d.]+)", messages)[1],
        "grpcio": re.search(r"GRPC_GENERATED_VERSION = '([\d.]+)'", service)[1],
    }
    for package, version in generated.items():
        assert _numbers(lowest[package]) >= _numbers(version), f"{package}>={version} is needed"


def test_generated_modules_are_current():
    pytest.importorskip("grpc_tools")
    from epruntime.proto.generate import main

    assert main(["--check"]) == 0


@pytest.mark.slow
def test_client_works_in_a_venv_with_the_base_install_only(tmp_path):
    """A fresh venv: the package from this tree, and what it declares as its dependencies."""
    python = str(tmp_path / "venv" / "bin" / "python")
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True, timeout=120)
    pip = [python, "-m", "pip", "install", "-q"]
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    needs = [*pyproject["project"]["dependencies"], *pyproject["build-system"]["requires"], "wheel"]
    done = subprocess.run([*pip, *needs], capture_output=True, text=True, timeout=240)
    if done.returncode != 0:
        pytest.skip(f"pip cannot install grpcio and protobuf: {done.stderr.strip().splitlines()[-1]}")
    source = tmp_path / "source"
    _copy_tree(source)
    done = subprocess.run(
        [*pip, "--no-deps", "--no-build-isolation", str(source)], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    installed = subprocess.run(
        [python, "-m", "pip", "list", "--format=freeze"], capture_output=True, text=True, timeout=60
    )
    assert not set(BLOCKED) & {line.partition("==")[0].lower() for line in installed.stdout.splitlines()}
    done = subprocess.run([python, "-c", USE], cwd=tmp_path, capture_output=True, text=True, timeout=120,
                          env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"})  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "pip install 'epruntime[serve]'" in done.stderr
    script = subprocess.run(
        [str(tmp_path / "venv/bin/epruntime"), "--version"], capture_output=True, text=True, timeout=60
    )
    assert script.stdout.startswith("epruntime ")


def _copy_tree(target: Path) -> None:
    """What git knows of the tree, so that no build output of this checkout comes along."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).exists():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            (target / name).write_bytes((ROOT / name).read_bytes())


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))
