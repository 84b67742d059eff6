"""Recovery: brings the ranks of an engine back after one was lost.

survivors leave their generation (or are replaced) and lost slots are filled again -> new generation -> model loaded
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque

from epruntime.config import EngineConfig
from epruntime.engine.model_group import ModelGroup
from epruntime.errors import EngineDeadError, EPRuntimeError, LaunchError, RankLostError
from epruntime.launchers.handle import RankHandle
from epruntime.launchers.pool import RankPool
from epruntime.launchers.rank_end import without_words

logger = logging.getLogger("epruntime.engine.recovery")

#: seconds that a surviving rank gets to leave the step that it is in, beyond which it is replaced as well.
_LEAVE_S = 15.0
#: seconds over which restarts are counted.
_WINDOW_S = 3600.0


class Recovery:
    """Restarts of one engine on one pool."""

    def __init__(self, config: EngineConfig, pool: RankPool) -> None:
        self._config, self._pool = config, pool
        self._times: deque[float] = deque()
        self.num_restarts = 0

    async def restore(self, error: EngineDeadError) -> ModelGroup:
        """A new generation with the model loaded, on the same slots. Tries again when a rank is lost meanwhile.

        Raises:
            EngineDeadError: max_restarts are used up, or what failed would fail again; `error` says what ended the
            engine, and is the error to name.
        """
        while True:
            self._count(error)
            logger.warning("restart %d: ranks are replaced, and the model is loaded again", self.num_restarts)
            began = time.monotonic()
            try:
                await self._gather_ranks()
                group = await ModelGroup.load(self._config, self._pool)
            except (EngineDeadError, LaunchError) as failure:
                error = _as_dead(failure, "the restart failed")
            except EPRuntimeError as failure:
                raise _as_dead(failure, "the engine cannot be restarted") from failure
            else:
                logger.warning(
                    "restarted in %.1f s: generation %d on ranks %s",
                    time.monotonic() - began,
                    group.generation,
                    ", ".join(f"{r.info.slot} (incarnation {r.info.incarnation})" for r in group.ranks),
                )
                return group

    def _count(self, error: EngineDeadError) -> None:
        now, limit = time.monotonic(), self._config.parallel.max_restarts
        while self._times and now - self._times[0] > _WINDOW_S:
            self._times.popleft()
        if len(self._times) >= limit:
            words = f"not replaced after {limit} restarts within an hour (max_restarts)"
            if isinstance(error, RankLostError):
                raise RankLostError(slot=error.slot, host=error.host, detail=f"{error.detail}; {words}") from error
            raise EngineDeadError(f"{error}; {words}") from error
        self._times.append(now)
        self.num_restarts += 1

    async def _gather_ranks(self) -> None:
        """Every slot has a rank that is in no generation.

        Raises:
            LaunchError, HandshakeError, EngineDeadError: a slot could not be filled.
        """
        size = self._config.parallel.expert_parallel_size
        results = await asyncio.gather(*(self._free(rank) for rank in self._pool.ranks[:size]), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result

    async def _free(self, rank: RankHandle) -> None:
        parallel = self._config.parallel
        if rank.lost is None and not rank.condemned.done():
            try:
                # Answered between steps; a rank that waits for a lost one is freed by its transport's error.
                await rank.call("unload", timeout_s=min(_LEAVE_S, parallel.step_timeout_s))
                return
            except EPRuntimeError as error:
                logger.warning("rank %d does not leave its generation and is replaced: %s", rank.info.slot, error)
        await self._pool.replace(rank.info.slot, timeout_s=parallel.start_timeout_s)


def _as_dead(error: EPRuntimeError, what: str) -> EngineDeadError:
    """An error for every request that waits. What the failed rank has printed stays in the log."""
    if isinstance(error, EngineDeadError):
        return error
    logger.error("%s: %s: %s", what, type(error).__name__, error)
    return EngineDeadError(f"{what}: {type(error).__name__}: {without_words(str(error))}")
