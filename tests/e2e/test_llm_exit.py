"""Scripts that end without shutting their LLM down, in their own way or by Ctrl-C: no rank stays behind."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from epruntime.testing.patience import PATIENCE_S
from epruntime.testing.tiny_models import build, save

START = """
import sys
from epruntime import LLM, SamplingParams
llm = LLM(sys.argv[1], expert_parallel_size=2, launcher=sys.argv[2], dtype="float32", max_model_len=256,
          num_kv_blocks=256, max_num_seqs=8, max_num_batched_tokens=32)
print(*(rank["pid"] for rank in llm.info()["ranks"]), flush=True)
prompts = [{"prompt_token_ids": [1, 2, 3]}] * 8
"""
ONCE = START + "llm.generate(prompts, SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)\n"
FOREVER = START + "while True: llm.generate(prompts, SamplingParams(max_tokens=200, ignore_eos=True), use_tqdm=False)\n"
#: The LLM becomes garbage in a cycle, which is found by the collector, in whichever thread that runs.
GARBAGE = (
    ONCE
    + """
import asyncio, gc
llm.me = llm
thread = llm._loop_thread
del llm
async def collect(): gc.collect()
thread.run(collect())
"""
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    _, built = build("mixtral")
    return save(built, tmp_path_factory.mktemp("mixtral"))


def _start(script: str, model: Path, launcher: str = "local") -> tuple[subprocess.Popen[str], list[int]]:
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(model), launcher],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise AssertionError(process.communicate()[1])
    return process, [int(pid) for pid in line.split()]


def _runs(pid: int) -> bool:
    """A dead orphan stays in the table for as long as the machine's first process takes to collect it."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _left(pids: list[int]) -> list[int]:
    deadline = time.monotonic() + PATIENCE_S / 2
    while alive := [pid for pid in pids if _runs(pid)]:
        if time.monotonic() > deadline:
            break
        time.sleep(0.05)
    return alive


@pytest.mark.parametrize(
    ("script", "launcher"),
    [(ONCE, "local"), (ONCE, "ray"), (GARBAGE, "local")],
    ids=["local", "ray", "garbage collected in the loop's thread"],
)
def test_a_script_without_shutdown_leaves_nothing(script: str, launcher: str, model: Path) -> None:
    process, pids = _start(script, model, launcher)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert "lost" not in errors
    assert "Traceback" not in errors
    assert _left(pids) == []


def test_ctrl_c_ends_generation_and_ranks(model: Path) -> None:
    process, pids = _start(FOREVER, model)
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == -signal.SIGINT  # which a shell shows as 130
    assert errors.rstrip().endswith("KeyboardInterrupt")
    assert _left(pids) == []
