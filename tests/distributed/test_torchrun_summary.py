"""The summary that torchrun prints last says why a job failed, also if that was at once."""

from __future__ import annotations

import pytest

from epruntime.testing.patience import PATIENCE_S
from epruntime.testing.torchrun_job import TorchrunJob

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

PROGRAM = """
import sys
from epruntime.errors import LaunchError
from epruntime.launchers.torchrun import run_coordinator

def main():
    if sys.argv[1] == "raises":
        raise LaunchError("no room for 9 ranks")
    if sys.argv[1] == "exits":
        sys.exit("there is no room for 9 ranks")
    print("epruntime: no room for 9 ranks", file=sys.stderr)
    return 3

run_coordinator(main)
"""


@pytest.mark.parametrize("how", ["raises", "says", "exits"])
def test_the_cause_is_in_the_summary(tmp_path, how):
    program = tmp_path / "job.py"
    program.write_text(PROGRAM)
    with TorchrunJob(["--standalone", "--nproc-per-node", "2"], [str(program), how]) as job:
        assert job.wait(PATIENCE_S) == 1
    summary = job.output.partition("job.py FAILED")[2]
    assert any("no room for 9 ranks" in line for line in summary.splitlines() if "traceback : " in line), job.output
