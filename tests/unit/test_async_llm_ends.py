"""How requests to an AsyncLLM end: stop strings, aborts, readers that leave, drain, shutdown, death; none is kept."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from contextlib import aclosing
from typing import Any

import pytest
from engine_requests import alone, collect, nothing_left, run_within, sampling, tokens_of, until
from fake_engine import LETTERS, fake_engine

from epruntime.engine.async_llm import AsyncLLM
from epruntime.engine.request_state import RequestState
from epruntime.engine.status import EngineState
from epruntime.errors import EngineDeadError, RankLostError, RequestNotFoundError, UnavailableError
from epruntime.sampling_params import derive_seed


@pytest.mark.parametrize("how", ["abort", "close", "cancel"])
def test_all_sequences_end_with_the_request(how: str) -> None:
    async def body() -> None:
        async with fake_engine(2) as (engine, _, _):
            stream = engine.stream("abc", sampling(n=6, max_tokens=100), "r")
            async with aclosing(stream):
                await anext(stream)
                await anext(stream)
                if how == "abort":
                    await engine.abort("r")
                    rest = [delta async for delta in stream]
                    assert {o.finish_reason for d in rest for o in d.outputs} == {"abort"}
                    assert sorted(o.index for o in rest[-1].outputs) == list(range(6))
                elif how == "cancel":
                    task = asyncio.ensure_future(anext(stream))
                    await asyncio.sleep(0)
                    task.cancel()
                    with pytest.raises(asyncio.CancelledError):
                        await task
            await nothing_left(engine)

    run_within(body)


def test_a_stop_string_ends_the_work_at_once_though_nobody_reads() -> None:
    async def body() -> None:
        async with fake_engine() as (engine, _, _):
            free = alone([7], 3, 100)
            stream = engine.stream([7], sampling(stop=[LETTERS[free[9]]], max_tokens=100))
            await anext(stream)
            core = engine._core
            await until(lambda: core.schedulers[0].num_running == 0 and core.stats.decode_tokens > 0)
            assert core.stats.decode_tokens < 9 + 4  # and those of steps in flight
            (delta,) = [delta async for delta in stream]
            assert delta.outputs[0].text == "".join(LETTERS[t] for t in free[:9]).split(LETTERS[free[9]])[0]

    run_within(body)


def test_each_sequence_has_its_own_stop_string() -> None:
    async def body() -> None:
        async with fake_engine() as (engine, _, _):
            free = [alone([7], derive_seed(3, i), 30) for i in range(3)]
            letter = LETTERS[free[1][4]]
            deltas = await collect(engine, [7], sampling(n=3, stop=[letter], max_tokens=30))
            for index in range(3):
                text = "".join(o.text for d in deltas for o in d.outputs if o.index == index)
                assert text == "".join(LETTERS[t] for t in free[index]).split(letter)[0]
            assert engine._core.schedulers[0].num_running == 0

    run_within(body)


def test_a_reader_that_leaves_while_its_prompt_is_read() -> None:
    async def body() -> None:
        async with fake_engine() as (engine, _, tokenizer):
            tokenizer.delays["slow"] = 0.2
            task = asyncio.ensure_future(collect(engine, "slow", sampling(), "r"))
            await until(lambda: tokenizer.encoded == ["slow"])
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await nothing_left(engine)
            with pytest.raises(RequestNotFoundError):
                await engine.abort("r")
            assert len(tokens_of(await collect(engine, "ab", sampling(), "r"))) == 12

    run_within(body)


def test_drain_waits_for_a_prompt_that_is_being_read() -> None:
    async def body() -> None:
        async with fake_engine() as (engine, _, tokenizer):
            tokenizer.delays["slow"] = 0.2
            task = asyncio.ensure_future(collect(engine, "slow", sampling()))
            await until(lambda: tokenizer.encoded == ["slow"])
            assert not await engine.drain(0.01)
            with pytest.raises(UnavailableError, match="takes no new requests"):
                await collect(engine, "x", sampling())
            assert await engine.drain(5)
            assert len(tokens_of(task.result())) == 12

    run_within(body)


def test_shutdown_ends_requests_in_every_state() -> None:
    async def body() -> None:
        async with fake_engine() as (engine, (rank,), tokenizer):
            rank.gate.clear()
            running = asyncio.ensure_future(collect(engine, "ab", sampling()))
            await until(lambda: engine._core.schedulers[0].num_running == 1)
            hold = tokenizer.holds["slow"] = threading.Event()
            reading = [asyncio.ensure_future(collect(engine, "slow", sampling())) for _ in range(2)]
            asking = [asyncio.ensure_future(engine.tokenize("slow")) for _ in range(2)]
            await until(lambda: tokenizer.encoded[-1] == "slow")
            await engine.shutdown()
            results = await asyncio.gather(running, *reading, *asking, return_exceptions=True)
            hold.set()  # until now the tokenizer was at it: it was not waited for
            assert not tokenizer.held_too_long
            assert [type(result) for result in results] == [UnavailableError] * 5
            with pytest.raises(UnavailableError):
                await engine.tokenize("a")

    run_within(body)


def test_a_dead_engine_ends_requests_in_every_state_and_says_so() -> None:
    async def body() -> None:
        async with fake_engine() as (engine, (rank,), tokenizer):
            rank.gate.clear()
            heard = []
            forget = engine.on_status(heard.append)
            engine.on_status(lambda status: None)()
            running = asyncio.ensure_future(collect(engine, "ab", sampling(n=2)))
            await until(lambda: engine._core.schedulers[0].num_running == 2)
            tokenizer.delays["slow"] = 0.2
            reading = asyncio.ensure_future(collect(engine, "slow", sampling()))
            await until(lambda: tokenizer.encoded[-1] == "slow")
            assert engine.status.state is EngineState.READY
            engine._core.fail(RankLostError(slot=0, host="host0", detail="killed"))
            for task in (running, reading):
                with pytest.raises(RankLostError, match="rank 0 on host host0"):
                    await task
            with pytest.raises(EngineDeadError):
                await collect(engine, "x", sampling())
            assert (engine.status.state, len(heard)) == (EngineState.DEAD, 1)
            assert "rank 0 on host host0" in engine.status.reason
            forget()
            forget()
            assert len(engine._live) == 0

    run_within(body)


def test_nothing_is_kept_of_requests_however_they_end(monkeypatch: pytest.MonkeyPatch) -> None:
    states: weakref.WeakSet[RequestState] = weakref.WeakSet()
    init = RequestState.__init__

    def watched(self: RequestState, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        states.add(self)

    monkeypatch.setattr(RequestState, "__init__", watched)

    async def one(engine: AsyncLLM, i: int) -> None:
        """Leaves after i deltas, in one of several ways."""
        kind, name = i % 5, f"r{i}"
        stream = engine.stream("abc"[: i % 3 + 1], sampling(n=i % 3 + 1, seed=i, stop=["Q"]), name)
        async with aclosing(stream):
            for _ in range(i % 4):
                await anext(stream)
            if kind == 0:
                return
            if kind == 1 and i % 4:
                await engine.abort(name)
            if kind == 2:
                task = asyncio.ensure_future(anext(stream, None))
                await asyncio.sleep(0)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                return
            async for _ in stream:
                pass

    async def body() -> None:
        async with fake_engine(2) as (engine, ranks, _):
            for _ in range(3):
                await asyncio.gather(*(one(engine, i) for i in range(60)))
                await nothing_left(engine)
                await until(lambda: not any(rank.tasks for rank in ranks))
                gc.collect()
                assert len(states) == 0

    run_within(body)
