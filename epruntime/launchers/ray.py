"""RayLauncher: ranks as Ray actors, one per bundle of a placement group. The only file that imports Ray.

connect (or start a private cluster) -> placement group -> seats in node order -> one actor per seat -> actor.run

The actor's `run` is the rank: it serves until the coordinator ends it. Ray places ranks and reports their end; all
other traffic takes the control channel.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import os
import signal
import tempfile
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import ray
from ray._private import ray_constants
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from epruntime.comm.control import RankBootstrap
from epruntime.errors import ConfigError, LaunchError
from epruntime.launchers.base import Launcher, RankProcess, Seat
from epruntime.launchers.caller_thread import CallerThread
from epruntime.launchers.cores import thread_environment, threads_each, usable_cores
from epruntime.launchers.ray_environment import own_sigterm, private_environment, probe
from epruntime.launchers.ray_seats import Node, PlacedSeat, no_room_text, seats_in_node_order, threads_that_fit

logger = logging.getLogger("epruntime.launchers.ray")

WORKER_ENTRY = "epruntime.worker.main:run_rank"

#: bytes of the private cluster's object store; rows never pass through it, and Ray takes no less.
_OBJECT_STORE_BYTES = 80 * 2**20

_LOOPBACK = "127.0.0.1"
_TAIL_BYTES, _TAIL_LINES = 8192, 20

#: seconds that Ray gets to kill an actor, to tell why one died, to end a process whose actor has, and to leave.
_RAY_KILL_S, _RAY_NEWS_S, _RAY_FAREWELL_S, _RAY_LEAVE_S = 2.0, 1.0, 0.1, 60.0

#: seconds of waiting for room before a warning says what is waited for.
_WARN_AFTER_S = 3.0

_AUTH_HINT = (
    "If the cluster uses token authentication, this process needs RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH (a file "
    "that holds the cluster's token) in its environment before it starts."
)


class RankActor:
    """What runs in the actor's process."""

    def __init__(self, slot: int, threads: int) -> None:
        self._slot = slot
        # Before anything imports a library that makes a thread pool.
        os.environ.update(thread_environment(threads))
        os.dup2(2, 1)  # one stream, so that its last words are in one file, in order

    def __repr__(self) -> str:
        return f"rank {self._slot}"  # Ray puts this in front of the actor's output

    def where(self) -> tuple[int, str]:
        """This process's pid, and the file its output goes to."""
        return os.getpid(), str(Path("/proc/self/fd/2").readlink())

    def run(self, entry: str, bootstrap: bytes) -> None:
        """Is a rank until the coordinator ends it, and then ends the process.

        `entry`: "module:function", called with the bootstrap.
        """
        module, _, function = entry.partition(":")
        getattr(importlib.import_module(module), function)(RankBootstrap.from_bytes(bootstrap))
        ray.actor.exit_actor()


class RayProcess(RankProcess):
    """A rank that is a Ray actor.

    Args:
        run: the call that ends with the rank.
        pidfd: handle of the actor's process if it is on this machine, else -1. It tells for certain that the process
            is gone; Ray calls an actor dead when it has sent off the order to kill it.
        log: the file with its output, if this machine can read it.
    """

    def __init__(self, thread: CallerThread, actor: Any, run: Future[Any], *, pidfd: int, log: Path | None) -> None:
        self._thread, self._pidfd, self._log = thread, pidfd, log
        self.actor = actor
        self._loop = asyncio.get_running_loop()
        self.exited = self._loop.create_future()
        self._how = ""
        self._killing: asyncio.Task[None] | None = None
        if pidfd >= 0:
            self._loop.add_reader(pidfd, self._process_gone)
        run.add_done_callback(self._run_ended)

    def output_tail(self) -> list[str]:
        if self._log is None:
            return []
        try:
            with self._log.open("rb") as file:
                file.seek(max(0, self._log.stat().st_size - _TAIL_BYTES))
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
        await self._thread.run(lambda: _kill_actor(self.actor))
        await asyncio.wait([self.exited], timeout=_RAY_KILL_S)
        self._kill_process()

    def _kill_process(self) -> None:
        if self._pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def _run_ended(self, run: Future[Any]) -> None:
        """Called in one of Ray's threads when the actor's `run` has raised, or died with its process."""
        error = run.exception()
        if isinstance(error, ray.exceptions.RayActorError):
            how, alive = _death(error), False
        else:
            how, alive = f"it raised {error}", True
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(self._rank_ended, how, alive)

    def _rank_ended(self, how: str, alive: bool) -> None:
        self._how = how
        if alive:
            self.kill()
        elif self._pidfd >= 0:
            # The rank has returned, or is dead. What remains, if anything, is Ray's own farewell: seconds of it.
            self._loop.call_later(_RAY_FAREWELL_S, self._kill_process)
        if self._pidfd < 0:
            self._ended()

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


class RayLauncher(Launcher):
    """Ranks on a Ray cluster.

    Args:
        address: an existing cluster ("auto", "host:port"); None starts a private one on this machine, unless this
            process is connected to one already, which is then used.
        device: "cpu": each rank takes CPUs, as many as its threads; "cuda": each takes one GPU.
        entry: "module:function" that an actor runs with its bootstrap.
    """

    name = "ray"

    def __init__(self, *, address: str | None = None, device: str = "cpu", entry: str = WORKER_ENTRY) -> None:
        if address is not None and address.startswith("ray://"):
            raise ConfigError(
                f"ray_address={address!r}: Ray Client puts the coordinator outside the cluster, where ranks cannot "
                "reach it. Run it in the cluster (ray job submit ...), with ray_address='auto'"
            )
        self._address, self._device, self._entry = address, device, entry
        # Ray ends a private cluster with the thread that started it (parent-death signal).
        self._thread = CallerThread("epruntime-ray")
        self._connected = False  # by this launcher
        self._abandoned = False
        self._connecting: asyncio.Task[None] | None = None
        self._home: tempfile.TemporaryDirectory[str] | None = None
        self._group: PlacementGroup | None = None
        self._placed: list[PlacedSeat] = []
        self._processes: list[RayProcess] = []
        self._control_host: str | None = None

    async def place(self, num_ranks: int, *, threads_per_rank: int | None, timeout_s: float) -> list[Seat]:
        deadline = time.monotonic() + timeout_s
        loop = asyncio.get_running_loop()
        if not ray.is_initialized():
            self._connecting = loop.create_task(
                self._start_private(num_ranks, threads_per_rank)
                if self._address is None
                else self._connect(self._address)
            )
            done, _ = await asyncio.wait([self._connecting], timeout=timeout_s)
            if not done:
                raise LaunchError(f"Ray did not answer within {timeout_s:g} s. {_AUTH_HINT}")
            self._connecting.result()
        elif self._address is not None:
            logger.info("this process is connected to a Ray cluster already; ray_address=%r is not used", self._address)
        nodes = await self._thread.run(_alive_nodes)
        if self._device == "cuda":
            threads, bundle = threads_per_rank or 1, {"GPU": 1.0}
        else:
            free = [(node.free or node.total).get("CPU", 0.0) for node in nodes]
            threads = threads_per_rank or threads_that_fit(free, num_ranks)
            bundle = {"CPU": float(threads)}
        await self._reserve(num_ranks, bundle, deadline, timeout_s)
        return await self._thread.run(lambda: self._seats(threads))

    @property
    def control_host(self) -> str | None:
        return self._control_host

    async def spawn(self, bootstrap: RankBootstrap) -> RayProcess:
        placed = self._placed[bootstrap.slot]
        actor = await self._thread.run(lambda: self._make_actor(placed))
        try:
            pid, log = await asyncio.wait_for(
                asyncio.wrap_future(actor.where.remote().future()), bootstrap.connect_timeout_s
            )
        except (ray.exceptions.RayError, TimeoutError) as error:
            await self._thread.run(lambda: _kill_actor(actor))
            raise LaunchError(
                f"rank {bootstrap.slot} could not be started on host {placed.seat.host}: {type(error).__name__}: "
                f"{error}\nEvery node needs the same epruntime installed, or a job's --working-dir that brings it."
            ) from error
        except asyncio.CancelledError:
            await self._thread.run(lambda: _kill_actor(actor))
            raise
        here = placed.node_id == ray.get_runtime_context().get_node_id()
        pidfd = os.pidfd_open(pid) if here and hasattr(os, "pidfd_open") else -1
        run = actor.run.remote(self._entry, bootstrap.to_bytes()).future()
        process = RayProcess(self._thread, actor, run, pidfd=pidfd, log=Path(log) if here else None)
        self._processes.append(process)
        return process

    async def release(self) -> None:
        if self._connecting is not None and not self._connecting.done():
            self._connecting.cancel()
            if self._address is not None:
                # Nothing can interrupt Ray's attempt. It goes on in its thread, and undoes itself should it succeed.
                self._abandoned = True
                return
        try:
            await asyncio.wait_for(self._thread.run(self._undo), _RAY_LEAVE_S)
        except TimeoutError:
            logger.error("Ray did not give its resources back within %g s", _RAY_LEAVE_S)

    # connecting

    async def _connect(self, address: str) -> None:
        await asyncio.to_thread(probe, address)

        def connect() -> None:
            try:
                with own_sigterm():
                    ray.init(address=address, logging_level=logging.ERROR, log_to_driver=_wants_output())
            except (Exception, SystemExit) as error:  # Ray's core ends the process by SystemExit
                raise LaunchError(
                    f"no Ray cluster could be joined at ray_address={address!r}: {error}. {_AUTH_HINT}"
                ) from error
            self._connected = True
            if self._abandoned:
                self._undo()

        await self._thread.run(connect)

    async def _start_private(self, num_ranks: int, threads_per_rank: int | None) -> None:
        cores = usable_cores()
        threads = threads_per_rank or threads_each(cores, num_ranks)

        def start() -> None:
            # Mode 0700: Ray opens its own directory to everybody.
            self._home = tempfile.TemporaryDirectory(prefix="epruntime-", ignore_cleanup_errors=True)
            try:
                with private_environment(ray_constants), own_sigterm():
                    ray.init(
                        address="local",
                        num_cpus=max(cores, num_ranks * threads),  # its own accounting; cores are shared if need be
                        include_dashboard=False,
                        object_store_memory=_OBJECT_STORE_BYTES,
                        logging_level=logging.ERROR,
                        log_to_driver=_wants_output(),
                        _temp_dir=str(Path(self._home.name) / "ray"),
                        _node_ip_address=_LOOPBACK,
                    )
            except (Exception, SystemExit) as error:
                raise LaunchError(f"Ray could not be started on this machine: {error}") from error
            self._connected = True

        await self._thread.run(start)

    # placing

    async def _reserve(self, num_ranks: int, bundle: dict[str, float], deadline: float, timeout_s: float) -> None:
        group = await self._thread.run(lambda: placement_group([dict(bundle)] * num_ranks, strategy="PACK"))
        self._group, began, warned = group, time.monotonic(), False
        while not await self._thread.run(lambda: group.wait(0.3)):
            now = time.monotonic()
            text = no_room_text(num_ranks, bundle, await self._thread.run(_alive_nodes), timeout_s)
            if now >= deadline:
                raise LaunchError(text)
            if not warned and now > began + _WARN_AFTER_S:
                logger.warning("still waiting. %s", text)
                warned = True

    def _seats(self, threads: int) -> list[Seat]:
        bundle_nodes: dict[int, str] = placement_group_table(self._group)["bundles_to_node_id"]
        home = ray.get_runtime_context().get_node_id()
        self._placed = seats_in_node_order(bundle_nodes, _alive_nodes(), first_node=home, threads=threads)
        if any(node_id != home for node_id in bundle_nodes.values()):
            self._control_host = ray.util.get_node_ip_address()
        return [placed.seat for placed in self._placed]

    def _make_actor(self, placed: PlacedSeat) -> Any:
        assert self._group is not None
        resources = {"num_gpus": 1, "num_cpus": 0} if self._device == "cuda" else {"num_cpus": placed.seat.threads}
        strategy = PlacementGroupSchedulingStrategy(
            placement_group=self._group, placement_group_bundle_index=placed.bundle
        )
        remote = ray.remote(RankActor).options(
            **resources, scheduling_strategy=strategy, max_restarts=0, max_task_retries=0
        )
        return remote.remote(placed.seat.slot, placed.seat.threads)

    def _undo(self) -> None:
        """Gives everything back. Runs in the Ray thread."""
        try:
            if ray.is_initialized():
                for process in self._processes:
                    _kill_actor(process.actor)
                if self._group is not None:
                    remove_placement_group(self._group)
                if self._connected:
                    ray.shutdown()
        finally:
            self._connected, self._group = False, None
            self._processes.clear()
            if self._home is not None:
                self._home.cleanup()
                self._home = None


def _alive_nodes() -> list[Node]:
    free = ray._private.state.available_resources_per_node()
    return [
        Node(
            node_id=node["NodeID"],
            host=node["NodeManagerHostname"],
            address=node["NodeManagerAddress"],
            total=node["Resources"],
            free=free.get(node["NodeID"]),
        )
        for node in ray.nodes()
        if node["Alive"]
    ]


def _wants_output() -> bool:
    """Ray prints the ranks' output on this process's standard error; only where information is wanted."""
    return logging.getLogger("epruntime").isEnabledFor(logging.INFO)


def _kill_actor(actor: Any) -> None:
    with contextlib.suppress(ray.exceptions.RayError):  # the cluster is gone, and the actor with it
        ray.kill(actor, no_restart=True)


def _death(error: BaseException) -> str:
    """The telling part of Ray's page-long account of a dead actor."""
    text = str(error)
    for marker in ("Worker exit detail: ", "The actor is dead because "):
        _, found, rest = text.partition(marker)
        if found:
            return "its actor died: " + rest.split(" Some common causes")[0].strip()
    return "its actor died: " + text.strip()
