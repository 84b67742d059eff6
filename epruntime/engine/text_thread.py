"""TextThread: work on texts (tokenising, chat templates) beside the event loop.

One thread, and another for long texts, so that these keep short ones waiting only for the processor.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from epruntime.errors import UnavailableError

T = TypeVar("T")

#: Characters or token ids from which on a text is long: some hundredths of a second of most tokenizers.
LONG = 2**16


class TextThread:
    """Does short jobs one after another in the order in which they came, and beside them the long ones likewise.

    Attributes:
        num_jobs: jobs that wait or run, and are wanted.
    """

    def __init__(self) -> None:
        self.num_jobs = 0
        self._short, self._long = (
            ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"epruntime-{name}") for name in ("text", "long-text")
        )
        self._closed = False

    def submit(self, job: Callable[[], T], *, size: int = 0) -> asyncio.Future[T]:
        """Queues a job. Cancelling the future takes it back, or leaves its result alone if it runs already.

        Args:
            size: how long its text is, in characters or token ids; see LONG.

        Raises:
            UnavailableError: the thread is closed.
        """
        if self._closed:
            raise _closed()
        box: list[Callable[[], T]] = [job]
        executor = self._long if size >= LONG else self._short
        future = asyncio.wrap_future(executor.submit(_open, box))
        self.num_jobs += 1

        def done(_: object) -> None:
            self.num_jobs -= 1
            box.clear()  # a job taken back stays in the executor's queue until its turn, but its text must not
            if not future.cancelled():
                future.exception()  # an error that nobody waits for any more is no news for the log

        future.add_done_callback(done)
        return future

    async def run(self, job: Callable[[], T], *, size: int = 0) -> T:
        """Does a job and returns its result. A caller that is cancelled does not wait for it.

        Raises:
            what the job raises. UnavailableError: the thread was closed first.
        """
        future = self.submit(job, size=size)
        try:
            return await future
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._closed and task is not None and not task.cancelling():  # `close` did it, and not the caller's end
                raise _closed() from None
            raise

    def close(self) -> None:
        """Takes no more jobs and forgets those not begun; does not wait. Safe to call again."""
        self._closed = True
        for executor in (self._short, self._long):
            executor.shutdown(wait=False, cancel_futures=True)


def _open(box: list[Any]) -> Any:
    return box.pop()()


def _closed() -> UnavailableError:
    return UnavailableError("the engine was shut down")
