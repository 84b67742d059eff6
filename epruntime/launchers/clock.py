"""LoopClock: seconds that an asyncio loop has been there to listen."""

from __future__ import annotations

import time

#: seconds between two ticks; the most that time may pass without one.
TICK_S, _MOST_S = 0.2, 1.0


class LoopClock:
    """Runs with the monotonic clock, but at most a second beyond the last tick.

    Silence of a rank is measured with it: a coordinator that was itself stopped, or held up for half a minute, has
    heard nothing in that time, and nobody is to blame for it.
    """

    def __init__(self) -> None:
        self._sum, self._last = 0.0, time.monotonic()

    def now(self) -> float:
        return self._sum + min(time.monotonic() - self._last, _MOST_S)

    def tick(self) -> None:
        """To be called every TICK_S seconds."""
        self._sum, self._last = self.now(), time.monotonic()
