"""EngineStatus: whether an engine takes requests and makes steps, now."""

from __future__ import annotations

import enum
from collections.abc import Callable
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


class StatusHolder:
    """The status of one engine, and who is told of its changes. DEAD is final."""

    def __init__(self) -> None:
        self._status = EngineStatus()
        self._watchers: dict[object, Callable[[EngineStatus], None]] = {}

    @property
    def status(self) -> EngineStatus:
        return self._status

    def become(self, state: EngineState, reason: str = "") -> None:
        """Changes the status and tells; nothing to do if it is the same, or if the engine is dead."""
        new = EngineStatus(state=state, reason=reason)
        if new == self._status or self._status.state is EngineState.DEAD:
            return
        self._status = new
        for callback in list(self._watchers.values()):
            callback(new)

    def on_change(self, callback: Callable[[EngineStatus], None]) -> Callable[[], None]:
        """Calls back after each change; returns what takes it back, which may be called again."""
        key = object()
        self._watchers[key] = callback

        def forget() -> None:
            self._watchers.pop(key, None)

        return forget
