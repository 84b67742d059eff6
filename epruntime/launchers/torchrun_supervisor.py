"""Supervisor: what a worker of torchrun is. It starts a rank when the coordinator orders one, and outlives it.

worker 0: starts the coordinator | all: search -> link to the coordinator -> orders -> rank processes
the coordinator ends -> ranks end -> this process ends with its exit code

torchrun's agent stops all workers of its host as soon as one ends badly. So no worker is a rank, or the coordinator:
the agent sees supervisors only, which end when the job does. It needs no torch: about 25 MB per worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import dataclasses
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from epruntime import envs
from epruntime.comm import auth
from epruntime.comm.control import RankBootstrap
from epruntime.comm.frames import Message
from epruntime.comm.lifeline import EXIT_ORPHANED, die_with_parent
from epruntime.errors import EPRuntimeError
from epruntime.launchers import torchrun_cause
from epruntime.launchers.cores import usable_cores
from epruntime.launchers.local import LocalLauncher, LocalProcess, exit_text
from epruntime.launchers.torchrun_environment import (
    CoordinatorLetter,
    TorchrunWorker,
    drain_timeout_s,
    forget_torchrun,
    take_job_secret,
)
from epruntime.launchers.torchrun_link import SupervisorLink
from epruntime.launchers.torchrun_meeting import LastLetter
from epruntime.launchers.torchrun_search import CoordinatorSearch

logger = logging.getLogger("epruntime.launchers.torchrun_supervisor")

#: seconds within which the coordinator must be found to be told of a signal.
_DELIVER_S = 10.0
#: seconds that the coordinator on this host gets to end when the link to it is gone, and after SIGTERM; that killed
#: processes get to be gone; that last messages get to leave.
_CLOSE_S, _TERMINATE_S, _KILL_S, _FAREWELL_S = 10.0, 5.0, 5.0, 1.0
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_PR_SET_PDEATHSIG = 1


def supervise(worker: TorchrunWorker) -> int:
    """Is this worker until the job ends; returns the exit code. Worker 0 starts this very program again, as the
    coordinator.

    Ends at once, with all that it started, when torchrun's agent does.
    """
    die_with_parent(os.getppid())
    _set_up_logging()
    command = [sys.executable, *sys.orig_argv[1:]]
    forget_torchrun(os.environ)
    environment = dict(os.environ)
    CoordinatorLetter(worker=worker, parent_pid=os.getpid()).put(environment)
    secret = take_job_secret(os.environ)

    async def run() -> int:
        supervisor = Supervisor(worker, job_secret=secret)
        return await supervisor.run(command, environment)

    return asyncio.run(run())


class Supervisor:
    """One worker of torchrun.

    Args:
        job_secret: given to all processes of the job by the user; None: it comes with the coordinator's letter.
    """

    def __init__(self, worker: TorchrunWorker, *, job_secret: bytes | None) -> None:
        self._worker, self._job_secret = worker, job_secret
        self._host = socket.gethostname()
        self._loop = asyncio.get_running_loop()
        self._outcome: asyncio.Future[tuple[int, str]] = self._loop.create_future()
        self._coordinator: asyncio.subprocess.Process | None = None
        self._coordinator_host = ""
        self._secret = b""
        self._link: SupervisorLink | None = None
        self._ranks: dict[int, LocalProcess] = {}
        self._spawning: dict[int, asyncio.Task[None]] = {}
        self._num_signals, self._signal = 0, signal.SIGTERM
        self._told_of_end = self._stopped = False

    async def run(self, command: Sequence[str], environment: Mapping[str, str]) -> int:
        """Lives until the job ends; returns the exit code of this process.

        Args:
            command, environment: of the coordinator, for worker 0.
        """
        for number in _SIGNALS:
            self._loop.add_signal_handler(number, self._signalled, number)
        tasks: list[asyncio.Task[None]] = []
        try:
            if self._worker.rank == 0:
                tasks.append(self._loop.create_task(self._coordinate(command, environment)))
            tasks.append(self._loop.create_task(self._join()))
            code, reason = await self._outcome
        finally:
            for task in [*tasks, *self._spawning.values()]:
                task.cancel()
            await asyncio.gather(*tasks, *self._spawning.values(), return_exceptions=True)
            await self._end_ranks()
            await self._end_coordinator()
            if self._link is not None:
                await asyncio.to_thread(self._link.close, _FAREWELL_S)
        if self._stopped and not self._num_signals and self._worker.local_rank == 0:
            # Another host's agent was told to end, and has. Ours would wait for it, five minutes, or start all anew.
            logger.info("torchrun was stopped on another host, and ends here, too")
            os.kill(os.getppid(), signal.SIGTERM)
        if code:
            level = logging.INFO if self._num_signals else logging.ERROR
            logger.log(level, "torchrun worker %d on host %s ends: %s", self._worker.rank, self._host, reason)
            self._tell_torchrun(reason)
        return code

    def _end(self, code: int, reason: str) -> None:
        if not self._outcome.done():
            self._outcome.set_result((code, reason))

    # the coordinator

    async def _coordinate(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Starts the coordinator; its end is the job's."""
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=subprocess.DEVNULL,
                env=environment,
                start_new_session=True,  # signals to this worker are handed on by it, once
                preexec_fn=_end_with_parent,
            )
        except OSError as error:
            self._end(1, f"the coordinator could not be started: {command[0]}: {error}")
            return
        self._coordinator = process
        code = await process.wait()
        cause = torchrun_cause.left(self._worker.error_file)
        words = f"the coordinator, on this host, ended: {exit_text(code)}" + (f": {cause}" if cause else "")
        self._end(code if code >= 0 else 128 - code, words)

    async def _end_coordinator(self) -> None:
        process = self._coordinator
        if process is None:
            return
        for end, seconds in ((process.terminate, _TERMINATE_S), (process.kill, _KILL_S)):
            if process.returncode is not None:
                return
            with contextlib.suppress(ProcessLookupError):
                end()
            await asyncio.wait([self._loop.create_task(process.wait())], timeout=seconds)

    async def _join(self) -> None:
        try:
            found = await CoordinatorSearch(self._worker, job_secret=self._job_secret).run()
        except EPRuntimeError as error:
            self._give_up(1, str(error))
            return
        if isinstance(found, LastLetter):
            self._ended(found.code, found.cause, found.host)
            return
        self._secret, self._coordinator_host = found.secret, found.host
        self._link = SupervisorLink(found.client, on_message=self._take, on_closed=self._closed)
        affinity = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
        here = {"group": self._worker.group_rank, "affinity": affinity, "cores": usable_cores()}
        self._tell({"type": "here", **here})
        if self._num_signals:
            self._hand_on_signal()

    def _closed(self, reason: str) -> None:
        """The coordinator is gone, or out of reach; without having said how the job ended, unless we were told."""
        if self._outcome.done():
            return
        words = f"the coordinator on host {self._coordinator_host} is gone: {reason}"
        if self._coordinator is not None:
            for process in self._ranks.values():
                process.kill()
        if not self._told_of_end:
            self._give_up(EXIT_ORPHANED, words)

    def _ended(self, code: int, cause: str, host: str) -> None:
        """The job has, says the coordinator. Where that is a child of ours its exit is the end, whenever it comes."""
        self._told_of_end = True
        if self._worker.rank != 0:
            words = f"the coordinator on host {host} ended with exit code {code}"
            self._end(code, words + (f": {cause}" if cause else "; its output there shows why"))
        elif self._link is not None:
            self._link.end_soon()  # the coordinator waits for that

    def _give_up(self, code: int, reason: str) -> None:
        """Ends without a word from the coordinator. If it is a child of ours its exit code tells more, if it comes."""
        if self._worker.rank != 0:
            self._end(code, reason)
        else:
            self._loop.call_later(_CLOSE_S, self._end, code, reason)

    # orders

    def _take(self, message: Message) -> None:
        kind, order = message["type"], message.get("id", 0)
        if kind == "spawn":
            task = self._loop.create_task(self._spawn(order, message["bootstrap"], message["nonce"]))
            self._spawning[order] = task
            task.add_done_callback(lambda _: self._spawning.pop(order, None))
        elif kind in ("terminate", "kill"):
            if order in self._spawning:
                self._spawning[order].cancel()  # leaves no process behind
            elif order in self._ranks:
                process = self._ranks[order]
                (process.terminate if kind == "terminate" else process.kill)()
        elif kind == "end":
            self._stopped = message["stopped"]
            self._ended(message["code"], message["cause"], self._coordinator_host)

    async def _spawn(self, order: int, letter: bytes, nonce: bytes) -> None:
        try:
            bootstrap = RankBootstrap.from_bytes(letter)
            bootstrap = dataclasses.replace(bootstrap, secret=auth.masked(self._secret, nonce, bootstrap.secret))
            launcher = LocalLauncher(on_line=lambda slot, line: self._said(order, line))
            process = await launcher.spawn(bootstrap)
        except EPRuntimeError as error:
            self._tell({"type": "failed", "id": order, "reason": str(error)})
            return
        except asyncio.CancelledError:
            self._tell({"type": "failed", "id": order, "reason": "it was taken back"})
            raise
        self._ranks[order] = process
        self._tell({"type": "spawned", "id": order})
        process.exited.add_done_callback(lambda done: self._exited(order, done.result()))

    def _said(self, order: int, line: str) -> None:
        if self._link is not None:
            self._link.send({"type": "line", "id": order, "text": line}, droppable=True)

    def _exited(self, order: int, how: str) -> None:
        self._ranks.pop(order, None)
        self._tell({"type": "exited", "id": order, "how": how})

    def _tell(self, message: Message) -> None:
        if self._link is not None:
            self._link.send(message)

    async def _end_ranks(self) -> None:
        processes = list(self._ranks.values())
        for process in processes:
            process.kill()
        if processes:
            await asyncio.wait([process.exited for process in processes], timeout=_KILL_S)

    # what torchrun is told, and tells

    def _signalled(self, number: signal.Signals) -> None:
        """torchrun's agent, or whoever stops it, wants the job to end: the coordinator decides how."""
        self._num_signals, self._signal = self._num_signals + 1, number
        if self._told_of_end:
            logger.info("%s: the job ends already", number.name)
        elif self._link is not None:
            self._hand_on_signal()
        elif self._num_signals == 1:
            self._loop.call_later(min(_DELIVER_S, drain_timeout_s() / 2), self._not_delivered)
        else:
            self._not_delivered()

    def _hand_on_signal(self) -> None:
        self._tell({"type": "signal", "number": int(self._signal), "count": self._num_signals})

    def _not_delivered(self) -> None:
        """Of the whole job only what is here can be told to end."""
        if self._link is not None or self._told_of_end:
            return
        if self._coordinator is None:
            self._end(128 + self._signal, f"stopped by {self._signal.name} before the coordinator was found")
        elif self._coordinator.returncode is None:
            self._coordinator.send_signal(self._signal)

    def _tell_torchrun(self, reason: str) -> None:
        """The reason appears in the summary that torchrun prints."""
        if not self._worker.error_file:
            return
        text = json.dumps({"message": f"host {self._host}: {reason}", "timestamp": str(int(time.time()))})
        try:
            Path(self._worker.error_file).write_text(text)
        except OSError as error:
            logger.warning("torchrun's summary will not say why: %s", error)


def _end_with_parent() -> None:
    """In the coordinator's process, before its program: no coordinator outlives worker 0."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _set_up_logging() -> None:
    root = logging.getLogger("epruntime")
    if not root.handlers:  # else the program has its own
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s", "%H:%M:%S"))
        root.addHandler(handler)
        root.propagate = False
    root.setLevel(str(envs.get("EPRUNTIME_LOG_LEVEL")))
