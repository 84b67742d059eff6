"""How a rank ends: by itself, condemned, or asked to.

first_sign: process ends | connection ends | condemned     end_of: settle -> kill -> confirmed dead
stop_rank: ask, terminate, kill
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import dataclass

from epruntime.comm.control import Connection
from epruntime.errors import ConnectionClosedError, EngineDeadError
from epruntime.launchers.base import RankProcess
from epruntime.launchers.handle import RankHandle

logger = logging.getLogger("epruntime.launchers.rank_end")

#: What comes behind it in an error's text a rank has printed: for those who may know its log, never for clients.
LAST_WORDS = "; its last words:"

#: seconds given to a rank: to leave when asked, when told (SIGTERM), and to be gone after SIGKILL.
_LEAVE_S, _TERMINATE_S, KILL_S = 3.0, 2.0, 10.0

#: seconds between the end of a rank's connections and the end of its process that count as one event.
_SETTLE_S = 2.0


@dataclass(frozen=True, kw_only=True)
class RankEnd:
    """A rank's end. `how`: in words; `progress`: what it was doing, in words."""

    how: str
    progress: str

    def detail(self, rank: RankHandle) -> str:
        """What whoever waited for the rank is told, in one line."""
        activity = rank.activity()
        return " ".join(f"{self.how}; {self.progress}{f'; unanswered: {activity}' if activity else ''}".split())


async def first_sign(rank: RankHandle) -> None:
    """Waits until a rank ends: its process, its connection, or by a verdict."""
    assert rank.process is not None
    await asyncio.wait([rank.process.exited, rank.closed, rank.condemned], return_when=asyncio.FIRST_COMPLETED)


async def end_of(rank: RankHandle) -> RankEnd:
    """What became of a rank that ends; what is left of it is killed."""
    process = rank.process
    assert process is not None
    if not rank.condemned.done():
        # What it still said before it ended arrives first; and a closed connection mostly means a dying process.
        waiting = [process.exited]
        waiting += [rank.closed] if rank.connection is not None else []
        waiting += [rank.beats_closed] if rank.beats is not None else []
        await asyncio.wait(waiting, timeout=_SETTLE_S)
    progress = str(rank.progress)
    if process.exited.done():
        return RankEnd(how=process.exited.result(), progress=progress)
    if rank.condemned.done():
        how = rank.condemned.result()
    else:
        how = f"it left the control channel ({rank.closed.result()}) while its process was running"
    logger.error("rank %d on host %s, killing it: %s", rank.seat.slot, rank.seat.host, how)
    process.kill()
    await asyncio.wait([process.exited], timeout=KILL_S)
    how += "; killed" if process.exited.done() else "; its process could not be confirmed dead"
    return RankEnd(how=how, progress=progress)


async def stop_rank(rank: RankHandle) -> None:
    """Ends a rank that is not wanted any more, and its connections."""
    stopped = EngineDeadError("the rank pool was stopped")
    rank.fail(stopped)
    rank.failed_to_start(stopped)
    process, connection = rank.process, rank.connection
    if process is not None:
        try:
            await _end_process(process, connection)
        except asyncio.CancelledError:
            process.kill()  # no time left for manners
            raise
        if not process.exited.done():
            logger.error(
                "rank %d on host %s, pid %d, could not be confirmed dead",
                rank.seat.slot,
                rank.seat.host,
                rank.info.pid,
            )
    for end in (connection, rank.beats):
        if end is not None:
            end.abort("this rank was stopped")


def without_words(text: str) -> str:
    """An error's text without what a rank has printed."""
    return text.partition(LAST_WORDS)[0]


def said(rank: RankHandle) -> str:
    """Its last words, for the log and for the error of a start that fails."""
    tail = rank.process.output_tail() if rank.process is not None else []
    return f"{LAST_WORDS}\n  " + "\n  ".join(tail) if tail else ""


async def _end_process(process: RankProcess, connection: Connection | None) -> None:
    if connection is not None and connection.is_open:
        with contextlib.suppress(ConnectionClosedError):
            connection.send({"type": "shutdown", "id": 0})
            await asyncio.wait([process.exited], timeout=_LEAVE_S)
    for act, seconds in ((process.terminate, _TERMINATE_S), (process.kill, KILL_S)):
        if not process.exited.done():
            act()
            await asyncio.wait([process.exited], timeout=seconds)
