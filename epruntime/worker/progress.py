"""Progress: what a rank is doing, for failure messages."""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass(kw_only=True)
class Progress:
    """The latest stamp of one rank.

    Attributes:
        phase: "idle", "configure", "load", "step", "unload", "stats".
        step: step number while phase is "step", else -1.
        since: monotonic seconds at which the phase began.
    """

    phase: str = "idle"
    step: int = -1
    since: float = field(default_factory=time.monotonic)

    def enter(self, phase: str, *, step: int = -1) -> None:
        self.phase, self.step, self.since = phase, step, time.monotonic()

    def __str__(self) -> str:
        return f"step {self.step}" if self.phase == "step" else self.phase
