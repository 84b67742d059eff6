"""time_limit: a deadline for code that may never end by itself, as a chat template with a loop.

with time_limit(3): ... -> the watchdog's thread waits for the deadline -> raises Overdue inside the block

A template is a program that came with a model; jinja's sandbox bounds what it may touch, and no loop of it. What is
raised is raised between two steps of the interpreter: templates are compiled to Python, so their loops have many. Time
is that of the thread on a processor: on a machine under load nothing is cut off for others' sake.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress


class Overdue(BaseException):
    """The block was still running at its deadline. No `except Exception` on the way can swallow it."""


class _Block:
    """One block under a deadline. `look`: when the watchdog looks at it, by the monotonic clock. `over`: it has ended.
    `raised`: the watchdog has thrown Overdue into its thread."""

    def __init__(self, seconds: float) -> None:
        self.thread = threading.get_ident()
        # Linux has a clock for each thread; else the wall's has to do
        has = hasattr(time, "pthread_getcpuclockid")
        self._clock = time.pthread_getcpuclockid(self.thread) if has else time.CLOCK_MONOTONIC
        self._end = time.clock_gettime(self._clock) + seconds
        self.look = time.monotonic() + seconds
        self.over = self.raised = False

    def left_s(self) -> float:
        return self._end - time.clock_gettime(self._clock)


class _Watchdog:
    """One daemon thread for all deadlines of this process; it is started by the first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._blocks: set[_Block] = set()
        self._thread: threading.Thread | None = None

    def enter(self, block: _Block) -> None:
        with self._changed:
            self._blocks.add(block)
            if self._thread is None or not self._thread.is_alive():  # it does not survive a fork
                self._thread = threading.Thread(target=self._watch, name="epruntime-time-limit", daemon=True)
                self._thread.start()
            self._changed.notify()

    def leave(self, block: _Block) -> None:
        """After this nothing is thrown any more; what was thrown and has not arrived is taken back."""
        # the lock itself: a Condition's methods are Python, where Overdue might arrive with the lock held
        with self._lock:
            block.over = True
            self._blocks.discard(block)
            if block.raised:
                _throw(block.thread, None)

    def _watch(self) -> None:
        with self._changed:
            while True:
                now = time.monotonic()
                for block in [block for block in self._blocks if block.look <= now]:
                    left_s = block.left_s()
                    if left_s > 0:
                        block.look = now + left_s
                        continue
                    self._blocks.discard(block)
                    block.raised = True
                    _throw(block.thread, Overdue)
                nearest = min((block.look for block in self._blocks), default=None)
                self._changed.wait(None if nearest is None else max(nearest - now, 0.0))


_WATCHDOG = _Watchdog()


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Bounds the block's time on a processor; use it in a thread that may be interrupted, and not nested.

    Code inside a single call of native code is interrupted when that returns.

    Raises:
        Overdue: the block was still running after `seconds`.
    """
    block = _Block(seconds)
    _WATCHDOG.enter(block)
    try:
        yield
    finally:
        try:
            _WATCHDOG.leave(block)
        finally:
            # it may arrive within the call above, at most once: then `leave` has not done all
            if not block.over:
                with suppress(Overdue):
                    _WATCHDOG.leave(block)


def _throw(thread: int, error: type[BaseException] | None) -> None:
    """Raises `error` in a thread before its next step; None takes back one that has not arrived."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(error) if error else None)
