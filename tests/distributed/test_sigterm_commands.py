"""SIGTERM ends a command that has started ranks as Ctrl-C does: nothing of it stays, whenever it comes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from epruntime.testing import tiny_models
from epruntime.testing.patience import PATIENCE_S


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("model")
    tiny_models.save(tiny_models.build("mixtral")[1], folder)
    return str(folder)


@pytest.mark.parametrize("moment", ["the door is open", "ranks are up"])
@pytest.mark.parametrize("command", ["preflight", "generate"])
def test_nothing_stays(model, tmp_path: Path, command, moment):
    arguments = (
        ["generate", "--model", model, "--max-tokens", "100000", "x"] if command == "generate" else [command, model]
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "epruntime.cli", *arguments, "--expert-parallel-size", "2"],
        stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env={**os.environ, "TMPDIR": str(tmp_path)},
    )  # fmt: skip
    with process:
        deadline = time.monotonic() + PATIENCE_S
        if moment == "ranks are up":
            while "ranks are up" not in process.stderr.readline():
                assert time.monotonic() < deadline
                assert process.poll() is None
        else:
            while not list(tmp_path.glob("epruntime-*")):
                assert time.monotonic() < deadline
                time.sleep(0.01)
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 128 + signal.SIGTERM, err
    assert "Traceback" not in err
    assert list(tmp_path.glob("epruntime-*")) == []
    assert psutil.wait_procs(children, timeout=PATIENCE_S)[1] == []
