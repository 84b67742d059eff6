"""ServerProcess: `epruntime serve` as a child process, of which nothing stays behind.

start -> "epruntime is ready: gRPC on HOST:PORT, HTTP on http://HOST:PORT" -> ... -> SIGTERM, again, SIGKILL
-> SIGKILL for what is left of its tree
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import re
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from epruntime.errors import LaunchError

_READY = re.compile(r"^epruntime is ready: gRPC on (\S+?)(?:, HTTP on (\S+))?$")
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36

#: seconds given to the server after the first SIGTERM, after the second, and to be gone after SIGKILL.
DRAIN_S, STOP_S, KILL_S = 30.0, 10.0, 10.0
#: seconds that its descendants get to end by themselves.
PATIENCE_S = 2.0


class ServerProcess:
    """One server in a process group of its own. Use it as an async context manager.

    Args:
        arguments: of `epruntime serve`, the model first.
        echo: called with every line that the server prints.
        environment: added to this process's own.

    Attributes:
        address: HOST:PORT of gRPC, http_url: where HTTP is served (empty: it is not); both once it is ready.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        echo: Callable[[str], None] = lambda line: None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.command = [sys.executable, "-m", "epruntime.cli.main", "serve", *arguments]
        self.address, self.http_url = "", ""
        self._echo = echo
        self._environment = {**os.environ, **(environment or {})}
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._tail: deque[str] = deque(maxlen=15)
        self._ready: asyncio.Future[tuple[str, str]] | None = None
        self._others: frozenset[int] = frozenset()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    async def start(self, timeout_s: float) -> str:
        """Starts the server and waits until it takes requests; returns HOST:PORT of gRPC.

        Raises:
            LaunchError: it ended, or was not ready in time; with its last lines.
        """
        adopt_orphans()
        self._others = frozenset(descendants())
        ready: asyncio.Future[tuple[str, str]] = asyncio.get_running_loop().create_future()
        self._ready = ready
        self._process = await asyncio.create_subprocess_exec(
            *self.command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=self._environment,
            start_new_session=True,
            preexec_fn=_end_with_parent,
        )
        self._reader = asyncio.create_task(self._read(self._process))
        ended = asyncio.create_task(self._process.wait())
        try:
            waiting: list[asyncio.Future[Any]] = [ready, ended]
            await asyncio.wait(waiting, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            ended.cancel()
        if not ready.done():
            code = self._process.returncode
            if code is not None:
                await asyncio.wait({self._reader}, timeout=1.0)  # its last words
            what = f"was not ready within {timeout_s:g} s" if code is None else f"ended with status {code}"
            raise LaunchError("\n  ".join([f"the server {what}: {' '.join(self.command)}", *self._tail]))
        self.address, self.http_url = ready.result()
        return self.address

    def signal(self, number: int) -> None:
        """Sends the server (not its ranks) a signal, if it still runs."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    async def wait(self, timeout_s: float) -> int | None:
        """The exit status; None if it still runs after `timeout_s` seconds."""
        assert self._process is not None
        try:
            return await asyncio.wait_for(self._process.wait(), timeout_s)
        except TimeoutError:
            return None

    async def stop(self) -> int | None:
        """Ends the server and every process that descends from it. Safe to call again.

        (Told from this process's other children by being younger: start nothing else meanwhile.)

        Returns:
            The server's exit status, None if it never started.
        """
        status = None
        if self._process is not None:
            for number, seconds in ((signal.SIGTERM, DRAIN_S), (signal.SIGTERM, STOP_S), (signal.SIGKILL, KILL_S)):
                self.signal(number)
                status = await self.wait(seconds)
                if status is not None:
                    break
        await end_descendants(self._others)
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.wait({self._reader})
        return status

    async def __aenter__(self) -> ServerProcess:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.stop()

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        assert self._ready is not None
        while line := await process.stdout.readline():
            text = line.decode(errors="replace").rstrip()
            self._tail.append(text)
            found = _READY.match(text)
            if found and not self._ready.done():
                self._ready.set_result((found[1], found[2] or ""))
            self._echo(text)


def adopt_orphans() -> None:
    """Makes descendants whose parents end children of this process (Linux), so that none gets out of sight."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def descendants(others: Collection[int] = ()) -> list[int]:
    """Pids of all living descendants of this process, but for `others` and theirs."""
    children: dict[int, list[int]] = {}
    for directory in Path("/proc").iterdir():
        if not directory.name.isdigit():
            continue
        with contextlib.suppress(OSError):  # ended meanwhile
            fields = (directory / "stat").read_text().rpartition(")")[2].split()
            state, parent = fields[0], int(fields[1])
            if state != "Z":
                children.setdefault(parent, []).append(int(directory.name))
    found, todo = [], [os.getpid()]
    while todo:
        below = [pid for pid in children.get(todo.pop(), []) if pid not in others]
        found += below
        todo += below
    return found


async def end_descendants(others: Collection[int] = (), timeout_s: float = KILL_S) -> None:
    """Kills what is left of the processes that this process started, directly or not, but for `others` and theirs.

    Processes that end by themselves get a moment first.

    Raises:
        LaunchError: some could not be ended.
    """
    started = time.monotonic()
    while left := descendants(others):
        seconds = time.monotonic() - started
        if seconds > timeout_s:
            raise LaunchError(f"processes {left} could not be ended")
        if seconds > PATIENCE_S:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        await asyncio.sleep(0.05)
    _reap(others)


def _reap(others: Collection[int]) -> None:
    """Collects adopted children that have ended, so that no zombie stays behind."""
    for directory in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):  # ended meanwhile, or no process at all
            state, parent = (directory / "stat").read_text().rpartition(")")[2].split()[:2]
            if state == "Z" and int(parent) == os.getpid() and int(directory.name) not in others:
                os.waitpid(int(directory.name), os.WNOHANG)


def _end_with_parent() -> None:
    """In the child: SIGTERM when this process dies without a word."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
