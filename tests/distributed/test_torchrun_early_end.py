"""A torchrun job whose program ends before all its workers have come, or long before its process does."""

from __future__ import annotations

import time

import pytest

from epruntime.testing.patience import PATIENCE_S, soon
from epruntime.testing.torchrun_job import TorchrunJob

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

STANDALONE = ["--standalone", "--nproc-per-node", "2"]
AT_ONCE = """
import sys
from epruntime.launchers.torchrun import run_coordinator

def main():
    print("main", flush=True)
    return int(sys.argv[1])

run_coordinator(main)
"""
#: what is registered first runs last, when the workers know already that the job has ended
SAVES_LAST = """
import atexit, sys, time
from epruntime.launchers import torchrun_supervisor
torchrun_supervisor._CLOSE_S = 1.0  # in the worker, which runs this, too

def main():
    from epruntime.launchers.torchrun import num_workers
    from epruntime.launchers.torchrun_hub import this_hub
    while len(this_hub()._links) < num_workers():
        time.sleep(0.01)
    results.append(1)
    return int(sys.argv[1])

def save():
    if results:
        time.sleep(3)
        print("saved", flush=True)

results = []
atexit.register(save)
from epruntime.launchers.torchrun import run_coordinator
run_coordinator(main)
"""


@pytest.mark.parametrize(("code", "restarts"), [(0, 0), (3, 1)])
def test_a_program_that_ends_at_once_ends_the_job(tmp_path, code, restarts):
    program = tmp_path / "job.py"
    program.write_text(AT_ONCE)
    began = time.monotonic()
    with TorchrunJob([*STANDALONE, "--max-restarts", str(restarts)], [str(program), str(code)]) as job:
        assert job.wait(soon(PATIENCE_S)) == int(code > 0), job.output
    assert job.lines.count("main") == 1 + restarts
    assert time.monotonic() - began < soon(30)


@pytest.mark.parametrize("code", [0, 3])
def test_a_program_may_take_its_time_to_end(tmp_path, code):
    program = tmp_path / "job.py"
    program.write_text(SAVES_LAST)
    with TorchrunJob(STANDALONE, [str(program), str(code)]) as job:
        assert job.wait(PATIENCE_S) == int(code > 0), job.output
    assert job.lines.count("saved") == 1
    assert "exitcode  : 75" not in job.output
