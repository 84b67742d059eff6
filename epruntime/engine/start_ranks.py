"""Starting the ranks that a configuration asks for."""

from __future__ import annotations

from epruntime.config import EngineConfig
from epruntime.config.engine import ParallelConfig
from epruntime.engine.membership import form
from epruntime.engine.preflight import Preflight
from epruntime.errors import PreflightError
from epruntime.launchers.caller_group import with_callers_group
from epruntime.launchers.pool import RankPool
from epruntime.models.info import ModelInfo
from epruntime.preflight.verdict import Verdict


def heartbeat_timeout_s(parallel: ParallelConfig) -> float:
    """A rank that is silent is lost before a step that waits for it is overdue."""
    return min(parallel.heartbeat_timeout_s, 0.8 * parallel.step_timeout_s)


async def start_ranks(config: EngineConfig) -> RankPool:
    """A pool of `expert_parallel_size` ranks.

    Raises:
        LaunchError, HandshakeError, ConfigError: see RankPool.start.
    """
    parallel = with_callers_group(config.parallel)
    return await RankPool.start(
        parallel.expert_parallel_size,
        launcher=parallel.launcher,
        ray_address=parallel.ray_address,
        placement_group=parallel.placement_group,
        threads_per_rank=parallel.threads_per_rank,
        start_timeout_s=parallel.start_timeout_s,
        heartbeat_timeout_s=heartbeat_timeout_s(parallel),
    )


async def preflight_alone(config: EngineConfig, info: ModelInfo) -> Verdict:
    """Starts the ranks, looks at them, their hosts and their network, and stops them; no model is loaded.

    Raises:
        LaunchError, HandshakeError, ConfigError: the ranks did not come so far.
        RankLostError: a rank died, or did not answer in time.
    """
    pool = await start_ranks(config)
    preflight = Preflight(config, info, log=False)
    try:
        await form(config, pool, preflight)
        return preflight.verdict
    except PreflightError:
        return preflight.verdict
    finally:
        await pool.stop()
