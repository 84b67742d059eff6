"""ModelGroup: the ranks of one generation with one model loaded on them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

from epruntime.config import EngineConfig
from epruntime.engine import blame
from epruntime.errors import ConfigError, EngineDeadError, EPRuntimeError, RankLostError
from epruntime.launchers.pool import RankHandle, RankPool

logger = logging.getLogger("epruntime.engine.model_group")

#: How much later than a rank the coordinator gives up, so that the rank's own error, which says whom it waited for,
#: comes first.
_GRACE_S = 3.0
_UNLOAD_TIMEOUT_S = 60.0


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

    @classmethod
    async def load(
        cls, config: EngineConfig, pool: RankPool, *, progress: Callable[[str, int, int], None] | None = None
    ) -> ModelGroup:
        """Raises whatever a rank raised: the first error in rank order, a lost rank before all others.

        A rank that does not answer in time is killed, and named as lost.
        """
        parallel, cache, scheduler = config.parallel, config.cache, config.scheduler
        size = parallel.expert_parallel_size
        if size > len(pool.ranks):
            raise ConfigError(f"expert_parallel_size={size}, but the pool has {len(pool.ranks)} ranks")
        ranks = list(pool.ranks[:size])
        generation = pool.next_generation()
        host, port = pool.store_address
        hosts = [rank.info.host for rank in ranks]
        configured = await _gather(
            ranks,
            [
                rank.call(
                    "configure",
                    generation=generation,
                    ep_rank=index,
                    world_size=size,
                    store_host=host,
                    store_port=port,
                    hosts=hosts,
                    transport=parallel.transport,
                    experts_backend=parallel.experts_backend,
                    invariance=parallel.invariance,
                    exchange_budget_tokens=parallel.exchange_budget_tokens,
                    step_timeout_s=parallel.step_timeout_s,
                    threads=parallel.threads_per_rank,
                    slots=[rank.info.slot for rank in ranks],
                )
                for index, rank in enumerate(ranks)
            ],
            what="'configure'",
            limit_s=parallel.step_timeout_s + _GRACE_S,
            option="step_timeout_s",
        )
        _log_addresses(ranks, configured)
        memory = cache.kv_cache_memory_gb
        try:
            loaded = await _gather(
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
                    )
                    for index, rank in enumerate(ranks)
                ],
                what="'load'",
                limit_s=parallel.load_timeout_s,
                option="load_timeout_s",
            )
        except EPRuntimeError as error:
            if not isinstance(error, EngineDeadError):  # all ranks live and have answered: some may have loaded
                await _unload(ranks)
            raise
        return cls(
            pool,
            ranks,
            generation=generation,
            step_timeout_s=parallel.step_timeout_s,
            transport=configured[0]["transport"],
            loaded=loaded,
        )

    async def stats(self) -> list[dict[str, Any]]:
        """One dict per rank: who it is, and its own statistics."""
        # Ranks answer between steps, so up to two plans come first.
        timeout_s = 2 * self._step_timeout_s + _GRACE_S
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


def _log_addresses(ranks: list[RankHandle], configured: list[dict[str, Any]]) -> None:
    """One line per rank: what to look at first when hosts do not reach each other."""
    for rank, reply in zip(ranks, configured, strict=True):
        if "address" in reply:  # the only rank has none
            logger.info(
                "rank %d on host %s, pid %d: %s exchange at address %s, interface %s",
                rank.info.slot,
                rank.info.host,
                rank.info.pid,
                reply["transport"],
                reply["address"],
                reply["interface"],
            )


async def _unload(ranks: list[RankHandle]) -> None:
    calls = [rank.call("unload") for rank in ranks]
    await _gather(ranks, calls, what="'unload'", limit_s=_UNLOAD_TIMEOUT_S, option="a fixed limit")


def _rank_progress(
    progress: Callable[[str, int, int], None] | None, index: int, size: int
) -> Callable[[dict[str, Any]], None] | None:
    if progress is None:
        return None
    return lambda message: progress(f"rank {index}/{size} {message['what']}", message["done"], message["total"])


async def _gather(
    ranks: list[RankHandle], calls: list[asyncio.Future[dict[str, Any]]], *, what: str, limit_s: float, option: str
) -> list[dict[str, Any]]:
    """Waits for all replies.

    Raises:
        RankLostError: at once, since the others may be waiting for the lost one; or for the one that did not answer
            within `limit_s` seconds, which is killed.
        the first other error, when all have answered, so that no rank is left in the middle of something.
    """
    deadline = time.monotonic() + limit_s
    pending = set(calls)
    while pending:
        left_s = max(0.0, deadline - time.monotonic())
        done, pending = await asyncio.wait(pending, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
        lost = any(isinstance(call.exception(), RankLostError) for call in done)
        if lost or (pending and not done):
            error = await blame.cause(ranks, calls, overdue=not lost, what=what, limit_s=limit_s, option=option)
            for other in pending:
                other.cancel()
            raise error
    return [call.result() for call in calls]
