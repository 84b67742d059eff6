"""EngineCore on ranks that do as they are told: whom it blames, and what it tells of a request."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from epruntime.config import EngineConfig
from epruntime.engine import blame
from epruntime.engine.core import EngineCore
from epruntime.engine.processor import InputProcessor, Limits
from epruntime.engine.scheduler import GroupScheduler
from epruntime.engine.token_updates import TokenUpdate
from epruntime.errors import EngineDeadError, RankLostError
from epruntime.launchers.base import Seat
from epruntime.launchers.handle import RankHandle
from epruntime.plan import StepPlan
from epruntime.sampling_params import SamplingParams
from epruntime.testing.fake_rank import FakeRank

STEP_TIMEOUT_S = 0.2

Answer = dict[str, Any] | BaseException | None


class ScriptedRank(RankHandle):
    """Answers plans as a real rank does, or as `script` says instead: with an error, or (None) not at all."""

    def __init__(self, slot: int, script: Callable[[StepPlan], Answer] | None = None) -> None:
        super().__init__(Seat(slot=slot, host=f"host{slot}", local_rank=0, threads=1), incarnation=0)
        self._script = script
        self._fake = FakeRank(num_blocks=64, block_size=4, max_num_seqs=4, max_num_batched_tokens=512, vocab_size=50)

    def call(self, type: str, timeout_s: float | None = None, **body: Any) -> asyncio.Future[dict[str, Any]]:
        future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        plan = StepPlan.from_wire(body["plan"])
        if self._script is None:
            self._fake.step(plan)
            answer: Answer = {"result": self._fake.collect().to_wire()}
        else:
            answer = self._script(plan)
        if isinstance(answer, BaseException):
            future.set_exception(answer)
            future.exception()
        elif answer is not None:
            asyncio.get_running_loop().call_soon(lambda: future.done() or future.set_result(answer))
        return future


class Engine:
    """An EngineCore, and what it said."""

    def __init__(self, *ranks: RankHandle) -> None:
        config = EngineConfig.from_kwargs(model="none", step_timeout_s=STEP_TIMEOUT_S, max_num_seqs=4)
        schedulers = [
            GroupScheduler(config.scheduler, block_size=4, num_kv_blocks=64, prefix_caching=True, max_model_len=64)
            for _ in ranks
        ]
        self.scheduled: list[int] = []
        self.updates: list[TokenUpdate] = []
        self.dead: asyncio.Future[EngineDeadError] = asyncio.get_running_loop().create_future()
        self.core = EngineCore(
            config,
            ranks,
            schedulers,
            on_scheduled=lambda new: self.scheduled.append(new.rid),
            on_updates=self.updates.extend,
            on_dead=self.dead.set_result,
        )

    def add(self, rid: int, max_tokens: int = 4) -> None:
        processor = InputProcessor(None, Limits(max_model_len=64, vocab_size=50, eos_token_ids=()))
        request = processor.process(
            {"prompt_token_ids": [1, 2, rid]},
            SamplingParams(temperature=0, max_tokens=max_tokens),
            rid=rid,
            request_id=str(rid),
            arrival_time=0.0,
        )
        self.core.add(request)


@pytest.fixture(autouse=True)
def short_window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blame, "WINDOW_S", 0.1)


def _blamed(make_ranks: Callable[[], list[RankHandle]]) -> EngineDeadError:
    async def body() -> EngineDeadError:
        engine = Engine(*make_ranks())
        engine.add(1)
        return await asyncio.wait_for(engine.dead, 60)

    return asyncio.run(body())


def _lost(slot: int, detail: str = "said a peer") -> RankLostError:
    return RankLostError(slot=slot, host=f"host{slot}", detail=detail)


def test_a_request_is_scheduled_once_and_leaves_nothing_behind() -> None:
    async def body() -> Engine:
        engine = Engine(ScriptedRank(0), ScriptedRank(1))
        for rid in (1, 2, 3):
            engine.add(rid)
        while sum(update.finish != 0 for update in engine.updates) < 3:
            await asyncio.sleep(0)
        engine.core.drop(1)  # has ended: nothing to do
        await engine.core.stop()
        return engine

    engine = asyncio.run(asyncio.wait_for(body(), 60))
    assert sorted(engine.scheduled) == [1, 2, 3]
    assert len(engine.updates) == 12
    assert engine.core._router.loads == (0, 0)
    assert engine.core.dead_error is None


def test_a_stuck_rank_is_blamed_where_nobody_speaks() -> None:
    error = _blamed(lambda: [ScriptedRank(0), ScriptedRank(1, lambda plan: None)])
    assert isinstance(error, RankLostError)
    assert (error.slot, error.host) == (1, "host1")
    assert "did not end a step within 0.2 s" in str(error)


def test_the_rank_that_all_wait_for_is_blamed_and_not_one_that_waits_for_it() -> None:
    """Rank 0 waits for rank 1, which waits for rank 2, which is stuck."""
    error = _blamed(
        lambda: [
            ScriptedRank(0, lambda plan: _lost(1)),
            ScriptedRank(1, lambda plan: _lost(2)),
            ScriptedRank(2, lambda plan: None),
        ]
    )
    assert isinstance(error, RankLostError)
    assert (error.slot, error.detail) == (2, "said a peer")


def test_a_rank_s_own_error_comes_before_what_peers_say_of_it() -> None:
    error = _blamed(
        lambda: [ScriptedRank(0, lambda plan: _lost(1)), ScriptedRank(1, lambda plan: EngineDeadError("bad kernel"))]
    )
    assert str(error) == "bad kernel"


def test_a_confirmed_end_comes_before_everything() -> None:
    def ranks() -> list[RankHandle]:
        dead = ScriptedRank(1, lambda plan: _lost(1, "killed by SIGKILL"))
        dead.lost = _lost(1, "killed by SIGKILL")
        return [ScriptedRank(0, lambda plan: EngineDeadError("its exchange broke")), dead]

    error = _blamed(ranks)
    assert isinstance(error, RankLostError)
    assert error.detail == "killed by SIGKILL"
