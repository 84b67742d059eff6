"""StatsPoller: asks the ranks for their counters now and then, so that who reads statistics never waits for a rank.

every interval: `counters` to all ranks in one turn of the loop -> StatsBook.take

Plans, too, go to all ranks in one turn: so all ranks answer between the same two steps, and their counters fit
together. A rank that is in the middle of a step answers after it; nobody waits for that here.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from epruntime.engine.stats import EngineView, StatsBook
from epruntime.errors import EPRuntimeError

logger = logging.getLogger("epruntime.engine.stats_poller")


#: seconds until a poll gives up on an answer and asks anew; long, since a rank answers after its steps in flight
_ANSWER_S = 300.0


class StatsPoller:
    """Keeps a StatsBook fresh.

    Args:
        view: the engine as it is now.
    """

    def __init__(self, book: StatsBook, view: Callable[[], EngineView]) -> None:
        self._book, self._view = book, view
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
        view = self._view()
        if not view.answering:
            return False
        generation, ranks = view.group.generation, view.group.ranks
        moment = (generation, view.core.stats.steps)
        if moment == self._taken:
            self._book.confirm()
            return True
        calls = [rank.call("counters", timeout_s=_ANSWER_S) for rank in ranks]
        try:
            replies = await asyncio.gather(*calls)
        except EPRuntimeError as error:  # the engine learns of a lost rank elsewhere
            logger.debug("no counters: %s", error)
            return False
        finally:
            for call in calls:
                call.cancel()
        slots = [rank.info.slot for rank in ranks]
        self._book.take(generation, dict(zip(slots, replies, strict=True)))
        self._taken = moment
        return True

    async def _run(self, interval_s: float) -> None:
        while True:
            try:
                await self.poll()
            except Exception:  # statistics must not end with one bad answer
                logger.exception("the ranks' counters could not be read")
            await asyncio.sleep(interval_s)
