"""Facts about the software: this package, the others, kernels, environment variables. Each is a function to call."""

from __future__ import annotations

import functools
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import epruntime
from epruntime.version import __version__

_TORCH_DEADLINE_S = 120
_ROOT = Path(epruntime.__file__).parent

_PACKAGES = (
    "torch", "transformers", "tokenizers", "safetensors", "numpy", "msgpack", "grpcio", "grpcio-health-checking",
    "grpcio-reflection", "protobuf", "ray", "fastapi", "uvicorn", "prometheus_client", "jinja2", "tqdm", "gguf",
    "accelerate", "argcomplete", "triton", "cupy-cuda12x", "cupy-cuda13x", "nvidia-nccl-cu12", "nvidia-nccl-cu13",
)  # fmt: skip

#: prefixes and whole names of the variables that change how epruntime, its libraries or its ranks behave
_PREFIXES = (
    "EPRUNTIME_", "NCCL_", "GLOO_", "TP_", "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "RAY_", "HF_", "TRANSFORMERS_",
    "TOKENIZERS_", "TORCH_", "PYTORCH_", "CUDA_", "NVIDIA_", "GRPC_", "MALLOC_",
)  # fmt: skip
_NAMES = {
    "LD_PRELOAD", "LD_LIBRARY_PATH", "PYTHONPATH", "PYTHONOPTIMIZE", "CC", "CXX", "HTTP_PROXY", "HTTPS_PROXY",
    "NO_PROXY", "ALL_PROXY", "LANG", "LC_ALL",
}  # fmt: skip
_SECRET_WORDS = {
    "TOKEN",
    "KEY",
    "SECRET",
    "PASSWORD",
    "PASSWD",
    "CREDENTIAL",
    "CREDENTIALS",
    "AUTH",
    "APIKEY",
    "COOKIE",
}
#: values of a form that is known to be a secret, whatever the name says
_SECRET_VALUE = re.compile(r"\b(hf_|sk-|ghp_|github_pat_|glpat-|xox[bp]-|AKIA)[\w-]{8,}|-----BEGIN |\bBearer\s+\S")
_USERINFO = re.compile(r"(?<=://)[^/@\s]+(?=@)")
_HIDDEN = "(set; not shown)"


def _source_revision() -> str:
    """Git commit of the checkout that this package runs from."""
    if not (_ROOT.parent / ".git").exists():
        return "no git checkout"
    git = ["git", "-C", str(_ROOT.parent)]
    commit = _output([*git, "rev-parse", "HEAD"])
    changed = _output([*git, "status", "--porcelain", "--untracked-files=no"])
    return f"{commit}{', with changes' if changed else ''}"


def _extension_files() -> list[str]:
    return sorted(path.name for path in _ROOT.glob("_C*.so"))


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


@functools.cache
def _torch_facts() -> dict[str, Any]:
    """What epruntime.cli.torch_facts prints, from a process of its own."""
    child = [sys.executable, "-m", "epruntime.cli.torch_facts"]
    path = os.pathsep.join(filter(None, (str(_ROOT.parent), os.environ.get("PYTHONPATH"))))
    try:
        done = subprocess.run(
            child, capture_output=True, text=True, timeout=_TORCH_DEADLINE_S, check=False,
            stdin=subprocess.DEVNULL, env={**os.environ, "PYTHONPATH": path},
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"importing torch and asking it took more than {_TORCH_DEADLINE_S} s") from None
    if done.returncode < 0:
        raise RuntimeError(f"importing torch and asking it ended with {signal.Signals(-done.returncode).name}")
    if done.returncode > 0:
        raise RuntimeError((done.stderr.strip().splitlines() or ["it failed without a word"])[-1])
    facts: dict[str, Any] = json.loads(done.stdout)
    return facts


def environment(variables: dict[str, str]) -> dict[str, str]:
    """Those of `variables` that matter here, by name, without secrets."""
    shown = {}
    for name in sorted(variables):
        if name.upper().startswith(_PREFIXES) or name.upper() in _NAMES:
            shown[name] = mask(name, variables[name])
    return shown


def mask(name: str, value: str) -> str:
    """`value`, or words in its place where its name or form says that it is a secret."""
    if value and (_SECRET_WORDS & set(name.upper().split("_")) or _SECRET_VALUE.search(value)):
        return _HIDDEN
    return _USERINFO.sub("(not shown)", value)


def _output(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()


PACKAGE: dict[str, Callable[[], Any]] = {
    "version": lambda: __version__,
    "source revision": _source_revision,
    "directory": lambda: str(_ROOT),
    "extension files": lambda: _extension_files() or "none",
    "python": lambda: f"{sys.version.split()[0]}, {sys.executable}",
    "virtual environment": lambda: sys.prefix != sys.base_prefix,
}

VERSIONS: dict[str, Callable[[], Any]] = {name: functools.partial(_version, name) for name in _PACKAGES}

TORCH: dict[str, Callable[[], Any]] = {"*torch": _torch_facts}

ENVIRONMENT: dict[str, Callable[[], Any]] = {"*variables": lambda: environment(dict(os.environ))}
