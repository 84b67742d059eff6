"""An asyncio loop in a thread of its own, for callers that are not asynchronous."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class LoopThread:
    """Runs coroutines on one background loop; `close` ends it."""

    def __init__(self, name: str = "epruntime-loop") -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine to its end and returns its result, or raises its error.

        An interrupt (Ctrl-C) cancels the coroutine, waits until it has cleaned up, and is raised.
        """
        outcome: concurrent.futures.Future[T] = concurrent.futures.Future()
        tasks: list[asyncio.Task[T]] = []

        def start() -> None:
            task = self.loop.create_task(coroutine)
            tasks.append(task)
            task.add_done_callback(lambda done: _transfer(done, outcome))

        self.loop.call_soon_threadsafe(start)
        try:
            return outcome.result()
        except KeyboardInterrupt:
            self.loop.call_soon_threadsafe(lambda: tasks[0].cancel())
            concurrent.futures.wait([outcome])
            raise

    def close(self) -> None:
        """Stops the loop and its thread. Safe to call again."""
        if self._thread.is_alive():
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join()

    def _main(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
        finally:
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
            self.loop.close()


def _transfer(task: asyncio.Task[T], outcome: concurrent.futures.Future[T]) -> None:
    if task.cancelled():
        outcome.set_exception(asyncio.CancelledError())
    elif (error := task.exception()) is not None:
        outcome.set_exception(error)
    else:
        outcome.set_result(task.result())
