"""What the coordinator knows of a rank's progress, from its heartbeats."""

from __future__ import annotations

from dataclasses import dataclass

from epruntime.comm.frames import Message
from epruntime.comm.progress import Stamp
from epruntime.errors import ProtocolError
from epruntime.launchers.clock import LoopClock


@dataclass(frozen=True, kw_only=True)
class RankProgress:
    """A rank's last stamp.

    Attributes:
        stamp: None before the first heartbeat.
        age_s: seconds since the stamp last changed, with the 0.1 s of the heartbeats' interval.
        silent_s: seconds since the last heartbeat.
    """

    stamp: Stamp | None
    age_s: float
    silent_s: float

    def __str__(self) -> str:
        if self.stamp is None:
            return "it has reported no progress"
        return f"last progress {self.age_s:.1f} s ago: {self.stamp}"


class Heartbeats:
    """Takes one rank's heartbeats."""

    def __init__(self, clock: LoopClock) -> None:
        self._clock = clock
        self._stamp: Stamp | None = None
        self._changed = self._heard = clock.now()

    def begin(self) -> None:
        """The rank has joined: from now on silence counts."""
        self._changed = self._heard = self._clock.now()

    def take(self, message: Message) -> None:
        """Raises ProtocolError: not a heartbeat."""
        data = message.get("stamp")
        if not isinstance(data, bytes):
            raise ProtocolError(f"heartbeat without a stamp: {type(data).__name__}")
        stamp, now = Stamp.from_bytes(data), self._clock.now()
        if self._stamp is None or stamp.count != self._stamp.count:
            self._changed = now
        self._stamp, self._heard = stamp, now

    @property
    def progress(self) -> RankProgress:
        now = self._clock.now()
        return RankProgress(stamp=self._stamp, age_s=now - self._changed, silent_s=now - self._heard)
