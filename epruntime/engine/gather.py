"""Waiting for the answers of all ranks to a message, within a deadline after which the cause of the delay is named."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import TypeVar

from epruntime.engine import blame
from epruntime.errors import RankLostError
from epruntime.launchers.handle import RankHandle

T = TypeVar("T")

#: how much later than a rank the coordinator gives up, so that the rank's own error, which says whom it waited for,
#: comes first.
GRACE_S = 3.0


async def gather(
    ranks: Sequence[RankHandle], calls: Sequence[asyncio.Future[T]], *, what: str, limit_s: float, option: str
) -> list[T]:
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
