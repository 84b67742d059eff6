"""Progress: what a rank is doing, for failure messages."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(kw_only=True)
class Progress:
    """The latest stamp of one rank.

    Attributes:
        phase: "idle", "configure", "load", "step", "unload", "stats".
        step: step number while phase is "step", else -1.
    """

    phase: str = "idle"
    step: int = -1

    def enter(self, phase: str, *, step: int = -1) -> None:
        self.phase, self.step = phase, step

    def __str__(self) -> str:
        return f"step {self.step}" if self.phase == "step" else self.phase
