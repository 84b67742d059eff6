"""Blame: which rank is the cause when a step, or a message to all ranks, does not end.

confirmed lost -> condemned -> a rank's own error -> past the deadline: the rank furthest behind, killed -> accusations

Ranks that wait for a peer are innocent, and so is what they say of each other: each names the peer that it happens to
wait for, which may wait itself. Who is behind is read from the progress stamps: every rank begins the same waits in
the same order, so the rank with the fewest is the one that the others wait for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from epruntime.comm.progress import Stamp
from epruntime.errors import EngineDeadError, RankLostError
from epruntime.launchers.handle import RankHandle

#: seconds without a heartbeat from which a rank counts as silent.
SILENT_S = 2.0
#: when one rank fails, how long the others, and the news of a lost rank, may take, so that the error names the cause.
WINDOW_S = 3.0
#: seconds that the pool gets to confirm that a condemned rank is dead.
_CONFIRM_S = 13.0
#: seconds without a new stamp from which a rank that heartbeats counts as standing still.
_STILL_S = 1.0


def suspect(ranks: Sequence[RankHandle]) -> RankHandle | None:
    """The rank that keeps the others waiting: one without heartbeats, else the one furthest behind; None if several
    are equally far and wait for each other, or nothing is known."""
    silent = [rank for rank in ranks if rank.progress.silent_s > SILENT_S and rank.progress.stamp is not None]
    if silent:
        return max(silent, key=lambda rank: rank.progress.silent_s)
    known = [(rank, stamp) for rank in ranks if (stamp := rank.progress.stamp) is not None]
    if not known:
        return None
    behind = min(_position(stamp) for _, stamp in known)
    last = [rank for rank, stamp in known if _position(stamp) == behind]
    waits = not behind[2]
    if len(last) > 1 and waits:
        return None
    return max(last, key=lambda rank: rank.progress.age_s)


def _position(stamp: Stamp) -> tuple[int, int, bool]:
    """How far a rank has come: after a wait is further than in it."""
    return stamp.generation, stamp.sequence, not stamp.waits


def verdict(rank: RankHandle, what: str, limit_s: float, option: str) -> str:
    """Why a rank that has not ended `what` in time is condemned."""
    progress = rank.progress
    text = f"it did not end {what} within {limit_s:g} s ({option})"
    if progress.stamp is None:
        return text
    if progress.silent_s > SILENT_S:
        return f"{text}: no heartbeat for {progress.silent_s:.1f} s, its process is stopped or its host is gone"
    if progress.age_s > _STILL_S:
        return f"{text}: its heartbeats go on, but its progress stands still"
    return f"{text}: it goes on, too slowly; raise {option} if this is no fault"


async def cause(
    ranks: Sequence[RankHandle], futures: Sequence[asyncio.Future[Any]], *, overdue: bool, what: str, limit_s: float,
    option: str,
) -> BaseException:  # fmt: skip
    """The error to end everything with, when `futures` (one per rank) failed or did not come in time.

    Args:
        overdue: the deadline has passed, so that a rank that has not answered is lost: it is killed.
        what: for example "step 17"; limit_s, option: the deadline and the setting that it is from.
    """
    if not (overdue or _ended(ranks)):
        await asyncio.wait(futures, timeout=WINDOW_S)
    ended = _ended(ranks)
    if ended is not None:
        return await confirmed(ended)
    errors = [error for future in futures if future.done() and (error := future.exception()) is not None]
    accusations = [error for error in errors if isinstance(error, RankLostError)]
    own = [error for error in errors if not isinstance(error, RankLostError)]
    if own:
        return own[0]
    silent = [rank for rank, future in zip(ranks, futures, strict=True) if not future.done()]
    slots = {rank.info.slot for rank in silent}
    if silent and (overdue or not accusations):
        accused = {error.slot for error in accusations}
        rank = suspect(silent) or next((rank for rank in silent if rank.info.slot in accused), silent[0])
        rank.condemn(verdict(rank, what, limit_s, option))
        return await confirmed(rank)
    return next((error for error in accusations if error.slot in slots), accusations[0])


def _ended(ranks: Sequence[RankHandle]) -> RankHandle | None:
    """One that is lost, else one that is about to be."""
    for rank in ranks:
        if isinstance(rank.lost, RankLostError):
            return rank
    return next((rank for rank in ranks if rank.condemned.done()), None)


async def confirmed(rank: RankHandle) -> EngineDeadError:
    """The error of a condemned rank, once it is confirmed dead."""
    if rank.lost is None and rank.process is not None:
        await asyncio.wait([rank.gone], timeout=_CONFIRM_S)
    if rank.lost is not None:
        return rank.lost
    return RankLostError(slot=rank.info.slot, host=rank.info.host, detail=f"{rank.condemned.result()}; {rank.progress}")
