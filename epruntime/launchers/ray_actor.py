"""A rank that is a Ray actor: what runs in its process, and the coordinator's hold on it."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import signal
import socket
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from epruntime.comm.control import RankBootstrap
from epruntime.comm.lifeline import EXIT_ORPHANED
from epruntime.launchers.base import RankProcess
from epruntime.launchers.caller_thread import CallerThread
from epruntime.launchers.cores import thread_environment
from epruntime.launchers.ray_seats import local_device_index

_TAIL_BYTES, _TAIL_LINES = 8192, 20

#: seconds that Ray gets to kill an actor, to tell why one died, and to end a process whose actor has; and between two
#: looks whether it calls one dead.
_RAY_KILL_S, _RAY_NEWS_S, _RAY_FAREWELL_S, _RAY_LOOK_S = 2.0, 1.0, 0.1, 0.3

#: Environment of an actor that has a GPU. By default Ray lets an actor see nothing but its own GPU, as device 0. NCCL
#: does not bear processes of one host that number its GPUs differently: the first collective of Ray workers took
#: seconds (NVIDIA/nccl#1749), and all-gather over NVLink SHARP returned ranks in the wrong order (NVIDIA/nccl#1906),
#: which is silent corruption. So every rank sees all GPUs of its node, in one order, and is told which one is its own
#: (RankBootstrap.device_index, which it passes to torch.cuda.set_device).
GPU_ENVIRONMENT = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}


@dataclass(frozen=True, kw_only=True)
class ActorPlace:
    """Where an actor runs.

    Attributes:
        pid, host, node_id: its process and node. log: file on that node that its output goes to.
        device_index: of its GPU among those that the process sees; 0 without one.
    """

    pid: int
    host: str
    node_id: str
    log: str
    device_index: int = 0


class RankActor:
    """What runs in the actor's process."""

    def __init__(self, slot: int, threads: int) -> None:
        self._slot = slot
        # Before anything imports a library that makes a thread pool.
        os.environ.update(thread_environment(threads))
        os.dup2(2, 1)  # one stream, so that its last words are in one file, in order

    def __repr__(self) -> str:
        return f"rank {self._slot}"  # Ray puts this in front of the actor's output

    def where(self) -> ActorPlace:
        """Raises ValueError: Ray gave it a GPU that it cannot see."""
        context = ray.get_runtime_context()
        gpus = context.get_accelerator_ids().get("GPU", [])
        return ActorPlace(
            pid=os.getpid(),
            host=socket.gethostname(),
            node_id=context.get_node_id(),
            log=str(Path("/proc/self/fd/2").readlink()),
            device_index=local_device_index(gpus[0], os.environ.get("CUDA_VISIBLE_DEVICES")) if gpus else 0,
        )

    def run(self, entry: str, bootstrap: bytes) -> None:
        """Is a rank until the coordinator ends it, and then ends the process.

        `entry`: "module:function", called with the bootstrap.
        """
        module, _, function = entry.partition(":")
        code = getattr(importlib.import_module(module), function)(RankBootstrap.from_bytes(bootstrap))
        if code == EXIT_ORPHANED:
            # A private cluster has died with the coordinator, and leaving in order would wait for it. Ray itself may
            # not notice: where orphans go to a subreaper, a worker's parent is never process 1.
            os._exit(code)
        ray.actor.exit_actor()


class RayProcess(RankProcess):
    """A rank that is a Ray actor.

    Args:
        place: where it runs; here: whether that is this node.
        run: the call that ends with the rank.
    """

    def __init__(self, thread: CallerThread, actor: Any, place: ActorPlace, run: Future[Any], *, here: bool) -> None:
        self._thread, self._place, self._here = thread, place, here
        self.actor, self.host = actor, place.host
        self._loop = asyncio.get_running_loop()
        self.exited = self._loop.create_future()
        self._how = ""
        self._killing: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        # Tells for certain that the process is gone; Ray calls an actor dead when it has sent off the order to kill it.
        self._pidfd = _pidfd(place.pid) if here else -1
        if self._pidfd >= 0:
            self._loop.add_reader(self._pidfd, self._process_gone)
        run.add_done_callback(self._run_ended)

    def output_tail(self) -> list[str]:
        place = self._place
        if not self._here:
            return [f"(in {place.log} on {place.host}; `ray logs {Path(place.log).name}` on that host shows them)"]
        try:
            with Path(place.log).open("rb") as file:
                file.seek(max(0, Path(place.log).stat().st_size - _TAIL_BYTES))
                lines = file.read().decode(errors="replace").splitlines()
        except OSError:
            return []
        # Ray's own markers begin with ":"
        return [line for line in lines if line.strip() and not line.startswith(":")][-_TAIL_LINES:]

    def terminate(self) -> None:
        self.kill()  # asking was the control channel's part; Ray has no gentler way

    def kill(self) -> None:
        if not self.exited.done() and self._killing is None:
            self._killing = self._loop.create_task(self._kill())

    async def _kill(self) -> None:
        self._kill_process()  # at once where it can be; Ray takes its time with one that does not answer
        await self._thread.run(lambda: kill_actor(self.actor))
        await asyncio.wait([self.exited], timeout=_RAY_KILL_S)
        self._kill_process()

    def _kill_process(self) -> None:
        if self._pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def _run_ended(self, run: Future[Any]) -> None:
        """Called in one of Ray's threads when the actor's `run` has raised, or died with its process."""
        error = run.exception()
        if isinstance(error, ray.exceptions.ActorUnavailableError):
            how, alive = f"Ray cannot reach its actor: {_first_sentence(error)}", True
        elif isinstance(error, ray.exceptions.RayActorError):
            how, alive = _death(error), False
        else:
            how, alive = f"it raised {error}", True
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(self._rank_ended, how, alive)

    def _rank_ended(self, how: str, alive: bool) -> None:
        self._how = how
        if alive:
            self.kill()
            if self._pidfd < 0:
                self._watching = self._loop.create_task(self._watch())
        elif self._pidfd >= 0:
            # The rank has returned, or is dead. What remains, if anything, is Ray's own farewell: seconds of it.
            self._loop.call_later(_RAY_FAREWELL_S, self._kill_process)
        else:
            self._ended()

    async def _watch(self) -> None:
        """Waits until Ray calls the actor dead, whose `run` has ended while it was not."""
        while not self.exited.done():
            try:
                await asyncio.wrap_future(self.actor.where.remote().future())
            except ray.exceptions.ActorUnavailableError:
                await asyncio.sleep(_RAY_LOOK_S)
            except ray.exceptions.RayError:
                self._ended()
            else:
                await asyncio.sleep(_RAY_LOOK_S)

    def _process_gone(self) -> None:
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._pidfd = -1
        if self._how:
            self._ended()
        else:  # Ray's account of it is on its way
            self._loop.call_later(_RAY_NEWS_S, self._ended)

    def _ended(self) -> None:
        if not self.exited.done():
            self.exited.set_result(self._how or "its process ended")


def kill_actor(actor: Any) -> None:
    """Has Ray kill it. Blocking."""
    with contextlib.suppress(ray.exceptions.RayError):  # the cluster is gone, and the actor with it
        ray.kill(actor, no_restart=True)


def _pidfd(pid: int) -> int:
    """A handle of the process; -1 where there are none, or it is gone."""
    try:
        return os.pidfd_open(pid) if hasattr(os, "pidfd_open") else -1
    except ProcessLookupError:
        return -1


def _first_sentence(error: BaseException) -> str:
    """What went wrong, out of "The actor ... is unavailable: what. The task may or may not have been executed ..."."""
    return str(error).partition("is unavailable: ")[2].partition(" The task may")[0].strip() or str(error)


def _death(error: BaseException) -> str:
    """The telling part of Ray's page-long account of a dead actor."""
    text = str(error)
    for marker in ("Worker exit detail: ", "The actor is dead because "):
        _, found, rest = text.partition(marker)
        if found:
            return "its actor died: " + rest.split(" Some common causes")[0].strip()
    return "its actor died: " + text.strip()
