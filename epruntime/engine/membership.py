"""Membership: ranks of a pool that have met in a new generation, and have a transport but no model yet."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from epruntime.config import EngineConfig
from epruntime.engine.gather import GRACE_S, gather
from epruntime.engine.preflight import Preflight
from epruntime.errors import ConfigError
from epruntime.launchers.handle import RankHandle
from epruntime.launchers.pool import RankPool
from epruntime.words import counted

logger = logging.getLogger("epruntime.engine.membership")


@dataclass(frozen=True, kw_only=True)
class Membership:
    """A generation.

    Attributes:
        ranks: by ep_rank; hosts: theirs. transport: name of the one that was chosen.
    """

    ranks: list[RankHandle]
    hosts: list[str]
    generation: int
    transport: str


async def form(config: EngineConfig, pool: RankPool, preflight: Preflight | None = None) -> Membership:
    """Configures a generation on the first `expert_parallel_size` ranks of a pool, with preflight before and after it.

    Raises:
        ConfigError: the pool is too small, or a setting cannot work. PreflightError: see Preflight.
        RankLostError: a rank was lost, or did not answer in time and was killed.
    """
    parallel = config.parallel
    size = parallel.expert_parallel_size
    if size > len(pool.ranks):
        raise ConfigError(f"expert_parallel_size={size}, but the pool has {counted(len(pool.ranks), 'rank')}")
    ranks = list(pool.ranks[:size])
    if preflight is not None:
        await preflight.before_meeting(ranks, pool.store_address)
    generation = pool.next_generation()
    host, port = pool.store_address
    hosts = [rank.info.host for rank in ranks]
    configured = await gather(
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
        limit_s=parallel.step_timeout_s + GRACE_S,
        option="step_timeout_s",
    )
    transport: str = configured[0]["transport"]
    chosen = "best supported" if parallel.transport == "auto" else "as configured"
    logger.info("transport %s for %s (%s)", transport, counted(size, "rank"), chosen)
    _log_addresses(ranks, configured)
    if preflight is not None:
        await preflight.after_meeting(ranks, transport)
    return Membership(ranks=ranks, hosts=hosts, generation=generation, transport=transport)


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
