"""StatsPoller: asks the ranks for their counters now and then, so that who reads statistics never waits for a rank.

every interval: `counters` to all ranks in one turn of the loop -> StatsBook.take

Plans, too, go to all ranks in one turn: so all ranks answer between the same two steps, and their counters fit
together. A rank that is in the middle of a step answers after it; nobody waits for that here.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from epruntime.engine.stats import StatsBook
from epruntime.errors import EPRuntimeError
from epruntime.launchers.handle import RankHandle

logger = logging.getLogger("epruntime.engine.stats_poller")


@dataclass(frozen=True, kw_only=True)
class PollTarget:
    """Whom to ask.

    Attributes:
        steps: made so far; the ranks' counters change with it alone. timeout_s: for an answer.
    """

    generation: int
    steps: int
    ranks: Sequence[RankHandle]
    timeout_s: float


class StatsPoller:
    """Keeps a StatsBook fresh.

    Args:
        target: whom to ask now; None while there is no use in asking (ranks are lost, or load a model).
    """

    def __init__(self, book: StatsBook, target: Callable[[], PollTarget | None]) -> None:
        self._book, self._target = book, target
        self._task: asyncio.Task[None] | None = None
        self._taken: tuple[int, int] | None = None  # generation and steps at the last poll

    def start(self, interval_s: float) -> None:
        """Polls now and then every `interval_s` seconds. Called again: at the new interval."""
        self.stop()
        self._task = asyncio.create_task(self._run(interval_s), name="epruntime-stats")

    def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            self._task = None

    async def poll(self) -> bool:
        """Asks once, unless no step has been made since; False if not all ranks answered."""
        target = self._target()
        if target is None:
            return False
        moment = (target.generation, target.steps)
        if moment == self._taken:
            self._book.confirm()
            return True
        calls = [rank.call("counters", timeout_s=target.timeout_s) for rank in target.ranks]
        try:
            replies = await asyncio.gather(*calls)
        except EPRuntimeError as error:  # the engine learns of a lost rank elsewhere
            logger.debug("no counters: %s", error)
            return False
        finally:
            for call in calls:
                call.cancel()
        slots = [rank.info.slot for rank in target.ranks]
        self._book.take(target.generation, dict(zip(slots, replies, strict=True)))
        self._taken = moment
        return True

    async def _run(self, interval_s: float) -> None:
        while True:
            try:
                await self.poll()
            except Exception:  # statistics must not end with one bad answer
                logger.exception("the ranks' counters could not be read")
            await asyncio.sleep(interval_s)
