"""torchrun: ranks on the workers that torchrun starts, one host or many.

torchrun -> agent per host -> supervisor per worker (torchrun_supervisor), worker 0's also starts the coordinator
coordinator: SupervisorHub (torchrun_hub) -> the program's main -> LLM(launcher="torchrun") -> TorchrunLauncher

A program for torchrun, of which only the coordinator runs `main`:

    from epruntime.launchers.torchrun import num_workers, run_coordinator

    def main():
        with LLM("path/to/model", launcher="torchrun", expert_parallel_size=num_workers()) as llm:
            ...

    if __name__ == "__main__":
        run_coordinator(main)
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import dataclasses
import logging
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import NoReturn

from epruntime.comm.control import RankBootstrap
from epruntime.comm.lifeline import die_with_parent
from epruntime.errors import ConfigError, LaunchError
from epruntime.launchers import torchrun_cause
from epruntime.launchers.base import Launcher, RankProcess, Seat
from epruntime.launchers.torchrun_environment import CoordinatorLetter, TorchrunWorker, take_job_secret
from epruntime.launchers.torchrun_hub import Link, Order, SupervisorHub, set_hub, this_hub
from epruntime.launchers.torchrun_supervisor import supervise

logger = logging.getLogger("epruntime.launchers.torchrun")

__all__ = ["TorchrunLauncher", "num_workers", "run_coordinator"]


def run_coordinator(main: Callable[[], int | None]) -> NoReturn:
    """Ends this process, one of torchrun's workers, when the job has ended, with the job's exit code.

    `main` is called in one process of the job only, the coordinator, which worker 0 starts by running this program
    once more. What comes before this call runs in every worker: leave heavy imports to `main`.

    Args:
        main: the program; returns its exit code, None for 0.

    Raises:
        SystemExit: always, unless `main` raises something else.
        ConfigError: this process was not started by torchrun.
    """
    letter = CoordinatorLetter.take(os.environ)
    if letter is not None:
        sys.exit(_coordinate(letter, main))
    worker = TorchrunWorker.of(os.environ)
    if worker is None:
        raise ConfigError(
            "this program is started by torchrun, with one worker per rank, for example: torchrun --standalone "
            f"--nproc-per-node 2 {' '.join(sys.orig_argv[1:])}"
        )
    if multiprocessing.parent_process() is not None:
        raise ConfigError("torchrun --run-path runs programs inside a process of its own: leave it out")
    sys.exit(supervise(worker))


def num_workers() -> int:
    """Workers that torchrun has started, on all hosts: the most ranks there can be.

    Raises:
        ConfigError: this process is not the coordinator.
    """
    return this_hub().worker.world_size


def _coordinate(letter: CoordinatorLetter, main: Callable[[], int | None]) -> int:
    die_with_parent(letter.parent_pid)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _terminated)  # so that `with` blocks and exit functions run
    hub = SupervisorHub(letter.worker, job_secret=take_job_secret(os.environ))
    hub.exit_code, words = 1, ""
    remembering = torchrun_cause.RememberingStream(sys.stderr)
    sys.stderr = remembering
    atexit.register(hub.close)  # first, so that it runs last: what `main` left open is closed through it
    hub.start()
    set_hub(hub)

    def tell_why() -> None:
        if hub.exit_code:
            hub.cause = words or remembering.cause()
            torchrun_cause.leave(letter.worker.error_file, hub.cause)

    atexit.register(tell_why)  # after whatever Python prints of an exception, and before the hub's own end
    try:
        hub.exit_code = main() or 0
    except SystemExit as leaving:
        hub.exit_code, words = torchrun_cause.of_exit(leaving)
        raise
    except KeyboardInterrupt:
        hub.exit_code = 128 + signal.SIGINT
        raise
    return hub.exit_code


def _terminated(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


class TorchrunProcess(RankProcess):
    """A rank that a supervisor has started."""

    def __init__(self, hub: SupervisorHub, order: Order) -> None:
        self._hub, self._order = hub, order
        self.host = order.link.host
        self._loop = asyncio.get_running_loop()
        self.exited = self._loop.create_future()
        hub.call_soon(order.exited.add_done_callback, self._exited)

    def output_tail(self) -> list[str]:
        return list(self._order.tail)

    def terminate(self) -> None:
        self._tell("terminate")

    def kill(self) -> None:
        self._tell("kill")

    def _tell(self, what: str) -> None:
        self._hub.call_soon(self._order.link.tell, {"type": what, "id": self._order.number})

    def _exited(self, done: asyncio.Future[str]) -> None:
        """On the hub's loop."""
        how = done.result()

        def tell() -> None:
            if not self.exited.done():
                self.exited.set_result(how)

        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(tell)


class TorchrunLauncher(Launcher):
    """Ranks on torchrun's workers: the first of them in host order, of which further ones are spare.

    Raises:
        ConfigError: this process is not a coordinator under torchrun.
    """

    name = "torchrun"

    def __init__(self) -> None:
        self._hub = this_hub()
        self._links: list[Link] = []

    async def place(self, num_ranks: int, *, threads_per_rank: int | None, timeout_s: float) -> list[Seat]:
        self._links = await self._hub.call(self._hub.seats(num_ranks, timeout_s))
        threads = [threads_per_rank or _share(link, self._links) for link in self._links]
        return [
            Seat(slot=slot, host=link.host, local_rank=link.local_rank, threads=threads[slot])
            for slot, link in enumerate(self._links)
        ]

    @property
    def control_host(self) -> str | None:
        home = self._hub.worker.group_rank
        return None if all(link.group == home for link in self._links) else self._hub.host

    async def spawn(self, bootstrap: RankBootstrap) -> TorchrunProcess:
        link = self._links[bootstrap.slot]
        if link.gone:
            same_host = self.control_host is None
            link = self._links[bootstrap.slot] = await self._hub.call(self._hub.spare(link, same_host=same_host))
            logger.warning("rank %d moves to %s", bootstrap.slot, link)
        letter = dataclasses.replace(bootstrap, host=link.host, local_rank=link.local_rank)
        order = await self._hub.call(self._hub.spawn(link, letter))
        try:
            await asyncio.wait_for(self._hub.call(_result(order.spawned)), bootstrap.connect_timeout_s)
        except TimeoutError as error:
            self._hub.call_soon(link.tell, {"type": "kill", "id": order.number})
            raise LaunchError(
                f"{link} did not start rank {bootstrap.slot} within {bootstrap.connect_timeout_s:g} s"
            ) from error
        except asyncio.CancelledError:
            self._hub.call_soon(link.tell, {"type": "kill", "id": order.number})
            raise
        return TorchrunProcess(self._hub, order)

    async def release(self) -> None:
        links, self._links = self._links, []
        with contextlib.suppress(LaunchError):  # the job has ended: they are nobody's any more
            await self._hub.call(self._hub.give_back(links))


async def _result(future: asyncio.Future[None]) -> None:
    await asyncio.shield(future)


def _share(link: Link, links: list[Link]) -> int:
    """Threads of a rank: its part of the cores that the workers of its host may use together, and no more than its own.

    (torchrun --numa-binding gives workers cores of their own.)
    """
    neighbours = [other for other in links if other.group == link.group]
    together = len(frozenset[int]().union(*(other.affinity for other in neighbours))) or link.cores
    # a quota holds for all of a container, that is, for all workers of the host
    total = together if any(other.affinity != link.affinity for other in neighbours) else min(together, link.cores)
    return max(1, min(link.cores, total // len(neighbours)))
