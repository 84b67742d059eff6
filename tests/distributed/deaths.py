"""Engines on slow ranks, for tests that kill one: where a rank is, is read from its stamps."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from leftovers import is_alive

from epruntime.config import EngineConfig
from epruntime.engine.async_llm import AsyncLLM
from epruntime.engine.status import EngineState
from epruntime.errors import EPRuntimeError
from epruntime.launchers.handle import RankHandle
from epruntime.launchers.local import LocalLauncher
from epruntime.launchers.pool import RankPool
from epruntime.sampling_params import SamplingParams
from epruntime.testing.patience import PATIENCE_S, soon

#: what a test gives a stopped rank before it counts as lost; a machine under load delays beats by tenths of a second.
HEARTBEAT_TIMEOUT_S = 2.5
STEP_TIMEOUT_S = 20.0
#: a killed rank's requests must end within it; a stopped one's so long after HEARTBEAT_TIMEOUT_S.
BOUND_S = 5.0
START_S = 90.0
BOUND = {signal.SIGKILL: BOUND_S, signal.SIGSTOP: HEARTBEAT_TIMEOUT_S + BOUND_S}


def settings(model: Path, size: int = 2, **options: object) -> EngineConfig:
    values = {
        "expert_parallel_size": size,
        "threads_per_rank": 1,
        "max_model_len": 512,
        "num_kv_blocks": 64,
        "max_num_batched_tokens": 32,
        "max_num_seqs": 8,
        "heartbeat_timeout_s": HEARTBEAT_TIMEOUT_S,
        "step_timeout_s": STEP_TIMEOUT_S,
        "start_timeout_s": START_S,
    }
    return EngineConfig.from_kwargs(model=str(model), **values | options)


async def slow_pool(size: int = 2) -> RankPool:
    """Ranks as EPRUNTIME_TEST_SLOW has them."""
    launcher = LocalLauncher(entry_module="epruntime.testing.slow_rank")
    return await RankPool.start(size, launcher=launcher, threads_per_rank=1, start_timeout_s=START_S)


async def tokens(llm: AsyncLLM, prompt: list[int], count: int) -> list[int]:
    """Greedy tokens of one request."""
    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
    out: list[int] = []
    async for output in llm.generate({"prompt_token_ids": prompt}, params):
        out = output.outputs[0].token_ids
    return list(out)


async def until(condition: Callable[[], bool], what: str, seconds: float = PATIENCE_S) -> None:
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < soon(seconds), f"not within {seconds} s: {what}"
        await asyncio.sleep(0.01)


async def ready(llm: AsyncLLM, seconds: float = START_S) -> None:
    await until(lambda: llm.status.state is EngineState.READY, "the engine is ready again", seconds)


def end(rank: RankHandle, how: signal.Signals) -> int:
    """Kills or stops a rank; returns its pid."""
    os.kill(rank.info.pid, how)
    return rank.info.pid


async def error_of(task: asyncio.Task[list[int]], began: float, bound_s: float) -> EPRuntimeError:
    """The error that a request ended with, which must have come in time."""
    try:
        result = await asyncio.wait_for(task, PATIENCE_S)
    except EPRuntimeError as error:
        assert time.monotonic() - began < soon(bound_s)
        return error
    raise AssertionError(f"the request ended well: {result}")


def dead(pid: int) -> bool:
    return not is_alive(pid)
