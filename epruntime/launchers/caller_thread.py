"""CallerThread: one thread, alive to the end of the process, that runs blocking calls for an asyncio loop.

The kernel's parent-death signal (and Ray's fate sharing, which uses it) is bound to the thread that started a child,
not to the process: a child started from a short-lived thread dies with that thread.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class CallerThread:
    """Runs what it is given, one call after another, in a daemon thread that never ends."""

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    async def run(self, function: Callable[[], T]) -> T:
        """The result of `function()`. Cancelling does not stop a call that has begun."""
        future: Future[T] = Future()
        self._calls.put((function, future))
        return await asyncio.wrap_future(future)

    def _run(self) -> None:
        while True:
            function, future = self._calls.get()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(function())
            except BaseException as error:  # noqa: BLE001 - handed to the caller, whatever it is
                future.set_exception(error)
            del function, future


_spawner: CallerThread | None = None


def spawner() -> CallerThread:
    """The process-wide thread that starts child processes."""
    global _spawner
    if _spawner is None:
        _spawner = CallerThread("epruntime-spawner")
    return _spawner
