"""`make mutants`: puts each fault of fault_table.py into a copy of the package and runs the test that must notice.

python tests/mutants/run_mutants.py [ID ...] [--jobs N]

copy -> every named test passes -> per fault: apply, run its test, expect a failure, take it back -> table

Exit code 0 if every fault was caught; 1 if one survived, could not be put in, or its test is wrong without it.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from fault_table import FAULTS
from faults import ROOT, Fault

#: seconds that one run of a test may take, its imports included
LIMIT_S = 240
_CAUGHT, _SURVIVED, _WRONG = "caught", "SURVIVED", "WRONG"
_NEEDED = ("epruntime", "tests", "pyproject.toml")
#: pytest's exit codes: all passed; some failed
_PASSED, _FAILED = 0, 1


@dataclass(frozen=True, kw_only=True)
class Outcome:
    fault: Fault
    verdict: str
    seconds: float
    detail: str = ""


class Copies:
    """Copies of the package, one for each job that runs at a time."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._own = folder, threading.local()
        self._lock, self._count = threading.Lock(), 0

    def mine(self) -> Path:
        """This thread's copy."""
        if not hasattr(self._own, "path"):
            with self._lock:
                self._count += 1
                path = self._folder / str(self._count)
            for name in _NEEDED:
                source = ROOT / name
                if source.is_dir():
                    shutil.copytree(source, path / name, ignore=shutil.ignore_patterns("__pycache__", "*.pyc"))
                else:
                    shutil.copy2(source, path / name)
            self._own.path = path
        return self._own.path


def run_tests(root: Path, tests: Sequence[str]) -> tuple[int | None, str]:
    """Runs tests in a copy; returns pytest's exit code, None for a run that had to be ended, and its output."""
    # No compiled files: Python takes one for current if size and second of its source are the same, as a fault's may be
    environment = {**os.environ, "PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=line", *tests]
    process = subprocess.Popen(
        command, cwd=root, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
        text=True, errors="replace", start_new_session=True,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=LIMIT_S * (3 if len(tests) > 1 else 1))
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)  # its own session: the test, and whatever it started
        output, _ = process.communicate()
        return None, output
    return process.returncode, output


def judge(fault: Fault, copies: Copies) -> Outcome:
    """Puts one fault in, runs its test, takes it back."""
    root, started = copies.mine(), time.monotonic()
    try:
        fault.apply(root)
    except (ValueError, OSError) as error:
        return Outcome(fault=fault, verdict=_WRONG, seconds=0.0, detail=str(error))
    try:
        code, output = run_tests(root, [fault.test])
    finally:
        fault.revert(root)
    seconds = time.monotonic() - started
    if code == _FAILED:
        return Outcome(fault=fault, verdict=_CAUGHT, seconds=seconds)
    if code == _PASSED:
        return Outcome(fault=fault, verdict=_SURVIVED, seconds=seconds, detail=f"{fault.test} passes with it")
    what = f"its test did not end within {LIMIT_S} s" if code is None else f"pytest ended with {code}"
    return Outcome(fault=fault, verdict=_WRONG, seconds=seconds, detail=f"{what}:\n{_tail(output)}")


def _tail(output: str) -> str:
    return "\n".join(f"    {line}" for line in output.strip().splitlines()[-6:])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ids", nargs="*", metavar="ID", help="faults to put in (default: all)")
    parser.add_argument("--jobs", type=int, default=max(1, len(os.sched_getaffinity(0)) // 2 + 1), metavar="N")
    args = parser.parse_args()
    unknown = set(args.ids) - {fault.id for fault in FAULTS}
    if unknown:
        parser.error(f"no such fault: {', '.join(sorted(unknown))}")
    chosen = [fault for fault in FAULTS if not args.ids or fault.id in args.ids]
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="epruntime-mutants-") as folder:
        copies = Copies(Path(folder))
        tests = sorted({fault.test for fault in chosen})
        print(f"{len(chosen)} faults; their {len(tests)} tests without any of them ...", flush=True)
        code, output = run_tests(copies.mine(), tests)
        if code != _PASSED:
            print(f"a test does not pass on the code as it is:\n{_tail(output)}")
            return 1
        outcomes = []
        with ThreadPoolExecutor(args.jobs) as pool:
            for outcome in pool.map(lambda fault: judge(fault, copies), chosen):
                outcomes.append(outcome)
                print(f"  {outcome.verdict:<9} {outcome.fault.id} ({outcome.seconds:.0f} s)", flush=True)
    print(f"\n{table(outcomes)}\n")
    caught = sum(outcome.verdict == _CAUGHT for outcome in outcomes)
    print(f"{caught} of {len(outcomes)} faults caught, {time.monotonic() - started:.0f} s")
    return 0 if caught == len(outcomes) else 1


def table(outcomes: Sequence[Outcome]) -> str:
    """Fault, words, test, verdict; what went wrong below."""
    width = max(len(outcome.fault.id) for outcome in outcomes)
    lines = []
    for outcome in outcomes:
        fault = outcome.fault
        lines.append(f"{outcome.verdict:<9} {fault.id:<{width}}  {fault.words}")
        lines.append(f"{'':<9} {'':<{width}}  {fault.test}")
    lines += [f"\n{o.fault.id}: {o.detail}" for o in outcomes if o.detail]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
