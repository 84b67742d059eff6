"""An asyncio loop in a thread of its own, for callers that are not asynchronous."""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import os
import threading
import weakref
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec, TypeVar

from epruntime.errors import EngineDeadError

T = TypeVar("T")
P = ParamSpec("P")


class LoopThread:
    """Runs coroutines on one background loop; `close` ends it."""

    def __init__(self, name: str = "epruntime-loop") -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine to its end and returns its result, or raises its error.

        An interrupt (Ctrl-C) cancels the coroutine, waits until it has cleaned up, and is raised.

        Raises:
            EngineDeadError: `close` was called.
        """
        if self.closed:
            coroutine.close()
            raise EngineDeadError("this engine, or the ranks that it runs on, was shut down")
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

    @property
    def closed(self) -> bool:
        return self.loop.is_closed()

    @property
    def is_current(self) -> bool:
        """Whether the caller is in this thread, where `run` would wait for itself."""
        return threading.current_thread() is self._thread

    def close(self) -> None:
        """Stops the loop and its thread; what still runs on it is cancelled. Safe to call again."""
        if self._thread.is_alive():
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join()

    def _main(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
        finally:
            self.loop.run_until_complete(self._cancel_rest())
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
            self.loop.close()

    async def _cancel_rest(self) -> None:
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)


def call_at_end(
    owner: object, loop_thread: LoopThread, function: Callable[P, None], *args: P.args, **kwargs: P.kwargs
) -> Callable[[], None]:
    """Calls `function` once: when the returned function is called, when `owner` is garbage, or at interpreter exit.

    Args:
        loop_thread: that `function` waits for.
    """

    maker = os.getpid()

    def end() -> None:
        if os.getpid() != maker:  # a forked child has neither the thread nor the work
            return
        # The garbage collector runs in any thread, also in the one that would have to do the work.
        if loop_thread.is_current:
            threading.Thread(target=function, args=args, kwargs=kwargs, name="epruntime-end").start()
        else:
            function(*args, **kwargs)

    finalizer = weakref.finalize(owner, end)
    # By itself it would run where the first finalizer of the process was made: behind the exit functions of libraries
    # imported since, such as Ray, which then has ended the ranks already.
    finalizer.atexit = False
    atexit.register(finalizer)

    def call() -> None:
        finalizer()
        atexit.unregister(finalizer)

    return call


def _transfer(task: asyncio.Task[T], outcome: concurrent.futures.Future[T]) -> None:
    if task.cancelled():
        outcome.set_exception(asyncio.CancelledError())
    elif (error := task.exception()) is not None:
        outcome.set_exception(error)
    else:
        outcome.set_result(task.result())
