"""LocalLauncher: ranks as child processes of the coordinator.

Popen (own session) -> bootstrap on stdin -> rank joins over a Unix socket; pidfd tells of its end, a pipe of its words
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable

from epruntime.comm.control import RankBootstrap
from epruntime.errors import LaunchError
from epruntime.launchers.base import Launcher, RankProcess, Seat
from epruntime.launchers.caller_thread import spawner
from epruntime.launchers.cores import thread_environment, threads_each, usable_cores
from epruntime.launchers.import_path import import_path
from epruntime.words import counted

logger = logging.getLogger("epruntime.launchers.local")
rank_logger = logging.getLogger("epruntime.rank")

WORKER_MODULE = "epruntime.worker"

_TAIL_LINES = 20
_MAX_LINE_BYTES = 8192
_LEVEL = re.compile(r"\b(DEBUG|INFO|WARNING|ERROR|CRITICAL)\b")
#: how a rank's own log lines begin (worker/main.py): level, logger.
_OWN_LEVEL = re.compile(r"(?:DEBUG|INFO|WARNING|ERROR|CRITICAL) (?=[\w.]+: )")


def _without_level(text: str) -> str:
    """A rank's own log line without its level, which the line that carries it has; all else as it is."""
    own = _OWN_LEVEL.match(text)
    return text if own is None else text[own.end() :]


class LocalProcess(RankProcess):
    """A rank that is a child of this process, in a session of its own: Ctrl-C in the terminal does not reach it, the
    coordinator decides. What it started itself ends with it."""

    def __init__(self, child: subprocess.Popen[bytes], slot: int, on_line: Callable[[str], None]) -> None:
        self._child, self._slot, self._on_line = child, slot, on_line
        self._loop = asyncio.get_running_loop()
        self.exited = self._loop.create_future()
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._partial = b""
        assert child.stdout is not None
        self._pipe = child.stdout.fileno()
        os.set_blocking(self._pipe, False)
        self._loop.add_reader(self._pipe, self._read_output)
        self._pidfd = -1
        if hasattr(os, "pidfd_open"):
            self._pidfd = os.pidfd_open(child.pid)
            self._loop.add_reader(self._pidfd, self._on_exit)
        else:  # not Linux: a thread that waits, without reaping
            threading.Thread(target=self._wait_in_thread, daemon=True).start()

    def output_tail(self) -> list[str]:
        return list(self._tail)

    def terminate(self) -> None:
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        # Until `_on_exit` reaps it the pid is this child's, dead or alive.
        if not self.exited.done():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._child.pid, number)

    def _wait_in_thread(self) -> None:
        os.waitid(os.P_PID, self._child.pid, os.WEXITED | os.WNOWAIT)
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(self._on_exit)

    def _on_exit(self) -> None:
        if self._pidfd >= 0:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
        # Before reaping, while the number cannot belong to anybody else: end what the rank left in its session.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._child.pid, signal.SIGKILL)
        code = self._child.wait()
        self._read_output()
        self._close_output()
        self.exited.set_result(exit_text(code))

    def _read_output(self) -> None:
        while self._pipe >= 0:
            try:
                data = os.read(self._pipe, 65536)
            except BlockingIOError:
                return
            if not data:
                self._close_output()
                return
            *lines, self._partial = (self._partial + data).replace(b"\r", b"\n").split(b"\n")
            for line in lines:
                self._emit(line)
            if len(self._partial) > _MAX_LINE_BYTES:
                self._emit(self._partial)
                self._partial = b""

    def _close_output(self) -> None:
        if self._pipe < 0:
            return
        self._loop.remove_reader(self._pipe)
        if self._partial:
            self._emit(self._partial)
        self._pipe = -1
        assert self._child.stdout is not None
        self._child.stdout.close()

    def _emit(self, line: bytes) -> None:
        if not line.strip():
            return
        text = line[:_MAX_LINE_BYTES].decode(errors="replace").rstrip()
        self._tail.append(text)
        found = _LEVEL.search(text[:80])  # a log line keeps its level; bare output is information
        level = logging.getLevelNamesMapping()[found.group(1)] if found else logging.INFO
        rank_logger.log(level, "[rank %d] %s", self._slot, _without_level(text))
        self._on_line(text)


class LocalLauncher(Launcher):
    """Ranks on this machine.

    Args:
        entry_module: module run as `python -m`; it gets the bootstrap on its standard input.
        on_line: called with (slot, line) for each line that a rank writes, besides logging it.
    """

    name = "local"
    control_host = None

    def __init__(
        self, *, entry_module: str = WORKER_MODULE, on_line: Callable[[int, str], None] = lambda slot, line: None
    ) -> None:
        self._entry_module, self._on_line = entry_module, on_line

    async def place(self, num_ranks: int, *, threads_per_rank: int | None, timeout_s: float) -> list[Seat]:
        cores = usable_cores()
        threads = threads_per_rank or threads_each(cores, num_ranks)
        if threads * num_ranks > cores:
            each = f"{counted(num_ranks, 'rank')} with {counted(threads, 'thread')} each"
            logger.warning("%s: there are %s", each, counted(cores, "core"))
        host = socket.gethostname()
        return [Seat(slot=slot, host=host, local_rank=slot, threads=threads) for slot in range(num_ranks)]

    async def spawn(self, bootstrap: RankBootstrap) -> LocalProcess:
        letter = dataclasses.replace(bootstrap, parent_pid=os.getpid())
        starting = asyncio.ensure_future(spawner().run(lambda: self._start(letter)))
        try:
            child = await asyncio.shield(starting)
        except OSError as error:
            raise LaunchError(f"rank {bootstrap.slot} could not be started: {sys.executable}: {error}") from error
        except asyncio.CancelledError:
            with await starting as child:  # milliseconds
                child.kill()
            raise
        return LocalProcess(child, bootstrap.slot, lambda line: self._on_line(bootstrap.slot, line))

    async def release(self) -> None:
        return None

    def _start(self, letter: RankBootstrap) -> subprocess.Popen[bytes]:
        environment = {
            **os.environ,
            **thread_environment(letter.threads),
            "PYTHONUNBUFFERED": "1",
            "PYTHONPATH": os.pathsep.join(import_path()),
        }
        child = subprocess.Popen(
            # -P: a file in the working directory must not replace a module of the rank.
            [sys.executable, "-P", "-m", self._entry_module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=environment,
        )
        assert child.stdin is not None
        # The pipe holds it, so this never waits; a child that is gone already is reported by its exit.
        with contextlib.suppress(BrokenPipeError), child.stdin:
            child.stdin.write(letter.to_bytes())
        return child


def exit_text(code: int) -> str:
    """How a process ended, from its return code (negative: a signal)."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"
