"""Engine statistics: sums over ranks and layers, counters that never fall, and the poll that keeps them fresh."""

from __future__ import annotations

import asyncio
import itertools
import time
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import msgpack
import numpy as np
import pytest
import torch

from epruntime.config import EngineConfig
from epruntime.config.engine import ModelConfig
from epruntime.engine.core import CoreStats
from epruntime.engine.stats import EngineStats, EngineView, StatsBook, balancedness
from epruntime.engine.stats_poller import StatsPoller
from epruntime.errors import RankLostError
from epruntime.moe.counters import LAYER_COUNTERS
from epruntime.moe.stats import MoEStats


def test_balancedness_is_mean_over_max() -> None:
    assert balancedness([4, 4, 4, 4]) == 1.0
    assert balancedness([8, 0, 0, 0]) == 0.25  # all on one of four
    assert balancedness([6, 2]) == pytest.approx(4 / 6)
    assert balancedness([0, 0]) is None
    assert balancedness([]) is None


@dataclass
class _Counters:
    preemptions: int = 0
    prefix_hit_tokens: int = 0


@dataclass
class _Scheduler:
    counters: _Counters = field(default_factory=_Counters)
    num_running: int = 0
    num_waiting: int = 0
    kv_usage: float = 0.0


def _view(core: CoreStats, schedulers: list[_Scheduler], generation: int = 0, ranks: Any = None) -> EngineView:
    def rank(slot: int) -> Any:
        info = SimpleNamespace(slot=slot, host=f"host{slot}", ep_rank=slot, incarnation=generation)
        return SimpleNamespace(info=info, lost=None, progress=SimpleNamespace(age_s=0.5, silent_s=0.1))

    group = SimpleNamespace(
        ranks=ranks or [rank(i) for i in range(len(schedulers))],
        num_kv_blocks=[10] * len(schedulers),
        generation=generation,
        transport="gloo",
        experts_backend="reference",
    )
    return EngineView(
        config=EngineConfig(model=ModelConfig(model="m")),
        core=SimpleNamespace(stats=core, schedulers=schedulers),  # type: ignore[arg-type]
        group=group,  # type: ignore[arg-type]
        restarts=generation,
        answering=True,
    )


def _reply(pairs: dict[int, int], experts: dict[int, list[int]], *, rounds: int = 0, rss: int = 100) -> dict[str, Any]:
    """What a rank would answer: per layer, pairs that it computed and its own tokens' choices."""
    stats = MoEStats()
    for layer, tokens in experts.items():
        mine = stats.layer(layer, len(tokens))
        for expert, count in enumerate(tokens):
            mine.count_experts(torch.full((count, 1), expert))
        mine.steps = 7
        mine.pairs_received = pairs[layer]
        mine.rounds = rounds
    # over the control channel and back
    return msgpack.unpackb(msgpack.packb({"rss": rss, "moe": stats.packed()}), strict_map_key=False)


def _snapshot(book: StatsBook, core: CoreStats, schedulers: list[_Scheduler], generation: int = 0) -> EngineStats:
    return book.snapshot(_view(core, schedulers, generation))


def test_layers_and_ranks_add_up() -> None:
    book = StatsBook()
    empty = _snapshot(book, CoreStats(), [_Scheduler(), _Scheduler()])
    assert empty.layers == ()
    assert empty.counters_age_s is None
    assert [rank.moe for rank in empty.ranks] == [{}, {}]
    # layer 2 has 3 experts and layer 5 has 2
    book.take(
        0,
        {
            0: _reply({2: 6, 5: 4}, {2: [1, 2, 3], 5: [4, 0]}, rounds=3, rss=11),
            1: _reply({2: 3, 5: 6}, {2: [0, 0, 3], 5: [0, 6]}, rounds=5, rss=22),
        },
    )
    stats = _snapshot(
        book, CoreStats(steps=7, prefill_tokens=5, decode_tokens=2), [_Scheduler(num_running=3), _Scheduler()]
    )
    assert [(x.layer, x.expert_tokens, x.rank_tokens) for x in stats.layers] == [
        (2, (1, 2, 6), (6, 3)),
        (5, (4, 6), (4, 6)),
    ]
    assert [x.balancedness for x in stats.layers] == [pytest.approx(4.5 / 6), pytest.approx(5 / 6)]
    assert [rank.moe["rounds"] for rank in stats.ranks] == [6, 10]  # of both layers
    assert [rank.moe["steps"] for rank in stats.ranks] == [7, 7]  # of one
    assert [rank.rss_bytes for rank in stats.ranks] == [11, 22]
    assert (stats.steps, stats.prefill_tokens, stats.decode_tokens) == (7, 5, 2)
    assert stats.ranks[0].num_running == 3


def test_balancedness_is_of_the_latest_tokens_and_stays_while_there_are_none() -> None:
    book = StatsBook()
    book.take(0, {0: _reply({1: 10}, {1: [10, 0]}), 1: _reply({1: 0}, {1: [0, 0]})})
    schedulers = [_Scheduler(), _Scheduler()]
    assert _snapshot(book, CoreStats(), schedulers).layers[0].balancedness == 0.5
    book.take(0, {0: _reply({1: 12}, {1: [12, 0]}), 1: _reply({1: 2}, {1: [0, 2]})})
    assert _snapshot(book, CoreStats(), schedulers).layers[0].balancedness == 1.0
    book.take(0, {0: _reply({1: 12}, {1: [12, 0]}), 1: _reply({1: 2}, {1: [0, 2]})})
    assert _snapshot(book, CoreStats(), schedulers).layers[0].balancedness == 1.0


def test_counters_never_fall_over_a_restart() -> None:
    """Ranks, schedulers and core start from zero; the sums go on."""
    book = StatsBook()
    core, schedulers = CoreStats(), [_Scheduler(), _Scheduler()]
    seen: list[EngineStats] = []
    for generation in range(3):
        for step in range(1, 4):
            core.steps = step
            schedulers[1].counters.preemptions = step
            replies = {slot: _reply({4: 5 * step}, {4: [step, step]}, rounds=step) for slot in (0, 1)}
            book.take(generation, replies)
            seen.append(_snapshot(book, core, schedulers, generation))
        # counted after the last look, and not lost
        core.steps += 10
        schedulers[1].counters.preemptions += 10
        core, schedulers = CoreStats(), [_Scheduler(), _Scheduler()]
    last = seen[-1]
    assert last.steps == 2 * 13 + 3
    assert last.total("preemptions") == 2 * 13 + 3
    assert last.layers[0].rank_tokens == (3 * 15, 3 * 15)
    assert last.layers[0].expert_tokens == (3 * 6, 3 * 6)
    assert last.ranks[0].moe["rounds"] == 9
    for a, b in itertools.pairwise(seen):
        assert b.steps > a.steps
        assert b.total("preemptions") > a.total("preemptions")
        assert all(x > y for x, y in zip(b.layers[0].rank_tokens, a.layers[0].rank_tokens, strict=True))


def test_packed_counters_are_those_of_the_snapshot() -> None:
    stats = MoEStats()
    for layer in (9, 2):
        mine = stats.layer(layer, 4, (0, 1))
        mine.count_experts(torch.tensor([[layer % 4, 3], [-1, 1]]))
        mine.rows_sent, mine.dispatch_s = 10 * layer, 0.5 * layer
    packed, whole = stats.packed(), stats.snapshot()["layers"]
    assert packed["layers"] == [2, 9]
    counters = np.frombuffer(packed["counters"]).reshape(2, len(LAYER_COUNTERS))
    experts = np.frombuffer(packed["expert_tokens"], np.int64).reshape(2, 4)
    for i, layer in enumerate(("2", "9")):
        assert counters[i].tolist() == [whole[layer][name] for name in LAYER_COUNTERS]
        assert experts[i].tolist() == whole[layer]["expert_tokens"]
        assert whole[layer]["local_experts"] == [0, 1]


class _FakeRank:
    def __init__(self, slot: int, log: list[str]) -> None:
        self.info = SimpleNamespace(slot=slot)
        self.replies: list[asyncio.Future[dict[str, Any]]] = []
        self._log = log

    def call(self, type: str, timeout_s: float | None = None) -> asyncio.Future[dict[str, Any]]:
        assert timeout_s is not None
        self._log.append(f"{type} {self.info.slot}")
        self.replies.append(asyncio.get_running_loop().create_future())
        return self.replies[-1]


def test_a_poll_asks_all_ranks_in_one_turn_and_only_after_steps() -> None:
    async def run() -> None:
        log: list[str] = []
        ranks, book, core = [_FakeRank(0, log), _FakeRank(1, log)], StatsBook(), CoreStats(steps=1)
        poller = StatsPoller(book, lambda: _view(core, [], ranks=ranks))
        poll = asyncio.create_task(poller.poll())
        await asyncio.sleep(0)
        assert log == ["counters 0", "counters 1"]  # nothing, thus no plan, can have come in between
        for rank in ranks:
            rank.replies[-1].set_result(_reply({1: 3}, {1: [3]}))
        assert await poll
        assert _snapshot(book, CoreStats(), [_Scheduler(), _Scheduler()]).layers[0].rank_tokens == (3, 3)
        # no step since: nobody is asked, and what is known is known to be fresh
        await asyncio.sleep(0.02)
        asked = time.monotonic()
        assert await poller.poll()
        assert len(log) == 2
        age = _snapshot(book, CoreStats(), [_Scheduler(), _Scheduler()]).counters_age_s
        assert age is not None
        assert age <= time.monotonic() - asked
        # one rank is gone: what was known stays, and grows old
        core.steps = 2
        poll = asyncio.create_task(poller.poll())
        await asyncio.sleep(0)
        ranks[1].replies[-1].set_exception(RankLostError(slot=1, host="h", detail="killed"))
        assert not await poll
        assert ranks[0].replies[-1].cancelled()
        assert _snapshot(book, CoreStats(), [_Scheduler(), _Scheduler()]).layers[0].rank_tokens == (3, 3)

    asyncio.run(run())


def test_polling_goes_on_after_a_failure_and_ends_when_it_is_stopped() -> None:
    async def run() -> None:
        asked = 0

        def view() -> EngineView:
            nonlocal asked
            asked += 1
            if asked == 1:
                raise RuntimeError("a fault")
            return replace(_view(CoreStats(), []), answering=False)

        poller = StatsPoller(StatsBook(), view)
        poller.start(0.01)
        async with asyncio.timeout(60):
            while asked < 3:
                await asyncio.sleep(0.01)
        poller.stop()
        poller.stop()
        await asyncio.sleep(0)
        before = asked
        await asyncio.sleep(0.05)
        assert asked == before

    asyncio.run(run())
