"""Ranks killed and stopped, whatever they are doing: the requests end in time and name them, and the engine comes back.

One pool and one engine with restart: each case costs it a rank.
"""

from __future__ import annotations

import asyncio
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from deaths import BOUND, dead, end, error_of, ready, settings, slow_pool, tokens, until
from leftovers import Leftovers

from epruntime.comm.progress import Collective, Phase, Stamp
from epruntime.engine.async_llm import AsyncLLM
from epruntime.engine.status import EngineState, EngineStatus
from epruntime.errors import RankLostError, UnavailableError, status_of
from epruntime.launchers.pool import RankPool
from epruntime.launchers.store import host_store
from epruntime.testing import tiny_models
from epruntime.testing.patience import soon
from epruntime.testing.reference import greedy_reference
from epruntime.testing.slow_rank import SLOW

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

HOST = socket.gethostname()
PROMPT, COUNT = [5, 17, 99, 3], 6
#: tokens enough for 15 steps of prefill.
LONG = [(7 * i) % 120 + 3 for i in range(480)]


class World:
    """A pool of two ranks, of which the second is slow, so that the first mostly waits for it."""

    def __init__(self, folder: Path) -> None:
        _, made = tiny_models.build("mixtral", 0)
        self.model = tiny_models.save(made, folder)
        self.expected = greedy_reference(made, [PROMPT], max_new_tokens=COUNT).tokens[0]
        self.runner = asyncio.Runner()
        self.pool: RankPool = self.runner.run(slow_pool())
        self.llm: AsyncLLM | None = None

    async def engine(self) -> AsyncLLM:
        if self.llm is None:
            config = settings(self.model, restart=True, max_restarts=50)
            self.llm = await AsyncLLM.create(config, rank_pool=self.pool)
        return self.llm

    async def close(self) -> None:
        if self.llm is not None:
            await self.llm.shutdown()
            self.llm = None

    def stamp(self, slot: int) -> Stamp:
        return self.pool.ranks[slot].progress.stamp or Stamp()


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Iterator[World]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SLOW, "1:0.02")
        patch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("t")))
        host_store("127.0.0.1")  # what a first use opens for good is no leak
        asyncio.run(asyncio.sleep(0))
        before = Leftovers.now()
        world = World(tmp_path_factory.mktemp("tiny"))
        try:
            yield world
        finally:
            world.runner.run(world.close())
            world.runner.run(world.pool.stop())
            world.runner.close()
        assert before.grown_by(descriptors=False) == {}


def _check(error: Exception, slot: int, how: signal.Signals) -> str:
    assert isinstance(error, RankLostError)
    assert status_of(error) == ("UNAVAILABLE", 503)
    assert (error.slot, error.host) == (slot, HOST)
    text = str(error)
    assert f"rank {slot} on host {HOST}" in text
    assert "last progress" in text
    assert ("killed by SIGKILL" if how == signal.SIGKILL else "no heartbeat for") in text
    return text


async def _halt(world: World, slot: int, stands: Callable[[Stamp], bool]) -> None:
    """Stops a rank where it stands so: stamps come a little later, and it may have gone on meanwhile."""
    rank = world.pool.ranks[slot]
    while True:
        await until(lambda: stands(world.stamp(slot)), "a rank that is at it")
        end(rank, signal.SIGSTOP)
        await asyncio.sleep(0.3)  # what it had sent is here
        if stands(world.stamp(slot)):
            return
        end(rank, signal.SIGCONT)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("when", ["idle", "prefill", "decode", "collective"])
def test_requests_end_in_time_by_name_and_the_engine_comes_back(world, when, how):
    async def body() -> None:
        llm = await world.engine()
        await ready(llm)
        seen: list[EngineStatus] = []
        forget = llm.on_status(seen.append)
        # the first rank waits for the second, which is slow
        slot = 0 if when == "collective" else 1
        rank, request = world.pool.ranks[slot], None
        if when == "idle":
            await until(lambda: world.stamp(slot).phase is Phase.IDLE, "idle")
        elif when == "prefill":
            request = asyncio.create_task(tokens(llm, LONG, 8))
            stands = lambda stamp: stamp.layer >= 0  # noqa: E731
            await until(lambda: stands(world.stamp(slot)), "a step")
            assert llm._core.stats.prefill_tokens < len(LONG)
        else:
            request = asyncio.create_task(tokens(llm, PROMPT, 400))
            await until(lambda: llm._core.stats.decode_tokens > 0, "decode")
            stands = lambda stamp: stamp.layer >= 0 and (stamp.waits or when == "decode")  # noqa: E731
            await until(lambda: stands(world.stamp(slot)), "in a layer, or waiting there")
        began = time.monotonic()
        if request is not None:
            await _halt(world, slot, stands)
        pid = end(rank, how)
        if request is not None:
            error = await error_of(request, began, BOUND[how])
            assert error.retry_after_s
        else:
            await until(lambda: rank.lost is not None, "lost", BOUND[how])
            error = rank.lost
        text = _check(error, slot, how)
        assert dead(pid)
        if when == "idle":
            assert "idle" in text
        else:
            assert "step " in text
            assert "layer" in text
        if when == "collective":
            assert "waiting in " in text
        # what comes meanwhile is refused with a hint, and what comes later is served rightly
        assert llm.status.state is EngineState.RESTARTING
        with pytest.raises(UnavailableError, match=f"being replaced: rank {slot} on host") as refused:
            await tokens(llm, PROMPT, COUNT)
        assert refused.value.retry_after_s
        await ready(llm)
        assert await tokens(llm, PROMPT, COUNT) == world.expected
        assert world.pool.ranks[slot].info.incarnation == rank.info.incarnation + 1
        states = [status.state for status in seen if status.state is not EngineState.STALLED]
        assert states == [EngineState.RESTARTING, EngineState.READY]
        if how == signal.SIGSTOP:  # health says so before the rank is given up
            assert seen[0].state is EngineState.STALLED
            assert f"rank {slot} on host {HOST} has sent no heartbeat" in seen[0].reason
        forget()

    world.runner.run(asyncio.wait_for(body(), 150))


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_lost_during_load_ends_the_load_and_is_named(world, how):
    async def body() -> None:
        await world.close()
        loading = asyncio.create_task(AsyncLLM.create(settings(world.model), rank_pool=world.pool))
        await until(lambda: world.stamp(1).phase is Phase.LOAD and "layers." in world.stamp(1).note, "load")
        began = time.monotonic()
        pid = end(world.pool.ranks[1], how)
        with pytest.raises(RankLostError) as caught:
            await loading
        assert time.monotonic() - began < soon(BOUND[how])
        assert "load (" in _check(caught.value, 1, how), "names the parameter that was read"
        assert dead(pid)
        await world.pool.replace(1, timeout_s=90)

    world.runner.run(asyncio.wait_for(body(), 120))


def test_a_rank_killed_during_the_restart_is_replaced_too(world):
    async def body() -> None:
        llm = await world.engine()
        await ready(llm)
        generation, first = llm._group.generation, llm._life.num_restarts
        end(world.pool.ranks[1], signal.SIGKILL)
        await until(lambda: llm.status.state is EngineState.RESTARTING, "restarting")
        loading = lambda: world.stamp(0).generation > generation and world.stamp(0).phase is Phase.LOAD  # noqa: E731
        await until(loading, "the survivor loads again")
        end(world.pool.ranks[0], signal.SIGKILL)
        await until(lambda: world.pool.ranks[0].incarnation > 0 or world.pool.ranks[0].lost is not None, "lost")
        await ready(llm)
        assert llm._life.num_restarts == first + 2
        assert await tokens(llm, PROMPT, COUNT) == world.expected

    world.runner.run(asyncio.wait_for(body(), 150))


def test_a_rank_stopped_before_the_ranks_meet_is_named_and_not_the_one_that_waits(world):
    """Last: the innocent one waits for its meeting until the step's deadline."""

    async def body() -> None:
        await world.close()
        end(world.pool.ranks[1], signal.SIGSTOP)
        began = time.monotonic()
        with pytest.raises(RankLostError) as caught:
            await AsyncLLM.create(settings(world.model, preflight=False), rank_pool=world.pool)
        assert time.monotonic() - began < soon(BOUND[signal.SIGSTOP])
        _check(caught.value, 1, signal.SIGSTOP)
        assert world.stamp(0).collective is Collective.RENDEZVOUS

    world.runner.run(asyncio.wait_for(body(), 60))
