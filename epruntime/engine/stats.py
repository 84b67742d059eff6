"""EngineStats: what an engine has done and how it stands, without asking a rank.

schedulers and core (here, always fresh) + counters of the ranks (asked for now and then) -> StatsBook -> EngineStats

Counters only grow, also where what counted them is replaced by something that starts from zero: a rank that was
restarted, and the schedulers made anew for it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np

from epruntime.moe.counters import LAYER_COUNTERS

if TYPE_CHECKING:
    from epruntime.config import EngineConfig
    from epruntime.engine.core import EngineCore
    from epruntime.engine.model_group import ModelGroup
    from epruntime.engine.scheduler import GroupScheduler
    from epruntime.launchers.handle import RankHandle


@dataclass(frozen=True, kw_only=True)
class EngineView:
    """The parts of an engine that statistics are made of. A restart puts others in their place.

    Attributes:
        answering: ranks answer when asked: none is lost, and none loads a model.
    """

    config: EngineConfig
    core: EngineCore
    group: ModelGroup
    restarts: int
    answering: bool


@dataclass(frozen=True, kw_only=True)
class RankStats:
    """One rank and its scheduler.

    Attributes:
        up: False once the rank is lost.
        progress_age_s: seconds since its progress last changed; it grows while the rank has nothing to do.
        heartbeat_age_s: seconds since its progress thread was last heard of, busy or not.
        kv_usage: share of KV blocks in use, 0 to 1.
        scheduler: fields of SchedulerCounters -> totals.
        moe: LAYER_COUNTERS -> totals over this rank's layers ("steps": of one layer); empty before the first answer.
        rss_bytes: resident memory at the last answer.
    """

    slot: int
    host: str
    ep_rank: int
    incarnation: int
    up: bool
    progress_age_s: float
    heartbeat_age_s: float
    num_running: int
    num_waiting: int
    kv_usage: float
    num_kv_blocks: int
    scheduler: Mapping[str, int]
    moe: Mapping[str, float]
    rss_bytes: int


@dataclass(frozen=True, kw_only=True)
class LayerLoad:
    """Expert load of one MoE layer. A token counts once for each of its top-k experts.

    Attributes:
        expert_tokens: by logical expert: tokens that chose it.
        rank_tokens: by slot of the rank: tokens that its experts computed.
        balancedness: mean over max of `rank_tokens` between the last two answers in between which a token was routed;
            1 is perfect, 1 / ranks the worst. None before.
    """

    layer: int
    expert_tokens: tuple[int, ...]
    rank_tokens: tuple[int, ...]
    balancedness: float | None


@dataclass(frozen=True, kw_only=True)
class EngineStats:
    """A moment of an engine.

    Attributes:
        time: monotonic clock. counters_age_s: seconds since the ranks' own counters were last known to be as they are
            here; None before the first time.
        restarts: how often ranks were replaced.
        steps, prefill_tokens, decode_tokens: totals over all ranks.
        ranks: by slot. layers: MoE layers in order; empty before the ranks' first answer.
        cache_facts, parallel_facts: settings of the KV cache, and how the ranks are connected; they do not change.
    """

    time: float
    counters_age_s: float | None
    generation: int
    restarts: int
    steps: int
    prefill_tokens: int
    decode_tokens: int
    ranks: tuple[RankStats, ...]
    layers: tuple[LayerLoad, ...]
    cache_facts: Mapping[str, Any]
    parallel_facts: Mapping[str, Any]

    def total(self, counter: str) -> int:
        """A field of SchedulerCounters, over all ranks."""
        return sum(rank.scheduler[counter] for rank in self.ranks)


def balancedness(rank_tokens: Sequence[float]) -> float | None:
    """Mean over max; None where there is nothing to balance."""
    most = max(rank_tokens, default=0)
    return sum(rank_tokens) / len(rank_tokens) / most if most > 0 else None


class StatsBook:
    """Adds up counters whose sources come and go, and makes EngineStats of them."""

    def __init__(self) -> None:
        self._core = _Followed()
        self._schedulers: dict[int, _Followed] = {}
        self._counters: dict[int, _Sum] = {}  # slot -> float64 [layers, LAYER_COUNTERS]
        self._experts: dict[int, _Sum] = {}  # slot -> int64 [experts of all layers]: tokens by logical expert
        self._layers: list[int] = []
        self._num_experts: list[int] = []
        self._rss: dict[int, int] = {}
        self._balancedness: list[float | None] = []
        self._taken: float | None = None

    def take(self, generation: int, replies: Mapping[int, Mapping[str, Any]]) -> None:
        """Books the `counters` replies of all ranks, asked for at one moment.

        Args:
            generation: counters of a newer one have started from zero.
            replies: by slot of the rank.
        """
        before = self._rank_tokens()
        for slot, reply in replies.items():
            self._rss[slot] = reply["rss"]
            if (moe := reply.get("moe")) is None:
                continue
            self._layers, self._num_experts = moe["layers"], moe["num_experts"]
            counters = np.frombuffer(moe["counters"], np.float64).reshape(len(self._layers), len(LAYER_COUNTERS))
            self._counters.setdefault(slot, _Sum()).take(generation, counters)
            tokens = np.frombuffer(moe["expert_tokens"], np.int64)
            self._experts.setdefault(slot, _Sum()).take(generation, tokens)
        after = self._rank_tokens()
        new = after - before if before.shape == after.shape else after
        self._balancedness = self._balancedness or [None] * len(self._layers)
        for i, tokens_by_rank in enumerate(new.T.tolist()):
            self._balancedness[i] = balancedness(tokens_by_rank) or self._balancedness[i]
        self.confirm()

    def confirm(self) -> None:
        """The ranks' counters are known to be what they were when they were last taken."""
        self._taken = time.monotonic()

    def snapshot(self, view: EngineView) -> EngineStats:
        """The engine now."""
        now, group, core = time.monotonic(), view.group, view.core
        totals = self._core.totals(core.stats)
        cache, parallel = view.config.cache, view.config.parallel
        return EngineStats(
            time=now,
            counters_age_s=None if self._taken is None else now - self._taken,
            generation=group.generation,
            restarts=view.restarts,
            steps=totals["steps"],
            prefill_tokens=totals["prefill_tokens"],
            decode_tokens=totals["decode_tokens"],
            ranks=tuple(
                self._rank(rank, scheduler, blocks)
                for rank, scheduler, blocks in zip(group.ranks, core.schedulers, group.num_kv_blocks, strict=True)
            ),
            layers=self._layer_loads(),
            cache_facts={"block_size": cache.block_size, "enable_prefix_caching": cache.enable_prefix_caching},
            parallel_facts={
                "expert_parallel_size": parallel.expert_parallel_size,
                "launcher": parallel.launcher,
                "transport": group.transport,
                "experts_backend": group.experts_backend,
                "invariance": parallel.invariance,
                "expert_placement": parallel.expert_placement,
                "num_redundant_experts": parallel.num_redundant_experts,
            },
        )

    def _rank(self, rank: RankHandle, scheduler: GroupScheduler, num_kv_blocks: int) -> RankStats:
        info, progress = rank.info, rank.progress
        moe: dict[str, float] = {}
        if info.slot in self._counters:
            by_layer = self._counters[info.slot].total
            moe = dict(zip(LAYER_COUNTERS, by_layer.sum(axis=0).tolist(), strict=True))
            moe["steps"] /= max(len(by_layer), 1)
        return RankStats(
            slot=info.slot,
            host=info.host,
            ep_rank=info.ep_rank,
            incarnation=info.incarnation,
            up=rank.lost is None,
            progress_age_s=progress.age_s,
            heartbeat_age_s=progress.silent_s,
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            kv_usage=scheduler.kv_usage,
            num_kv_blocks=num_kv_blocks,
            scheduler=self._schedulers.setdefault(info.slot, _Followed()).totals(scheduler.counters),
            moe=moe,
            rss_bytes=self._rss.get(info.slot, 0),
        )

    def _layer_loads(self) -> tuple[LayerLoad, ...]:
        if not self._layers:
            return ()
        experts = sum(entry.total for entry in self._experts.values())
        by_layer = np.split(experts, np.cumsum(self._num_experts)[:-1])
        return tuple(
            LayerLoad(
                layer=layer, expert_tokens=tuple(tokens.tolist()), rank_tokens=tuple(by_rank), balancedness=balance
            )
            for layer, tokens, by_rank, balance in zip(
                self._layers,
                by_layer,
                self._rank_tokens().astype(np.int64).T.tolist(),
                self._balancedness,
                strict=True,
            )
        )

    def _rank_tokens(self) -> np.ndarray:
        """float64 [ranks, layers]: tokens that the rank's experts computed, ranks by slot."""
        column = LAYER_COUNTERS.index("pairs_received")
        return np.array([entry.total[:, column] for _, entry in sorted(self._counters.items())])


class _Sum:
    """Counters of a source that is replaced, now and then, by one that starts from zero."""

    def __init__(self) -> None:
        self._source: int | None = None
        self._before: Any = 0
        self._last: Any = 0

    def take(self, source: int, values: np.ndarray) -> None:
        if source != self._source:
            self._before = self.total
            self._source = source
        self._last = values

    @property
    def total(self) -> Any:
        return self._before + self._last


class _Followed:
    """A dataclass of counters in this process, of which a new one may take the place.

    The old one is kept until then, so that nothing it still counted is lost.
    """

    def __init__(self) -> None:
        self._object: Any = None
        self._before: dict[str, int] = {}

    def totals(self, counters: Any) -> dict[str, int]:
        if counters is not self._object:
            if self._object is not None:
                self._before = self._sum(self._object)
            self._object = counters
        return self._sum(counters)

    def _sum(self, counters: Any) -> dict[str, int]:
        return {f.name: self._before.get(f.name, 0) + getattr(counters, f.name) for f in fields(counters)}
