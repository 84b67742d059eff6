"""RayLauncher: ranks as Ray actors, one per bundle of a placement group.

join a cluster (ray_cluster) -> placement group (ray_group) -> seats in node order (ray_seats) -> one actor per seat
(ray_actor) -> actor.run

The actor's `run` is the rank: it serves until the coordinator ends it. Ray places ranks and reports their end; all
other traffic takes the control channel. Ray is imported in these files only.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import tempfile
import time
from functools import partial
from typing import Any

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from epruntime.comm.control import RankBootstrap
from epruntime.comm.interfaces import coordinator_address
from epruntime.errors import ConfigError, LaunchError
from epruntime.launchers import ray_cluster
from epruntime.launchers.base import Launcher, Seat
from epruntime.launchers.caller_thread import CallerThread
from epruntime.launchers.cores import threads_each, usable_cores
from epruntime.launchers.ray_actor import GPU_ENVIRONMENT, ActorPlace, RankActor, RayProcess, kill_actor
from epruntime.launchers.ray_environment import auth_hint
from epruntime.launchers.ray_group import RayGroup
from epruntime.launchers.ray_seats import PlacedSeat, seats_in_node_order

logger = logging.getLogger("epruntime.launchers.ray")

WORKER_ENTRY = "epruntime.worker.main:run_rank"

#: seconds that Ray gets to leave.
_RAY_LEAVE_S = 60.0


class RayLauncher(Launcher):
    """Ranks on a Ray cluster.

    Args:
        address: an existing cluster ("auto", "host:port"); None starts a private one on this machine, unless this
            process is connected to one already, which is then used.
        device: "cpu": each rank takes CPUs, as many as its threads; "cuda": each takes one GPU.
        entry: "module:function" that an actor runs with its bootstrap.
        placement_group: of the caller, for the ranks; stays as it was. None makes one.

    Raises:
        ConfigError: an address or a group that cannot work.
    """

    name = "ray"

    def __init__(
        self,
        *,
        address: str | None = None,
        device: str = "cpu",
        entry: str = WORKER_ENTRY,
        placement_group: Any = None,
    ) -> None:
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
        self._group = RayGroup(self._thread, device=device, given=placement_group)
        self._placed: list[PlacedSeat] = []
        self._processes: list[RayProcess] = []
        self._devices: dict[int, tuple[str, int]] = {}
        self._control_host: str | None = None

    async def place(self, num_ranks: int, *, threads_per_rank: int | None, timeout_s: float) -> list[Seat]:
        began = time.monotonic()
        if not ray.is_initialized():
            await self._connect(num_ranks, threads_per_rank, timeout_s)
        elif self._address is not None:
            logger.info("this process is connected to a Ray cluster already; ray_address=%r is not used", self._address)
        await self._group.reserve(num_ranks, threads_per_rank=threads_per_rank, timeout_s=timeout_s, began=began)
        return await self._thread.run(self._seats)

    @property
    def control_host(self) -> str | None:
        return self._control_host

    async def spawn(self, bootstrap: RankBootstrap) -> RayProcess:
        slot, seat = bootstrap.slot, self._placed[bootstrap.slot].seat
        actor = await self._thread.run(lambda: self._make_actor(self._placed[slot]))
        try:
            place: ActorPlace = await asyncio.wait_for(
                asyncio.wrap_future(actor.where.remote().future()), bootstrap.connect_timeout_s
            )
            self._check_device(slot, place)
        except (ray.exceptions.RayError, TimeoutError) as error:
            text = await self._thread.run(partial(self._why_not_started, self._placed[slot], error))
            await self._thread.run(lambda: kill_actor(actor))
            raise LaunchError(f"rank {slot} could not be started on host {seat.host}: {text}") from error
        except BaseException:
            await self._thread.run(lambda: kill_actor(actor))
            raise
        # It may be elsewhere than its seat says: Ray moves a bundle whose node has died.
        letter = dataclasses.replace(bootstrap, host=place.host, device_index=place.device_index)
        here = place.node_id == ray.get_runtime_context().get_node_id()
        run = actor.run.remote(self._entry, letter.to_bytes()).future()
        process = RayProcess(self._thread, actor, place, run, here=here)
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

    async def _connect(self, num_ranks: int, threads_per_rank: int | None, timeout_s: float) -> None:
        if self._group.group is not None:
            raise ConfigError("placement_group: this process is not connected to Ray; call ray.init first")
        work = self._start_private(num_ranks, threads_per_rank) if self._address is None else self._join(self._address)
        self._connecting = asyncio.get_running_loop().create_task(work)
        done, _ = await asyncio.wait([self._connecting], timeout=timeout_s)
        if not done:
            raise LaunchError(f"Ray did not answer within {timeout_s:g} s. {auth_hint()}")
        self._connecting.result()

    async def _join(self, address: str) -> None:
        found = await asyncio.to_thread(ray_cluster.find, address)

        def connect() -> None:
            ray_cluster.join(found)
            self._connected = True
            if self._abandoned:
                self._undo()

        await self._thread.run(connect)

    async def _start_private(self, num_ranks: int, threads_per_rank: int | None) -> None:
        cores = usable_cores()
        threads = threads_per_rank or threads_each(cores, num_ranks)

        def start() -> None:
            self._home = ray_cluster.start_private(max(cores, num_ranks * threads))  # cores are shared if need be
            self._connected = True

        await self._thread.run(start)

    # placing

    def _seats(self) -> list[Seat]:
        group, home = self._group, ray.get_runtime_context().get_node_id()
        nodes = ray_cluster.alive_nodes()
        self._placed = seats_in_node_order(group.taken, nodes, first_node=home, threads=group.threads)
        if any(node_id != home for _, node_id in group.taken):
            self._control_host = coordinator_address([ray.util.get_node_ip_address()]).address
        return [placed.seat for placed in self._placed]

    def _make_actor(self, placed: PlacedSeat) -> Any:
        strategy = PlacementGroupSchedulingStrategy(
            placement_group=self._group.group, placement_group_bundle_index=placed.bundle
        )
        options: dict[str, Any] = {"num_cpus": placed.seat.threads}
        if self._device == "cuda":
            options = {"num_gpus": 1, "num_cpus": 0, "runtime_env": {"env_vars": GPU_ENVIRONMENT}}
        remote = ray.remote(RankActor).options(
            **options, scheduling_strategy=strategy, max_restarts=0, max_task_retries=0
        )
        return remote.remote(placed.seat.slot, placed.seat.threads)

    def _check_device(self, slot: int, place: ActorPlace) -> None:
        """No two ranks on one GPU: on a node that was started under a scheduler's own masks they would share its
        memory without a word."""
        if self._device != "cuda":
            return
        self._devices[slot] = mine = (place.node_id, place.device_index)
        others = [other for other, device in self._devices.items() if device == mine and other != slot]
        if others:
            raise LaunchError(
                f"ranks {others[0]} and {slot} would share GPU {place.device_index} of {place.host}: look at that "
                "node's CUDA_VISIBLE_DEVICES and `ray start --num-gpus`"
            )

    def _why_not_started(self, placed: PlacedSeat, error: BaseException) -> str:
        """What keeps an actor from starting, in words."""
        alive = {node.node_id for node in ray_cluster.alive_nodes()}
        if self._group.node_of(placed.bundle) not in alive:
            need = " and ".join(f"{amount:g} {name}" for name, amount in self._group.need.items())
            return (
                f"that host has left the Ray cluster, and no other has room for {need} (bundle {placed.bundle} of its "
                "placement group waits). Start the node again, or add one"
            )
        if isinstance(error, TimeoutError):
            return (
                "Ray has not started its process in time. `ray list actors` on a node shows what it waits for; "
                "start_timeout_s is how long it may take"
            )
        return (
            f"{type(error).__name__}: {error}\nEvery node needs the same epruntime installed, or a job's --working-dir "
            "that brings it."
        )

    def _undo(self) -> None:
        """Gives everything back. Runs in the Ray thread."""
        try:
            if ray.is_initialized():
                for process in self._processes:
                    kill_actor(process.actor)
                self._group.release()
                if self._connected:
                    ray.shutdown()
                if self._home is not None:
                    ray_cluster.forget_token()
        finally:
            self._connected = False
            self._processes.clear()
            if self._home is not None:
                self._home.cleanup()
                self._home = None
