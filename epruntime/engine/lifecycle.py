"""Lifecycle: which ranks and which core an engine has now, and what becomes of it when they end.

open core (READY <-> STALLED) -> core dies -> requests end -> RESTARTING: Recovery -> open core ... or DEAD
"""

from __future__ import annotations

import asyncio
import copy
import logging
from collections.abc import Callable

from epruntime.config import EngineConfig
from epruntime.engine.core import EngineCore
from epruntime.engine.health import HealthWatch
from epruntime.engine.model_group import ModelGroup
from epruntime.engine.recovery import Recovery
from epruntime.engine.status import EngineState, StatusHolder
from epruntime.errors import EngineDeadError, UnavailableError
from epruntime.launchers.pool import RankPool

logger = logging.getLogger("epruntime.engine.lifecycle")

#: what requests are told that end with a lost rank which is being replaced: a small model loads in about this time.
RESTART_RETRY_S = 5.0


class Lifecycle:
    """The generations of one engine, one after another.

    Args:
        pool: where the ranks come from.
        open_core: makes the schedulers and the core of a generation; the core's `on_dead` is `core_died`.
        on_down: called with the error that every live request ends with, when a core has died.

    Attributes:
        group, core: of the present generation; while none is up, of the last one.
        dead_error: why the engine is dead for good; None while it is not.
        num_restarts: times that ranks were replaced.
    """

    def __init__(
        self,
        config: EngineConfig,
        pool: RankPool,
        group: ModelGroup,
        *,
        open_core: Callable[[ModelGroup], EngineCore],
        on_down: Callable[[EngineDeadError], None],
    ) -> None:
        self._config, self._open_core, self._on_down = config, open_core, on_down
        self._recovery = Recovery(config, pool)
        self._restarting: asyncio.Task[None] | None = None
        self._closed = False
        self.status = StatusHolder()
        self.dead_error: EngineDeadError | None = None
        self._open(group)

    @property
    def num_restarts(self) -> int:
        return self._recovery.num_restarts

    @property
    def up(self) -> bool:
        """There is a generation, and its core runs."""
        return self.core.dead_error is None

    def check(self) -> None:
        """Raises EngineDeadError, or UnavailableError while ranks are being replaced, where no request can be taken."""
        if self.dead_error is not None:
            raise self.dead_error.with_traceback(None)  # else each raise would add its frames to the last one's
        if not self.up:
            raise UnavailableError(
                f"ranks are being replaced: {self.core.dead_error}; try again later", retry_after_s=RESTART_RETRY_S
            )

    def core_died(self, error: EngineDeadError) -> None:
        """Ends or restarts the engine."""
        self._close_generation()
        if self._closed or not self._config.parallel.restart:
            self._die(error)
            return
        self.status.become(EngineState.RESTARTING, str(error))
        hopeful = copy.copy(error)
        hopeful.retry_after_s = RESTART_RETRY_S
        self._on_down(hopeful)
        self._restarting = asyncio.get_running_loop().create_task(self._restart(error), name="epruntime-restart")

    async def close(self) -> None:
        """Ends the core, or the restart that is under way; the ranks are left as they are. Safe to call again."""
        self._closed = True
        self._close_generation()
        if self._restarting is not None:
            self._restarting.cancel()
            await asyncio.gather(self._restarting, return_exceptions=True)
        await self.core.stop()

    def _open(self, group: ModelGroup) -> None:
        self.group, self.core = group, self._open_core(group)
        # the pool may outlive this engine by many others
        self._forget_lost = group.on_lost(self.core.fail)
        self._health = HealthWatch(
            group.ranks, lambda: self.core.stepping, self.status, step_timeout_s=self._config.parallel.step_timeout_s
        )

    def _close_generation(self) -> None:
        self._forget_lost()
        self._health.close()

    async def _restart(self, error: EngineDeadError) -> None:
        try:
            group = await self._recovery.restore(error)
        except EngineDeadError as final:
            self._die(final)
        except Exception as fault:
            # a fault of this program: whoever waits for the engine must learn of it, whatever it is
            logger.exception("the restart failed")
            self._die(EngineDeadError(f"internal error in the restart: {type(fault).__name__}: {fault}"))
        else:
            self._open(group)
            self.status.become(EngineState.READY)

    def _die(self, error: EngineDeadError) -> None:
        if self.dead_error is None:
            logger.error("the engine is dead: %s", error)
            self.dead_error = error
            self._on_down(error)
            self.status.become(EngineState.DEAD, str(error))
