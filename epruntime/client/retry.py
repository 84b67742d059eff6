"""When a failed call is tried again. Used before a request's first message only; after it, never."""

from __future__ import annotations

import random
import time

from epruntime.errors import EngineDeadError, EPRuntimeError, InvalidRequestError, QueueFullError, UnavailableError

DEFAULT_RETRIES = 3
#: Waits without a hint from the server: 0.25 s, twice as long each time, 20 % more or less so that clients do not come
#: back all at once (gRPC proposal A6, "Exponential backoff").
_FIRST_S, _FACTOR, _MAX_S, _JITTER = 0.25, 2.0, 8.0, 0.2
#: A server that wants to be left alone for longer is down, as far as this call is concerned.
_MAX_HINT_S = 60.0


class Attempts:
    """The tries of one call.

    Args:
        retries: tries after the first one.
        timeout: seconds for all of them together; None: no limit.
    """

    def __init__(self, retries: int, timeout: float | None) -> None:
        self._left = retries
        self._made = 0
        self._deadline = None if timeout is None else time.monotonic() + timeout

    def timeout(self) -> float | None:
        """Seconds for the next try."""
        return None if self._deadline is None else max(self._deadline - time.monotonic(), 0.0)

    def wait_s(self, error: EPRuntimeError) -> float | None:
        """Seconds until the next try; None if `error` is final, or no try or no time is left.

        A server's hint is followed: the wait is never shorter.
        """
        if self._left <= 0 or not self._passes(error):
            return None
        hint: float | None = getattr(error, "retry_after_s", None)
        if hint is None:
            wait = min(_FIRST_S * _FACTOR**self._made, _MAX_S) * random.uniform(1 - _JITTER, 1 + _JITTER)
        elif hint > _MAX_HINT_S:
            return None
        else:
            wait = hint * random.uniform(1, 1 + _JITTER)
        timeout = self.timeout()
        if timeout is not None and wait >= timeout:
            return None
        self._left -= 1
        self._made += 1
        return wait

    def _passes(self, error: EPRuntimeError) -> bool:
        """Whether the same request may be served later, or elsewhere behind the same address."""
        if isinstance(error, (UnavailableError, EngineDeadError, QueueFullError)):
            return True
        # the server has not noticed yet that an earlier try of ours, whose connection broke, is over
        return self._made > 0 and isinstance(error, InvalidRequestError) and error.field == "request_id"
