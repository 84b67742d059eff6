"""What an engine reports while it starts, as log lines."""

from __future__ import annotations

import logging
import time

logger = logging.getLogger("epruntime.serve.progress")


class ProgressLog:
    """Call it as progress(what, done, total): logs each activity at most once a second, and its end once."""

    _EVERY_S = 1.0

    def __init__(self) -> None:
        self._last: dict[str, float] = {}
        self._ended: set[str] = set()

    def __call__(self, what: str, done: int, total: int) -> None:
        now = time.monotonic()
        if done < total:
            if now - self._last.get(what, float("-inf")) < self._EVERY_S:
                return
            self._ended.discard(what)
        elif what in self._ended:
            return
        else:
            self._ended.add(what)
        self._last[what] = now
        share = f": {100 * done // total} %" if total > 0 else ""
        logger.info("%s%s", what, share)
