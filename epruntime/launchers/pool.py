"""RankPool: ranks that are up and have proved themselves, whatever launched them.

start: launcher.place -> listen -> spawn -> ranks join -> stop listening          stop: ask, terminate, kill, confirm
watch: process ends | connection ends | condemned (no heartbeats, stuck) -> kill -> confirmed dead -> lost -> replace

A pool outlives models and generations; engines configure it, load, unload, and configure it again.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import logging
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from epruntime.comm import auth
from epruntime.comm.control import Connection, ControlServer, RankBootstrap, RankInfo
from epruntime.errors import (
    ConfigError,
    EngineDeadError,
    HandshakeError,
    LaunchError,
    RankLostError,
)
from epruntime.launchers.base import Launcher
from epruntime.launchers.clock import TICK_S, LoopClock
from epruntime.launchers.door import Door
from epruntime.launchers.handle import RankHandle
from epruntime.launchers.rank_end import KILL_S, RankEnd, end_of, first_sign, said, stop_rank, without_words
from epruntime.launchers.store import host_store
from epruntime.words import counted

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

logger = logging.getLogger("epruntime.launchers.pool")

__all__ = ["RankHandle", "RankPool"]

LOOPBACK = "127.0.0.1"

#: seconds added to start_timeout_s before the pool gives up by itself.
_PLACE_GRACE_S = 1.0


class RankPool:
    """A set of ranks. Make it with `RankPool.start`; it belongs to the asyncio loop it was started on.

    Attributes:
        ranks: handles in slot order; a replaced rank has a new one.
        heartbeat_timeout_s: seconds of silence after which a rank is killed as lost.
    """

    def __init__(self, launcher: Launcher, *, device: str = "cpu") -> None:
        self.ranks: list[RankHandle] = []
        self.heartbeat_timeout_s = 10.0
        self._launcher, self._device = launcher, device
        self._loop = asyncio.get_running_loop()
        self._secret = auth.new_secret()
        self._server = ControlServer(
            self._secret, on_join=self._on_join, on_beats=self._on_beats, on_refused=self._on_refused
        )
        self._door: Door | None = None
        self._clock = LoopClock()
        # Held here and nowhere else: the store ends when this lets go of it.
        self._store: asyncio.Future[tuple[TCPStore, int]] | None = None
        self._store_address = ("", 0)
        self._generations = itertools.count()
        self._lost_callbacks: list[Callable[[RankLostError], None]] = []
        self._spawning: set[asyncio.Task[None]] = set()
        self._watching: set[asyncio.Task[None]] = set()
        self._stop_task: asyncio.Task[None] | None = None

    @classmethod
    async def start(
        cls,
        num_ranks: int,
        *,
        launcher: str | Launcher = "local",
        ray_address: str | None = None,
        placement_group: object | None = None,
        threads_per_rank: int | None = None,
        start_timeout_s: float = 120.0,
        heartbeat_timeout_s: float = 10.0,
        device: str = "cpu",
    ) -> RankPool:
        """Starts `num_ranks` ranks and waits until all have joined. On any failure, also when it is cancelled,
        everything that was started is stopped first.

        Args:
            launcher: "local", "ray", "torchrun" (in a coordinator under torchrun), or a launcher object.
            ray_address: with "ray", an existing cluster; None starts one on this machine.
            placement_group: with "ray", the caller's own group to start the ranks in; it is not removed.
            threads_per_rank: compute threads per rank; None divides each host's cores.
            start_timeout_s: seconds within which all must have joined.
            heartbeat_timeout_s: seconds of silence of a rank's progress thread after which it is killed as lost.
            device: torch device type of the ranks, "cpu" or "cuda".

        Raises:
            LaunchError: no room, a rank ended during start, or not all joined in time; names who is missing.
            HandshakeError: ranks run unequal builds (kernel signatures).
            ConfigError: a setting that cannot work.
        """
        if num_ranks < 1:
            raise ConfigError(f"num_ranks={num_ranks}: must be at least 1")
        if isinstance(launcher, str):
            launcher = make_launcher(launcher, ray_address=ray_address, placement_group=placement_group, device=device)
        pool = cls(launcher, device=device)
        pool.heartbeat_timeout_s = heartbeat_timeout_s
        try:
            # The launcher's own deadline comes first: it knows what there was no room for.
            async with asyncio.timeout(start_timeout_s + _PLACE_GRACE_S):
                await pool._start(num_ranks, threads_per_rank, start_timeout_s)
        except TimeoutError as error:
            message = pool._missing(num_ranks, start_timeout_s)
            await pool.stop()
            raise LaunchError(message) from error
        except BaseException:
            await pool.stop()
            raise
        return pool

    @property
    def store_address(self) -> tuple[str, int]:
        """(host, port) of the rendezvous store, which lives in this process."""
        return self._store_address

    def next_generation(self) -> int:
        """A generation number that this pool has not used yet."""
        return next(self._generations)

    def on_lost(self, callback: Callable[[RankLostError], None]) -> Callable[[], None]:
        """Calls `callback(error)` once for each rank that is lost from now on, and for those already lost.

        Ranks that end because the pool is stopped are not lost. Returns a function that takes the callback back.
        """
        self._lost_callbacks.append(callback)
        for rank in self.ranks:
            if isinstance(rank.lost, RankLostError):
                self._loop.call_soon(self._tell, callback, rank.lost)

        def forget() -> None:
            if callback in self._lost_callbacks:
                self._lost_callbacks.remove(callback)

        return forget

    async def stop(self) -> None:
        """Ends all ranks and gives everything back: processes, sockets, files, the launcher's resources.

        Safe to call again and from several tasks; cancelling one caller does not interrupt it.
        """
        if self._stop_task is None:
            self._stop_task = self._loop.create_task(self._stop(), name="epruntime-pool-stop")
        await asyncio.shield(self._stop_task)

    # starting

    async def _start(self, num_ranks: int, threads_per_rank: int | None, timeout_s: float) -> None:
        seats = await self._launcher.place(num_ranks, threads_per_rank=threads_per_rank, timeout_s=timeout_s)
        assert [seat.slot for seat in seats] == list(range(num_ranks))
        host = self._launcher.control_host
        self._store = self._loop.run_in_executor(None, host_store, host or LOOPBACK)
        self._door = Door(self._server, host)
        self._background(self._watching, self._watch_heartbeats())
        async with self._door.open() as address:
            self.ranks = [RankHandle(seat, incarnation=0, clock=self._clock) for seat in seats]
            for rank in self.ranks:
                self._begin(rank, address, timeout_s)
            self._store_address = (host or LOOPBACK, (await self._store)[1])
            await _all_ready(self.ranks)
        logger.info(
            "%s up (%s): %s",
            counted(num_ranks, "rank is", "ranks are"),
            self._launcher.name,
            ", ".join(f"{r.info.slot} on {r.info.host} pid {r.info.pid}" for r in self.ranks),
        )
        logger.info("they compute with %s", ", ".join(f"{k} {v}" for k, v in self.ranks[0].info.signature.items()))

    async def replace(self, slot: int, *, timeout_s: float) -> RankHandle:
        """Puts a new rank into a slot: the same seat, the next incarnation. The old one is killed if it still lives.

        Args:
            timeout_s: seconds within which the new rank must have joined.

        Raises:
            LaunchError: the old one could not be confirmed dead, or the new one did not start; the slot stays lost.
            HandshakeError: the new one is refused. EngineDeadError: the pool was stopped.
        """
        old = self.ranks[slot]
        if self._stop_task is not None or self._door is None:
            raise EngineDeadError("the rank pool was stopped")
        if old.process is not None and not old.process.exited.done():
            old.condemn("it is being replaced")
            await asyncio.wait([old.process.exited], timeout=KILL_S)
            if not old.process.exited.done():
                raise LaunchError(
                    f"rank {slot} on host {old.seat.host}, pid {old.info.pid}, could not be confirmed dead within "
                    f"{KILL_S:g} s: it is not replaced, for two of it would answer"
                )
        rank = RankHandle(old.seat, incarnation=old.incarnation + 1, clock=self._clock)
        self.ranks[slot] = rank
        try:
            async with self._door.open() as address:
                self._begin(rank, address, timeout_s)
                await asyncio.wait([rank.ready], timeout=timeout_s)
            rank.failed_to_start(
                LaunchError(f"rank {slot} on host {rank.seat.host} did not join within {timeout_s:g} s{said(rank)}")
            )
            rank.ready.result()
        except BaseException as error:  # also a cancellation: the slot is as if it had never been filled again
            words = without_words(f"it did not start again: {error}")
            rank.fail(RankLostError(slot=slot, host=rank.seat.host, detail=words))
            await stop_rank(rank)
            raise
        logger.info("rank %d on %s is up again, pid %d", slot, rank.info.host, rank.info.pid)
        return rank

    def _begin(self, rank: RankHandle, address: str, timeout_s: float) -> None:
        self._server.expect(rank.seat.slot, rank.incarnation)
        self._background(self._spawning, self._spawn(rank, address, timeout_s))

    async def _spawn(self, rank: RankHandle, address: str, timeout_s: float) -> None:
        seat = rank.seat
        bootstrap = RankBootstrap(
            address=address,
            secret=self._secret,
            slot=seat.slot,
            incarnation=rank.incarnation,
            host=seat.host,
            local_rank=seat.local_rank,
            threads=seat.threads,
            device=self._device,
            connect_timeout_s=timeout_s,
        )
        try:
            process = rank.process = await self._launcher.spawn(bootstrap)
            if process.host is not None:
                rank.seat = dataclasses.replace(seat, host=process.host)
        except LaunchError as error:
            rank.failed_to_start(error)
            return
        except Exception as error:  # noqa: BLE001 - whatever a launcher's library raises, nobody must wait for this rank
            failure = LaunchError(
                f"rank {seat.slot} on host {seat.host} could not be started: {type(error).__name__}: {error}"
            )
            failure.__cause__ = error
            rank.failed_to_start(failure)
            return
        self._background(self._watching, self._watch(rank))

    def _on_join(self, connection: Connection) -> None:
        assert connection.info is not None
        self.ranks[connection.info.slot].joined(connection)

    def _on_beats(self, connection: Connection) -> None:
        assert connection.info is not None
        self.ranks[connection.info.slot].beats_joined(connection)

    def _on_refused(self, info: RankInfo, error: HandshakeError) -> None:
        # One of an earlier incarnation that comes late says nothing about the one that is expected.
        if info.slot < len(self.ranks) and info.incarnation == self.ranks[info.slot].incarnation:
            self.ranks[info.slot].failed_to_start(error)

    def _missing(self, num_ranks: int, timeout_s: float) -> str:
        absent = [rank for rank in self.ranks if not rank.ready.done()]
        if not absent:
            return f"{counted(num_ranks, 'rank')} asked for and not started within {timeout_s:g} s (start_timeout_s)"
        lines = []
        for rank in absent:
            state = "still starting" if rank.process is None else "running, has not joined"
            lines.append(f"rank {rank.seat.slot} on host {rank.seat.host}: {state}" + said(rank))
        return (
            f"{len(absent)} of {counted(num_ranks, 'rank')} did not join within {timeout_s:g} s (start_timeout_s):\n"
            + "\n".join(lines)
        )

    # watching

    async def _watch_heartbeats(self) -> None:
        """Condemns ranks that are silent for too long."""
        while True:
            await asyncio.sleep(TICK_S)
            self._clock.tick()
            for rank in self.ranks:
                silent_s = rank.progress.silent_s
                if rank.ready.done() and rank.lost is None and silent_s > self.heartbeat_timeout_s:
                    rank.condemn(
                        f"no heartbeat for {silent_s:.1f} s (heartbeat_timeout_s={self.heartbeat_timeout_s:g}): its "
                        "process is stopped, or its host is gone or out of memory"
                    )

    async def _watch(self, rank: RankHandle) -> None:
        """Waits for the end of a rank, by its process, its connection or a verdict, and reports it."""
        await first_sign(rank)
        if self._stop_task is not None:
            return
        ended = await end_of(rank)
        if self._stop_task is None:
            self._lose(rank, ended)

    def _lose(self, rank: RankHandle, ended: RankEnd) -> None:
        rank.failed_to_start(
            LaunchError(f"rank {rank.seat.slot} on host {rank.seat.host} ended during start: {ended.how}{said(rank)}")
        )
        if rank.connection is None or rank.lost is not None:
            return
        for connection in (rank.connection, rank.beats):
            if connection is not None:
                connection.abort(ended.how)
        error = RankLostError(slot=rank.seat.slot, host=rank.seat.host, detail=ended.detail(rank))
        # one that was stopped, or is stuck, has said nothing about it
        logger.error("%s%s", error, "" if rank.condemned.done() else said(rank))
        rank.fail(error)
        for callback in list(self._lost_callbacks):
            self._tell(callback, error)

    def _tell(self, callback: Callable[[RankLostError], None], error: RankLostError) -> None:
        try:
            callback(error)
        except Exception:  # the others must hear of it too
            logger.exception("on_lost callback failed")

    # stopping

    async def _stop(self) -> None:
        async with contextlib.AsyncExitStack() as last_first:
            last_first.callback(self._close_store)
            last_first.push_async_callback(self._launcher.release)
            last_first.callback(self._server.close)
            if self._door is not None:
                last_first.callback(self._door.close)
            for task in list(self._spawning):
                task.cancel()
            await asyncio.gather(*self._spawning, return_exceptions=True)
            await asyncio.gather(*(stop_rank(rank) for rank in self.ranks))
            for task in list(self._watching):
                task.cancel()
            await asyncio.gather(*self._watching, return_exceptions=True)

    def _close_store(self) -> None:
        self._store = None

    def _background(self, group: set[asyncio.Task[None]], work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        group.add(task)
        task.add_done_callback(group.discard)


def make_launcher(
    name: str, *, ray_address: str | None = None, placement_group: object | None = None, device: str = "cpu"
) -> Launcher:
    """The launcher of that name.

    Raises:
        ConfigError: no such launcher, or what it needs is not installed.
    """
    if name == "local":
        from epruntime.launchers.local import LocalLauncher

        return LocalLauncher()
    if name == "ray":
        try:
            from epruntime.launchers.ray import RayLauncher
        except ModuleNotFoundError as error:
            raise ConfigError(f"launcher='ray' needs Ray ({error}): pip install 'epruntime[ray]'") from error
        return RayLauncher(address=ray_address, device=device, placement_group=placement_group)
    if name == "torchrun":
        from epruntime.launchers.torchrun import TorchrunLauncher

        return TorchrunLauncher()
    raise ConfigError(f"launcher={name!r}: must be local, ray or torchrun")


async def _all_ready(ranks: list[RankHandle]) -> None:
    """Raises LaunchError or HandshakeError: as soon as one failed to start, or has started and is lost."""
    while waiting := [rank.ready for rank in ranks if not rank.ready.done()]:
        await asyncio.wait([*waiting, *(rank.gone for rank in ranks)], return_when=asyncio.FIRST_COMPLETED)
        for rank in ranks:
            if rank.ready.done():
                rank.ready.result()
            if rank.lost is not None:
                raise LaunchError(f"during start: {rank.lost}")
    for rank in ranks:
        rank.ready.result()
