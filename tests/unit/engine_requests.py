"""Requests to a fake engine: sampled, collected, waited for; and that nothing of them is left."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from fake_engine import VOCAB

from epruntime.engine.async_llm import AsyncLLM
from epruntime.outputs import RequestDelta
from epruntime.plan import SamplingSpec
from epruntime.sampling_params import SamplingParams
from epruntime.testing.fake_rank import unbatched


def run_within(body: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(body(), 120))  # type: ignore[arg-type]


def sampling(**given: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 12, "seed": 3, **given})


def alone(prompt: list[int], seed: int, max_tokens: int = 12) -> list[int]:
    spec = SamplingSpec(temperature=1.0, top_k=0, top_p=1.0, seed=seed, stop_ids=(), max_tokens=max_tokens)
    return unbatched(prompt, spec, VOCAB)[0]


async def collect(engine: AsyncLLM, prompt: Any, params: SamplingParams, name: str | None = None) -> list[RequestDelta]:
    return [delta async for delta in engine.stream(prompt, params, name)]


def tokens_of(deltas: list[RequestDelta], index: int = 0) -> list[int]:
    return [token for d in deltas for o in d.outputs if o.index == index for token in o.token_ids]


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


async def nothing_left(engine: AsyncLLM) -> None:
    """All is given back: at once, but for KV blocks that a step in flight may still write."""
    assert len(engine._live) == 0
    assert engine._live.sequences == {}
    assert set(engine._core._router.loads) == {0}
    for scheduler in engine._core.schedulers:
        assert scheduler.num_running + scheduler.num_waiting == 0
    await asyncio.wait_for(until(lambda: all(s.kv_usage == 0 for s in engine._core.schedulers)), 60)
