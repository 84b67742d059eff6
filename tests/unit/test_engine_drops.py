"""A request that nobody wants any more: its rank forgets it and its KV blocks are free, also in an idle engine."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing

import pytest
from fake_engine import FakeHandle, fake_engine

from epruntime.engine.async_llm import AsyncLLM
from epruntime.engine.scheduler import GroupScheduler
from epruntime.sampling_params import SamplingParams

LONG = SamplingParams(max_tokens=100, seed=1)


def run(body: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(body(), 120))  # type: ignore[arg-type]


def scheduler_of(engine: AsyncLLM) -> GroupScheduler:
    return engine._core.schedulers[0]


async def first_token(engine: AsyncLLM, name: str, leave: asyncio.Event | None = None) -> None:
    """Begins a request and leaves its stream after the first token and, if given, once ``leave`` is set."""
    async with aclosing(engine.stream("abcdefg", LONG, name)) as stream:
        async for delta in stream:
            if delta.num_output_tokens:
                if leave is not None:
                    await leave.wait()
                return


def in_scheduler(engine: AsyncLLM) -> int:
    return scheduler_of(engine).num_running + scheduler_of(engine).num_waiting


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0)


def assert_nothing_left(engine: AsyncLLM, rank: FakeHandle) -> None:
    scheduler = scheduler_of(engine)
    assert rank.rank.num_requests == 0
    assert scheduler.num_free_kv_blocks == scheduler.num_kv_blocks
    assert (scheduler.num_running, scheduler.num_waiting) == (0, 0)


def test_the_only_request_leaves_and_its_rank_is_told_though_there_is_no_other_work() -> None:
    async def body() -> None:
        async with fake_engine() as (engine, (rank,), _):
            await first_token(engine, "r")
            await until(lambda: not engine._core.stepping)
            assert_nothing_left(engine, rank)

    run(body)


def test_it_takes_one_step_more_than_those_in_flight() -> None:
    async def body() -> None:
        async with fake_engine() as (engine, (rank,), _):
            stream = engine.stream("abcdefg", LONG, "r")
            async for delta in stream:
                if delta.num_output_tokens:
                    break
            rank.gate.clear()
            await until(lambda: len(engine._core._in_flight) == engine.config.scheduler.pipeline_depth)
            scheduler = scheduler_of(engine)
            last_in_flight = scheduler._planned_step
            await stream.aclose()
            assert scheduler.num_running == 0  # at once, while no rank answers
            rank.gate.set()
            await until(lambda: not engine._core.stepping)
            assert scheduler._planned_step == last_in_flight + 1
            assert_nothing_left(engine, rank)

    run(body)


@pytest.mark.parametrize("end", ["abort", "cancel", "close", "stop string"])
def test_every_kind_of_end_leaves_nothing_while_others_go_on(end: str) -> None:
    async def body() -> None:
        async with fake_engine() as (engine, (rank,), _):
            leave = asyncio.Event()
            rank.gate.clear()  # until both are there: neither can end before the other has begun
            other = asyncio.create_task(first_token(engine, "other", leave))
            both = asyncio.create_task(until(lambda: in_scheduler(engine) == 2))
            both.add_done_callback(lambda _: (rank.gate.set(), leave.set()))
            if end == "stop string":
                params = SamplingParams(max_tokens=100, seed=1, stop=list("abcdefghijklmnopqrstuvwxyz"))
                async for delta in engine.stream("abcdefg", params, "r"):
                    last = delta
                assert last.outputs[0].finish_reason == "stop"
            elif end == "close":
                await first_token(engine, "r")
            else:

                async def read() -> None:
                    async for _ in engine.stream("abcdefg", LONG, "r"):
                        pass

                reader = asyncio.create_task(read())
                await both
                if end == "abort":
                    await engine.abort("r")
                    await reader
                else:
                    reader.cancel()
                    await asyncio.gather(reader, return_exceptions=True)
            await other
            await until(lambda: not engine._core.stepping)
            assert_nothing_left(engine, rank)

    run(body)
