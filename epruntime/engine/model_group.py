"""ModelGroup: the ranks of one generation with one model loaded on them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from epruntime.config import EngineConfig
from epruntime.engine.gather import GRACE_S, gather
from epruntime.engine.membership import form
from epruntime.engine.preflight import Preflight
from epruntime.errors import EngineDeadError, EPRuntimeError, ProtocolError, RankLostError
from epruntime.launchers.pool import RankHandle, RankPool
from epruntime.moe.placement import placement_for

logger = logging.getLogger("epruntime.engine.model_group")

_UNLOAD_TIMEOUT_S = 60.0
#: Index heads from which on scores of exactly zero are rare (docs/models.md).
_STEADY_INDEX_HEADS = 16


class ModelGroup:
    """Configures a generation on the first `expert_parallel_size` ranks of a pool and loads the model.

    Attributes:
        info: the model's ModelInfo as a dict; max_model_len: tokens, as the ranks agreed.
        num_kv_blocks: KV blocks of each rank.
        transport, experts_backend: what was chosen.
    """

    def __init__(
        self,
        pool: RankPool,
        ranks: list[RankHandle],
        *,
        generation: int,
        step_timeout_s: float,
        transport: str,
        loaded: list[dict[str, Any]],
    ) -> None:
        self._pool = pool
        self._step_timeout_s = step_timeout_s
        self.ranks = ranks
        self.generation = generation
        self.transport = transport
        self.info: dict[str, Any] = loaded[0]["info"]
        self.max_model_len: int = loaded[0]["max_model_len"]
        self.experts_backend: str = loaded[0]["experts_backend"]
        self.num_kv_blocks: list[int] = [reply["num_kv_blocks"] for reply in loaded]
        self.load_reports: list[dict[str, Any]] = [reply["load_report"] for reply in loaded]
        idle = sum(not report.get("local_experts", 1) for report in self.load_reports)
        if idle:
            logger.warning(
                "%d of %d ranks own no experts: the model has %s per layer, so a smaller expert_parallel_size does",
                idle,
                len(ranks),
                self.info["num_experts"],
            )
        if self.info["eos_warning"]:
            logger.warning("%s (docs/sampling.md, 'Defaults of the checkpoint')", self.info["eos_warning"])
        if 0 < self.info["index_heads"] < _STEADY_INDEX_HEADS:
            logger.warning(
                "index_n_heads=%d of this model's config.json is fewer than %d: scores of exactly zero are frequent, "
                "and which of those keys are attended to differs from transformers' choice, here the earliest "
                "(docs/models.md, 'Attention that selects keys')",
                self.info["index_heads"],
                _STEADY_INDEX_HEADS,
            )

    @classmethod
    async def load(
        cls,
        config: EngineConfig,
        pool: RankPool,
        *,
        progress: Callable[[str, int, int], None] | None = None,
        preflight: Preflight | None = None,
        trace_layers: bool = False,
        batch_dependent: bool = False,
    ) -> ModelGroup:
        """Raises whatever a rank raised: the first error in rank order, a lost rank before all others.

        A rank that does not answer in time is killed, and named as lost. With `preflight` ranks and network are looked
        at first: PreflightError says what is wrong with them, and no weight is read. `trace_layers` and
        `batch_dependent` are for `epruntime verify` (see epruntime.worker.letters.Load).
        """
        membership = await form(config, pool, preflight)
        ranks, hosts, parallel = membership.ranks, membership.hosts, config.parallel
        cache, scheduler, size = config.cache, config.scheduler, len(ranks)
        memory = cache.kv_cache_memory_gb
        try:
            loaded = await gather(
                ranks,
                [
                    rank.call(
                        "load",
                        on_progress=_rank_progress(progress, index, size),
                        model=str(config.model.model),
                        dtype=config.model.dtype,
                        max_model_len=config.model.max_model_len,
                        block_size=cache.block_size,
                        num_kv_blocks=cache.num_kv_blocks,
                        kv_cache_memory_bytes=None if memory is None else int(memory * 2**30),
                        ranks_on_host=hosts.count(hosts[index]),
                        max_num_seqs=scheduler.max_num_seqs,
                        max_num_batched_tokens=scheduler.max_num_batched_tokens,
                        expert_placement=parallel.expert_placement,
                        num_redundant_experts=parallel.num_redundant_experts,
                        trace_layers=trace_layers,
                        batch_dependent=batch_dependent,
                    )
                    for index, rank in enumerate(ranks)
                ],
                what="'load'",
                limit_s=parallel.load_timeout_s,
                option="load_timeout_s",
            )
            _check_placements(config, ranks, loaded)
        except EPRuntimeError as error:
            if not isinstance(error, EngineDeadError):  # all ranks live and have answered: some may have loaded
                await _unload(ranks)
            raise
        return cls(
            pool,
            ranks,
            generation=membership.generation,
            step_timeout_s=parallel.step_timeout_s,
            transport=membership.transport,
            loaded=loaded,
        )

    async def stats(self) -> list[dict[str, Any]]:
        """One dict per rank: who it is, and its own statistics."""
        # Ranks answer between steps, so up to two plans come first.
        timeout_s = 2 * self._step_timeout_s + GRACE_S
        replies = await asyncio.gather(*(rank.call("stats", timeout_s=timeout_s) for rank in self.ranks))
        out = []
        for rank, reply, blocks, report in zip(self.ranks, replies, self.num_kv_blocks, self.load_reports, strict=True):
            info = rank.info
            out.append(
                {
                    "slot": info.slot,
                    "incarnation": info.incarnation,
                    "host": info.host,
                    "local_rank": info.local_rank,
                    "pid": info.pid,
                    "signature": dict(info.signature),
                    "num_kv_blocks": blocks,
                    "load": report,
                    **{key: value for key, value in reply.items() if key not in ("type", "id")},
                }
            )
        return out

    async def take_traces(self) -> list[dict[str, Any]]:
        """Hashes of hidden states since the last call, one dict per rank (see epruntime.worker.layer_trace)."""
        calls = [rank.call("trace") for rank in self.ranks]
        return await gather(self.ranks, calls, what="'trace'", limit_s=_UNLOAD_TIMEOUT_S, option="a fixed limit")

    async def unload(self) -> None:
        """Frees the model on all ranks; they stay up for the next one."""
        await _unload(self.ranks)

    def on_lost(self, callback: Callable[[EngineDeadError], None]) -> Callable[[], None]:
        """Calls back when a rank of this group is lost, also while no step runs; returns what takes it back."""
        slots = {rank.info.slot for rank in self.ranks}

        def mine(error: RankLostError) -> None:
            if error.slot in slots:
                callback(error)

        return self._pool.on_lost(mine)


def _check_placements(config: EngineConfig, ranks: list[RankHandle], loaded: list[dict[str, Any]]) -> None:
    """All ranks have placed the experts of every layer as this process would.

    Raises:
        ProtocolError: one has not: its rows would meet other experts.
    """
    parallel, size = config.parallel, len(ranks)
    for rank, reply in zip(ranks, loaded, strict=True):
        wanted = {
            str(experts): placement_for(
                experts, size, parallel.expert_placement, parallel.num_redundant_experts
            ).fingerprint
            for experts, _ in reply["info"]["expert_bytes"]
        }
        if reply["placements"] != wanted:
            raise ProtocolError(
                f"rank {rank.info.slot} on host {rank.info.host} placed experts as {reply['placements']} says, "
                f"expert_placement={parallel.expert_placement!r} and "
                f"num_redundant_experts={parallel.num_redundant_experts} mean {wanted}: coordinator and rank differ in "
                "version; install the same epruntime on all hosts"
            )
    for experts in sorted({experts for experts, _ in loaded[0]["info"]["expert_bytes"]}):
        useful = experts * (size - 1)
        if parallel.num_redundant_experts > useful:
            logger.warning(
                "num_redundant_experts=%d: with %d, each of %d ranks has all %d experts of a layer; more take memory "
                "and spread no load",
                parallel.num_redundant_experts,
                useful,
                size,
                experts,
            )


async def _unload(ranks: list[RankHandle]) -> None:
    calls = [rank.call("unload") for rank in ranks]
    await gather(ranks, calls, what="'unload'", limit_s=_UNLOAD_TIMEOUT_S, option="a fixed limit")


def _rank_progress(
    progress: Callable[[str, int, int], None] | None, index: int, size: int
) -> Callable[[dict[str, Any]], None] | None:
    if progress is None:
        return None
    return lambda message: progress(f"rank {index}/{size} {message['what']}", message["done"], message["total"])
