"""EngineStatus: whether an engine takes requests and makes steps, now."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class EngineState(enum.Enum):
    """READY <-> STALLED; either -> RESTARTING -> READY; any -> DEAD."""

    READY = "ready"
    #: all ranks live, but one has not reported progress for a while; requests are still taken
    STALLED = "stalled"
    #: a rank was lost, and ranks are being replaced; requests are refused with a retry hint
    RESTARTING = "restarting"
    DEAD = "dead"


@dataclass(frozen=True, kw_only=True)
class EngineStatus:
    """A state and, unless it is READY, its reason in words: which rank, on which host, since when."""

    state: EngineState = EngineState.READY
    reason: str = ""
