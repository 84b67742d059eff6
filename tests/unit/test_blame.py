"""Whom the stamps make the cause, of ranks that all seem to stand still."""

from __future__ import annotations

import asyncio

import pytest

from epruntime.comm.progress import Collective, Phase, Stamps
from epruntime.engine import blame
from epruntime.engine.health import HealthWatch
from epruntime.engine.status import StatusHolder
from epruntime.errors import RankLostError
from epruntime.launchers.base import Seat
from epruntime.launchers.clock import LoopClock
from epruntime.launchers.handle import RankHandle


class HandClock(LoopClock):
    """Time that passes when a test says so."""

    time = 0.0

    def now(self) -> float:
        return self.time


class Fleet:
    """Ranks whose heartbeats a test sends."""

    def __init__(self, size: int) -> None:
        self.clock = HandClock()
        self.stamps = [Stamps() for _ in range(size)]
        self.ranks = [
            RankHandle(Seat(slot=slot, host=f"host{slot}", local_rank=0, threads=1), 0, self.clock)
            for slot in range(size)
        ]
        for stamps in self.stamps:
            stamps.join(0)
            stamps.enter(Phase.FORWARD, step=3)

    def waits(self, slot: int, times: int, *, still: bool = True) -> None:
        """The rank has begun so many waits; the last goes on, or not."""
        for _ in range(times):
            self.stamps[slot].go_on()
            self.stamps[slot].wait(Collective.DISPATCH)
        if not still:
            self.stamps[slot].go_on()

    def beat(self, *slots: int, after_s: float = 0.0) -> None:
        self.clock.time += after_s
        for slot in slots or range(len(self.ranks)):
            self.ranks[slot]._heartbeats.take({"type": "beat", "stamp": bytes(self.stamps[slot].memory)})


def _suspect(make, size: int = 3) -> int | None:
    async def body() -> int | None:
        fleet = Fleet(size)
        make(fleet)
        found = blame.suspect(fleet.ranks)
        return None if found is None else found.seat.slot

    return asyncio.run(body())


def test_the_one_that_computes_is_to_blame_and_not_those_that_wait_for_it():
    def make(fleet: Fleet) -> None:
        fleet.waits(0, 5)
        fleet.waits(1, 4, still=False)  # has not come to the fifth
        fleet.waits(2, 5)
        fleet.beat()

    assert _suspect(make) == 1


def test_in_a_chain_it_is_the_last():
    def make(fleet: Fleet) -> None:
        fleet.waits(0, 6)  # waits for 1
        fleet.waits(1, 5)  # waits for 2
        fleet.waits(2, 4, still=False)
        fleet.beat()

    assert _suspect(make) == 2


def test_one_that_has_not_begun_the_step_is_to_blame():
    def make(fleet: Fleet) -> None:
        fleet.waits(0, 1)
        fleet.stamps[1].enter(Phase.IDLE)
        fleet.waits(2, 1)
        fleet.beat()

    assert _suspect(make) == 1


def test_one_in_an_older_generation_is_to_blame():
    def make(fleet: Fleet) -> None:
        for slot in (0, 2):
            fleet.stamps[slot].join(1)
            fleet.stamps[slot].wait(Collective.RENDEZVOUS)
        fleet.waits(1, 9)
        fleet.beat()

    assert _suspect(make) == 1


def test_silence_comes_before_everything():
    def make(fleet: Fleet) -> None:
        fleet.waits(0, 5)
        fleet.waits(1, 3, still=False)
        fleet.waits(2, 5)
        fleet.beat()
        fleet.beat(0, 1, after_s=blame.SILENT_S + 1)

    assert _suspect(make) == 2


def test_nobody_is_to_blame_where_all_wait_in_the_same_exchange():
    def make(fleet: Fleet) -> None:
        for slot in range(3):
            fleet.waits(slot, 5)
        fleet.beat()

    assert _suspect(make) is None
    assert _suspect(lambda fleet: None) is None, "nothing is known"


def test_a_rank_alone_is_its_own_cause():
    assert _suspect(lambda fleet: (fleet.waits(0, 2, still=False), fleet.beat()), 1) == 0


@pytest.mark.parametrize(
    ("silent_s", "still_s", "words"),
    [
        (5.0, 5.0, "no heartbeat for 5.0 s"),
        (0.0, 5.0, "its heartbeats go on, but its progress stands still"),
        (0.0, 0.0, "it goes on, too slowly; raise step_timeout_s"),
    ],
)
def test_words_for_frozen_stuck_and_slow(silent_s, still_s, words):
    async def body() -> None:
        fleet = Fleet(1)
        fleet.beat()
        fleet.clock.time = still_s
        if still_s == 0.0:
            fleet.stamps[0].at_layer(1)
        if silent_s == 0.0:
            fleet.beat()
        assert words in blame.verdict(fleet.ranks[0], "a step", 5.0, "step_timeout_s")

    asyncio.run(body())


def test_an_overdue_step_condemns_the_stuck_rank_and_an_accusation_alone_nobody():
    async def body() -> None:
        loop = asyncio.get_running_loop()
        fleet = Fleet(3)
        fleet.waits(0, 5)
        fleet.waits(1, 4, still=False)
        fleet.waits(2, 5)
        fleet.beat()
        futures = [loop.create_future() for _ in range(3)]
        error = await blame.cause(
            fleet.ranks, futures, overdue=True, what="a step", limit_s=5.0, option="step_timeout_s"
        )
        assert isinstance(error, RankLostError)
        assert error.slot == 1
        assert [rank.condemned.done() for rank in fleet.ranks] == [False, True, False]

        fleet = Fleet(2)
        futures = [loop.create_future(), loop.create_future()]
        for future, slot in zip(futures, (1, 0), strict=True):
            future.set_exception(RankLostError(slot=slot, host="h", detail="connection reset"))
        error = await blame.cause(fleet.ranks, futures, overdue=False, what="a step", limit_s=5.0, option="x")
        assert isinstance(error, RankLostError)
        assert not any(rank.condemned.done() for rank in fleet.ranks)

    asyncio.run(body())


def test_a_rank_that_rested_is_not_still_when_work_comes():
    async def body() -> None:
        fleet, stepping = Fleet(2), [False]
        for stamps in fleet.stamps:
            stamps.enter(Phase.IDLE)
        fleet.beat()
        watch = HealthWatch(fleet.ranks, lambda: stepping[0], StatusHolder(), step_timeout_s=100)
        for _ in range(60):
            fleet.beat(after_s=1.0)
            assert watch.look() == ""
        stepping[0] = True  # a request, of which no heartbeat tells yet
        assert watch.look() == ""
        for _ in range(5):
            fleet.beat(after_s=1.0)
            assert watch.look() == ""
        fleet.beat(after_s=0.5)
        assert "has not moved for more than 5 s" in watch.look(), "it did not begin in all that time"
        fleet.stamps[0].enter(Phase.FORWARD, step=4)
        fleet.stamps[1].enter(Phase.FORWARD, step=4)
        fleet.beat()
        assert watch.look() == ""
        for _ in range(6):
            fleet.beat(after_s=1.0)
        assert "has not moved for more than 5 s" in watch.look()
        watch.close()

    asyncio.run(body())


def test_health_tells_silent_and_still_ranks_and_forgives():
    async def body() -> None:
        fleet, stepping = Fleet(2), [True]
        fleet.waits(0, 5)
        fleet.waits(1, 4, still=False)
        fleet.beat()
        watch = HealthWatch(fleet.ranks, lambda: stepping[0], StatusHolder(), step_timeout_s=100)
        assert watch.look() == ""
        for _ in range(4):
            fleet.beat(after_s=1.0)
        assert watch.look() == ""
        fleet.beat(after_s=1.5)
        first = watch.look()
        assert first == "rank 1 on host host1 has not moved for more than 5 s: step 3"
        fleet.beat(after_s=1.0)
        assert watch.look() == first, "the same words, so that nobody is told again"
        stepping[0] = False
        assert watch.look() == "", "without work nobody need move"
        stepping[0] = True
        fleet.stamps[1].at_layer(2)
        fleet.beat()
        assert watch.look() == ""
        fleet.beat(1, after_s=blame.SILENT_S + 0.1)
        stepping[0] = False
        assert "rank 0 on host host0 has sent no heartbeat for more than 2 s" in watch.look()
        watch.close()

    asyncio.run(body())
