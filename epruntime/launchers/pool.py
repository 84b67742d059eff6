"""RankPool: ranks that are up and have proved themselves, whatever launched them.

start: launcher.place -> listen -> spawn -> ranks join -> stop listening          stop: ask, terminate, kill, confirm

A pool outlives models and generations; engines configure it, load, unload, and configure it again.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import tempfile
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from epruntime.comm import auth
from epruntime.comm.control import Connection, ControlServer, RankBootstrap
from epruntime.errors import (
    ConfigError,
    ConnectionClosedError,
    EngineDeadError,
    HandshakeError,
    LaunchError,
    RankLostError,
)
from epruntime.launchers.base import Launcher, RankProcess
from epruntime.launchers.handle import RankHandle
from epruntime.launchers.store import host_store

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

logger = logging.getLogger("epruntime.launchers.pool")

__all__ = ["RankHandle", "RankPool"]

LOOPBACK = "127.0.0.1"

#: seconds given to a rank: to leave when asked, when told (SIGTERM), and to be gone after SIGKILL.
_LEAVE_S, _TERMINATE_S, _KILL_S = 3.0, 2.0, 10.0

#: seconds added to start_timeout_s before the pool gives up by itself.
_PLACE_GRACE_S = 1.0

#: seconds between the end of a rank's connection and the end of its process that count as one event.
_SETTLE_S = 2.0

#: longest path of a Unix socket that every system takes, bytes.
_MAX_SOCKET_PATH = 100
_SOCKET_NAME = "control"


class RankPool:
    """A set of ranks. Make it with `RankPool.start`; it belongs to the asyncio loop it was started on.

    Attributes:
        ranks: handles in slot order.
    """

    def __init__(self, launcher: Launcher, *, device: str = "cpu") -> None:
        self.ranks: list[RankHandle] = []
        self._launcher, self._device = launcher, device
        self._loop = asyncio.get_running_loop()
        self._secret = auth.new_secret()
        self._server = ControlServer(self._secret, on_join=self._on_join, on_refused=self._on_refused)
        self._socket_dir: tempfile.TemporaryDirectory[str] | None = None
        # Held here and nowhere else: the store ends when this lets go of it.
        self._store: asyncio.Future[tuple[TCPStore, int]] | None = None
        self._store_address = ("", 0)
        self._ready: asyncio.Future[None] = self._loop.create_future()
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
        threads_per_rank: int | None = None,
        start_timeout_s: float = 120.0,
        device: str = "cpu",
    ) -> RankPool:
        """Starts `num_ranks` ranks and waits until all have joined. On any failure, also when it is cancelled,
        everything that was started is stopped first.

        Args:
            launcher: "local", "ray", or a launcher object.
            ray_address: with "ray", an existing cluster; None starts one on this machine.
            threads_per_rank: compute threads per rank; None divides each host's cores.
            start_timeout_s: seconds within which all must have joined.
            device: torch device type of the ranks, "cpu" or "cuda".

        Raises:
            LaunchError: no room, a rank ended during start, or not all joined in time; names who is missing.
            HandshakeError: ranks run unequal builds (kernel signatures).
            ConfigError: a setting that cannot work.
        """
        if num_ranks < 1:
            raise ConfigError(f"num_ranks={num_ranks}: must be at least 1")
        if isinstance(launcher, str):
            launcher = make_launcher(launcher, ray_address=ray_address, device=device)
        pool = cls(launcher, device=device)
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
        if host is None:
            self._socket_dir = _private_directory()
            address = await self._server.listen_unix(f"{self._socket_dir.name}/{_SOCKET_NAME}")
        else:
            address = await self._server.listen_tcp(host)
        self.ranks = [RankHandle(seat, incarnation=0) for seat in seats]
        for rank in self.ranks:
            self._server.expect(rank.seat.slot, rank.incarnation)
            self._background(self._spawning, self._spawn(rank, address, timeout_s))
        self._store_address = (host or LOOPBACK, (await self._store)[1])
        await asyncio.shield(self._ready)
        self._close_door()
        logger.info(
            "%d ranks are up (%s): %s",
            num_ranks,
            self._launcher.name,
            ", ".join(f"{r.info.slot} on {r.info.host} pid {r.info.pid}" for r in self.ranks),
        )

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
            rank.process = await self._launcher.spawn(bootstrap)
        except LaunchError as error:
            self._fail_start(error)
            return
        except Exception as error:  # noqa: BLE001 - whatever a launcher's library raises, nobody must wait for this rank
            failure = LaunchError(
                f"rank {seat.slot} on host {seat.host} could not be started: {type(error).__name__}: {error}"
            )
            failure.__cause__ = error
            self._fail_start(failure)
            return
        self._background(self._watching, self._watch(rank))

    def _on_join(self, connection: Connection) -> None:
        assert connection.info is not None
        self.ranks[connection.info.slot].joined(connection)
        if not self._ready.done() and all(rank.connection is not None for rank in self.ranks):
            self._ready.set_result(None)

    def _on_refused(self, slot: int, error: HandshakeError) -> None:
        self._fail_start(error)

    def _fail_start(self, error: LaunchError | HandshakeError) -> None:
        if not self._ready.done():
            self._ready.set_exception(error)
            self._ready.exception()  # _start may be elsewhere, and fail with something else

    def _missing(self, num_ranks: int, timeout_s: float) -> str:
        absent = [rank for rank in self.ranks if rank.connection is None]
        if not absent:
            return f"{num_ranks} ranks were asked for and not started within {timeout_s:g} s (start_timeout_s)"
        lines = []
        for rank in absent:
            state = "still starting" if rank.process is None else "running, has not joined"
            lines.append(f"rank {rank.seat.slot} on host {rank.seat.host}: {state}" + _said(rank))
        return (
            f"{len(absent)} of {num_ranks} ranks did not join within {timeout_s:g} s (start_timeout_s):\n"
            + "\n".join(lines)
        )

    def _close_door(self) -> None:
        """Nobody else is expected: no listener and no file stays behind, even if this process is killed."""
        self._server.close_listeners()
        if self._socket_dir is not None:
            self._socket_dir.cleanup()
            self._socket_dir = None

    # watching

    async def _watch(self, rank: RankHandle) -> None:
        """Waits for the end of a rank, by its process or its connection, whichever is first, and reports it."""
        process = rank.process
        assert process is not None
        await asyncio.wait([process.exited, rank.closed], return_when=asyncio.FIRST_COMPLETED)
        if self._stop_task is not None:
            return
        # What it still said before it ended arrives first; and a closed connection mostly means a dying process.
        waiting = [process.exited] if rank.connection is None else [process.exited, rank.closed]
        await asyncio.wait(waiting, timeout=_SETTLE_S)
        if process.exited.done():
            how = process.exited.result()
        else:
            logger.error("rank %d left the control channel but runs on: killing it", rank.seat.slot)
            process.kill()
            await asyncio.wait([process.exited], timeout=_KILL_S)
            how = f"it left the control channel ({rank.closed.result()}) while its process was running; "
            how += "killed" if process.exited.done() else "its process could not be confirmed dead"
        if self._stop_task is None:
            self._lose(rank, how)

    def _lose(self, rank: RankHandle, how: str) -> None:
        self._fail_start(
            LaunchError(f"rank {rank.seat.slot} on host {rank.seat.host} ended during start: {how}{_said(rank)}")
        )
        if rank.connection is None:
            return
        rank.connection.abort(how)
        activity = rank.activity()
        detail = how + (f"; unanswered: {activity}" if activity else "") + _said(rank)
        error = RankLostError(slot=rank.seat.slot, host=rank.seat.host, detail=detail)
        logger.error("%s", error)
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
            last_first.callback(self._close_door)
            for task in list(self._spawning):
                task.cancel()
            await asyncio.gather(*self._spawning, return_exceptions=True)
            await asyncio.gather(*(self._stop_rank(rank) for rank in self.ranks))
            for task in list(self._watching):
                task.cancel()
            await asyncio.gather(*self._watching, return_exceptions=True)

    async def _stop_rank(self, rank: RankHandle) -> None:
        rank.fail(EngineDeadError("the rank pool was stopped"))
        process, connection = rank.process, rank.connection
        if process is not None:
            try:
                await self._end_process(process, connection)
            except asyncio.CancelledError:
                process.kill()  # no time left for manners
                raise
            if not process.exited.done():
                logger.error(
                    "rank %d on host %s, pid %d, could not be confirmed dead",
                    rank.seat.slot,
                    rank.seat.host,
                    rank.info.pid,
                )
        if connection is not None:
            connection.abort("the rank pool was stopped")

    async def _end_process(self, process: RankProcess, connection: Connection | None) -> None:
        if connection is not None and connection.is_open:
            with contextlib.suppress(ConnectionClosedError):
                connection.send({"type": "shutdown", "id": 0})
                await asyncio.wait([process.exited], timeout=_LEAVE_S)
        for act, seconds in ((process.terminate, _TERMINATE_S), (process.kill, _KILL_S)):
            if not process.exited.done():
                act()
                await asyncio.wait([process.exited], timeout=seconds)

    def _close_store(self) -> None:
        self._store = None

    def _background(self, group: set[asyncio.Task[None]], work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        group.add(task)
        task.add_done_callback(group.discard)


def make_launcher(name: str, *, ray_address: str | None, device: str) -> Launcher:
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
        return RayLauncher(address=ray_address, device=device)
    raise ConfigError(f"launcher={name!r}: must be local or ray")


def _private_directory() -> tempfile.TemporaryDirectory[str]:
    """A fresh directory that only this user can enter, short enough for the path of a Unix socket in it."""
    directory = tempfile.TemporaryDirectory(prefix="epruntime-", ignore_cleanup_errors=True)  # mode 0700
    if len(os.fsencode(directory.name)) > _MAX_SOCKET_PATH - len(_SOCKET_NAME) - 1:
        directory.cleanup()
        directory = tempfile.TemporaryDirectory(prefix="epruntime-", dir="/tmp", ignore_cleanup_errors=True)
    return directory


def _said(rank: RankHandle) -> str:
    tail = rank.process.output_tail() if rank.process is not None else []
    return "; its last words:\n  " + "\n  ".join(tail) if tail else ""
