"""HealthWatch: tells from the ranks' heartbeats and stamps whether an engine steps, or stands still."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from epruntime.engine.blame import SILENT_S, suspect
from epruntime.engine.status import EngineState, StatusHolder
from epruntime.launchers.handle import RankHandle

#: seconds between two looks.
_LOOK_S = 0.25
#: seconds that a rank may compute without a new stamp (one layer of one step), while there is work.
_STILL_S = 5.0


class HealthWatch:
    """READY <-> STALLED, as long as it is not closed.

    Args:
        ranks: of one generation. stepping: whether a step is under way.
        step_timeout_s: after half of it without a new stamp an engine is stalled, if that is sooner than 5 s.
    """

    def __init__(
        self, ranks: Sequence[RankHandle], stepping: Callable[[], bool], status: StatusHolder, *, step_timeout_s: float
    ) -> None:
        self._ranks, self._stepping, self._status = ranks, stepping, status
        self._still_s = min(_STILL_S, step_timeout_s / 2)
        self._rested: dict[int, tuple[int, float]] = {}  # slot -> count and age of its stamp when no step was under way
        self._task = asyncio.create_task(self._run(), name="epruntime-health")

    def close(self) -> None:
        self._task.cancel()

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            reason = self.look()
            if reason:
                self._status.become(EngineState.STALLED, reason)
            elif self._status.status.state is EngineState.STALLED:
                self._status.become(EngineState.READY)

    def look(self) -> str:
        """Why the engine counts as stalled, "" if it does not; the same words for as long as the reason is the same."""
        for rank in self._ranks:
            progress = rank.progress
            if progress.stamp is not None and progress.silent_s > SILENT_S:
                return f"{_name(rank)} has sent no heartbeat for more than {SILENT_S:g} s; it was at: {progress.stamp}"
        known = [rank for rank in self._ranks if rank.progress.stamp is not None]
        if not self._stepping():
            self._rested = {rank.info.slot: _count_and_age(rank) for rank in known}
            return ""
        slow = suspect(known)
        if slow is not None and self._still_for(slow) > self._still_s:
            return f"{_name(slow)} has not moved for more than {self._still_s:g} s: {slow.progress.stamp}"
        if slow is None and known and min(map(self._still_for, known)) > self._still_s:
            return f"all ranks wait for each other: {known[0].progress.stamp}"
        return ""

    def _still_for(self, rank: RankHandle) -> float:
        """Seconds that a rank has not moved although there was work: the time it rested before does not count."""
        count, age_s = _count_and_age(rank)
        rested_count, rested_s = self._rested.get(rank.info.slot, (-1, 0.0))
        return age_s - rested_s if count == rested_count else age_s


def _count_and_age(rank: RankHandle) -> tuple[int, float]:
    progress = rank.progress
    assert progress.stamp is not None
    return progress.stamp.count, progress.age_s


def _name(rank: RankHandle) -> str:
    return f"rank {rank.info.slot} on host {rank.info.host}"
