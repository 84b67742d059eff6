"""Which kernels a process runs, and what it says about them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from epruntime.ops import extension
from epruntime.version import __version__

ROOT = Path(__file__).resolve().parents[2]
SHOW = (
    "from epruntime.ops.extension import kernel_signature, load, why_absent; import json;"
    "load(); print(json.dumps([kernel_signature(), why_absent()]))"
)


def show(**environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", SHOW],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def native() -> object:
    module = extension.load()
    if module is None:
        pytest.skip(extension.why_absent())
    return module


def test_signature_names_what_computes() -> None:
    signature = extension.kernel_signature()
    assert signature["epruntime"] == __version__
    assert signature["torch"] == torch.__version__
    assert signature["isa"].endswith(f"torch {torch.backends.cpu.get_cpu_capability()}")
    if extension.load() is None:
        assert signature["extension"] == "plain"
        assert extension.why_absent()
    else:
        assert signature["extension"].startswith("native:")
        assert extension.why_absent() == ""


def test_switched_off() -> None:
    done = show(EPRUNTIME_DISABLE_EXTENSION="1")
    assert done.returncode == 0, done.stderr
    assert '"extension": "plain"' in done.stdout
    assert "EPRUNTIME_DISABLE_EXTENSION=1" in done.stdout


def test_instruction_set_can_be_chosen() -> None:
    native()
    done = show(EPRUNTIME_CPU_ISA="portable")
    assert '"isa": "portable, torch' in done.stdout, done.stderr


def test_a_wrong_instruction_set_is_refused() -> None:
    done = show(EPRUNTIME_CPU_ISA="mmx")
    assert done.returncode != 0
    assert "EPRUNTIME_CPU_ISA='mmx': must be one of avx512_bf16, avx512, avx2, portable" in done.stderr


def test_select_isa_refuses_unknown_names() -> None:
    with pytest.raises(ValueError, match="cannot run 'mmx'"):
        native().select_isa("mmx")  # type: ignore[attr-defined]
