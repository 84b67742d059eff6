"""Recovery and Lifecycle on ranks without processes: budget, survivors, losses in the middle of a restart."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from epruntime.config import EngineConfig
from epruntime.engine import recovery as recovery_module
from epruntime.engine.lifecycle import Lifecycle
from epruntime.engine.model_group import ModelGroup
from epruntime.engine.recovery import Recovery
from epruntime.engine.status import EngineState
from epruntime.errors import CheckpointError, EngineDeadError, LaunchError, RankLostError, UnavailableError
from epruntime.launchers.base import Seat
from epruntime.launchers.handle import RankHandle

Answer = dict[str, Any] | BaseException | None


def lost(slot: int, detail: str = "killed by SIGKILL") -> RankLostError:
    return RankLostError(slot=slot, host=f"host{slot}", detail=detail)


class Rank(RankHandle):
    """Answers `unload` as `answer` says; None: never."""

    def __init__(self, slot: int, incarnation: int = 0, answer: Answer = None) -> None:
        super().__init__(Seat(slot=slot, host=f"host{slot}", local_rank=0, threads=1), incarnation)
        self.answer: Answer = {} if answer is None else answer
        self.silent = False
        self.asked: list[str] = []

    def call(self, type: str, timeout_s: float | None = None, **body: Any) -> asyncio.Future[dict[str, Any]]:
        self.asked.append(type)
        future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        if self.silent:
            asyncio.get_running_loop().call_later(
                timeout_s or 0, future.set_exception, lost(self.seat.slot, f"it did not answer {type!r}")
            )
        elif isinstance(self.answer, BaseException):
            future.set_exception(self.answer)
        else:
            future.set_result(self.answer or {})
        return future


class Pool:
    def __init__(self, size: int) -> None:
        self.ranks: list[RankHandle] = [Rank(slot) for slot in range(size)]
        self.replaced: list[int] = []
        self.failures: list[Exception] = []

    async def replace(self, slot: int, *, timeout_s: float) -> RankHandle:
        self.replaced.append(slot)
        if self.failures:
            raise self.failures.pop(0)
        self.ranks[slot] = Rank(slot, self.ranks[slot].incarnation + 1)
        return self.ranks[slot]


class Group:
    def __init__(self, pool: Pool, generation: int) -> None:
        self.ranks, self.generation = list(pool.ranks), generation

    def on_lost(self, callback: Callable[[EngineDeadError], None]) -> Callable[[], None]:
        return lambda: None


class Loads:
    """Stands in for ModelGroup.load: one outcome after another, then success."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *outcomes: Exception) -> None:
        self.outcomes, self.count = list(outcomes), 0
        monkeypatch.setattr(ModelGroup, "load", self)

    async def __call__(self, config: EngineConfig, pool: Pool) -> Group:
        self.count += 1
        await asyncio.sleep(0)
        if self.outcomes:
            raise self.outcomes.pop(0)
        return Group(pool, self.count)


def config(**options: Any) -> EngineConfig:
    return EngineConfig.from_kwargs(
        **{"model": "m", "expert_parallel_size": 3, "restart": True, "step_timeout_s": 0.2, **options}
    )


async def _restored(pool: Pool, error: EngineDeadError, **options: Any) -> Any:
    return await Recovery(config(**options), pool).restore(error)  # type: ignore[arg-type]


def run(coroutine: Any) -> None:
    asyncio.run(asyncio.wait_for(coroutine, 60))


def test_the_lost_slot_alone_is_replaced_and_survivors_leave_their_generation(monkeypatch):
    async def body() -> None:
        pool = Pool(3)
        old = list(pool.ranks)
        old[1].fail(lost(1))
        Loads(monkeypatch)
        group = await _restored(pool, lost(1))
        assert pool.replaced == [1]
        assert [rank.asked for rank in old] == [["unload"], [], ["unload"]]
        assert [rank.incarnation for rank in group.ranks] == [0, 1, 0]

    run(body())


def test_a_survivor_that_does_not_leave_or_is_condemned_is_replaced_as_well(monkeypatch):
    async def body() -> None:
        pool = Pool(3)
        pool.ranks[0].fail(lost(0))
        pool.ranks[1].silent = True  # type: ignore[attr-defined]
        pool.ranks[2].condemn("stuck")
        Loads(monkeypatch)
        await _restored(pool, lost(0))
        assert sorted(pool.replaced) == [0, 1, 2]

    run(body())


def test_a_rank_lost_during_the_restart_or_not_started_is_tried_again(monkeypatch):
    async def body() -> None:
        pool = Pool(3)
        pool.ranks[0].fail(lost(0))
        pool.failures = [LaunchError("no room")]
        loads = Loads(monkeypatch, lost(2), EngineDeadError("the ranks did not meet"))
        recovery = Recovery(config(max_restarts=4), pool)  # type: ignore[arg-type]
        await recovery.restore(lost(0))
        assert pool.replaced == [0, 0]
        assert loads.count == 3
        assert recovery.num_restarts == 4

    run(body())


def test_restarts_within_an_hour_are_limited_and_the_last_loss_is_named(monkeypatch):
    async def body() -> None:
        pool, now = Pool(3), [1000.0]
        # in that module alone: the event loop has the same clock
        monkeypatch.setattr(recovery_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
        Loads(monkeypatch)
        recovery = Recovery(config(max_restarts=2), pool)  # type: ignore[arg-type]
        await recovery.restore(lost(0))
        now[0] += 1800
        await recovery.restore(lost(1))
        with pytest.raises(RankLostError, match=r"rank 2 on host host2 .*not replaced after 2 restarts within an hour"):
            await recovery.restore(lost(2))
        with pytest.raises(EngineDeadError, match=r"broken; not replaced after 2 restarts"):
            await recovery.restore(EngineDeadError("broken"))
        now[0] += 1801  # the first is more than an hour ago
        await recovery.restore(lost(2))
        assert recovery.num_restarts == 3

    run(body())


def test_what_would_fail_again_is_not_tried_again(monkeypatch):
    async def body() -> None:
        loads = Loads(monkeypatch, CheckpointError("shard 3 is damaged"))
        with pytest.raises(EngineDeadError, match="cannot be restarted: CheckpointError: shard 3 is damaged"):
            await _restored(Pool(3), lost(0))
        assert loads.count == 1

    run(body())


class Core:
    """A core that dies when a test says so."""

    def __init__(self) -> None:
        self.dead_error: EngineDeadError | None = None
        self.stepping = False
        self.stopped = False

    def fail(self, error: EngineDeadError) -> None:
        self.dead_error = error

    async def stop(self) -> None:
        self.stopped = True


class Engine:
    def __init__(self, pool: Pool, **options: Any) -> None:
        self.cores: list[Core] = []
        self.down: list[EngineDeadError] = []
        self.life = Lifecycle(
            config(**options),
            pool,  # type: ignore[arg-type]
            Group(pool, 0),  # type: ignore[arg-type]
            open_core=self._open,  # type: ignore[arg-type]
            on_down=self.down.append,
        )
        self.states: list[EngineState] = []
        self.life.status.on_change(lambda status: self.states.append(status.state))

    def _open(self, group: Group) -> Core:
        self.cores.append(Core())
        return self.cores[-1]

    def die(self, error: EngineDeadError) -> None:
        self.cores[-1].fail(error)
        self.life.core_died(error)

    async def settled(self) -> None:
        while self.life.status.status.state is EngineState.RESTARTING:
            await asyncio.sleep(0)


def test_a_lifecycle_goes_down_and_comes_back(monkeypatch):
    async def body() -> None:
        Loads(monkeypatch)
        engine = Engine(Pool(3))
        engine.life.check()
        engine.die(lost(1))
        (told,) = engine.down
        assert isinstance(told, RankLostError)
        assert (told.slot, told.host) == (1, "host1")
        assert told.retry_after_s
        with pytest.raises(UnavailableError, match="being replaced: rank 1 on host host1") as refused:
            engine.life.check()
        assert refused.value.retry_after_s
        assert engine.life.dead_error is None
        await engine.settled()
        assert engine.states == [EngineState.RESTARTING, EngineState.READY]
        assert len(engine.cores) == 2
        assert engine.life.core is engine.cores[1]
        engine.life.check()
        await engine.life.close()
        assert engine.cores[1].stopped

    run(body())


def test_without_restart_and_past_the_limit_it_is_dead_for_good(monkeypatch):
    async def body() -> None:
        Loads(monkeypatch)
        engine = Engine(Pool(3), restart=False)
        engine.die(lost(1))
        assert engine.states == [EngineState.DEAD]
        assert engine.down[0].retry_after_s is None
        with pytest.raises(RankLostError, match="rank 1"):
            engine.life.check()
        await engine.life.close()

        engine = Engine(Pool(3), max_restarts=1)
        engine.die(lost(1))
        await engine.settled()
        engine.die(lost(2))
        await engine.settled()
        assert engine.states == [
            EngineState.RESTARTING, EngineState.READY, EngineState.RESTARTING, EngineState.DEAD,
        ]  # fmt: skip
        assert engine.life.dead_error is not None
        with pytest.raises(RankLostError, match=r"rank 2 .*max_restarts"):
            engine.life.check()
        await engine.life.close()

    run(body())


def test_closing_ends_a_restart_that_is_under_way(monkeypatch):
    async def body() -> None:
        pool = Pool(3)
        pool.ranks[0].silent = True  # type: ignore[attr-defined]
        loads = Loads(monkeypatch)
        engine = Engine(pool, step_timeout_s=60.0)
        engine.die(lost(1))
        await asyncio.sleep(0)
        await engine.life.close()
        assert loads.count == 0
        assert engine.states == [EngineState.RESTARTING]

    run(body())
