"""SupervisorHub: the coordinator's end of the links to all supervisors, for as long as its program runs.

start: listen -> letter into torchrun's store -> supervisors join | seats -> spawn -> events -> close(exit code)

It has a thread and a loop of its own: supervisors are there before the first LLM is made, between two, and after the
last one. Their signals become this process's own.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import itertools
import logging
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from epruntime.comm import auth
from epruntime.comm.control import Connection, ControlServer, RankBootstrap
from epruntime.comm.frames import Message
from epruntime.comm.interfaces import coordinator_address
from epruntime.errors import ConfigError, ConnectionClosedError, LaunchError, ProtocolError
from epruntime.launchers.torchrun_environment import TorchrunWorker
from epruntime.launchers.torchrun_meeting import LastLetter, MeetingLetter, MeetingPoint
from epruntime.words import counted

logger = logging.getLogger("epruntime.launchers.torchrun_hub")

T = TypeVar("T")

LOOPBACK = "127.0.0.1"
_TAIL_LINES = 20
#: seconds for last messages to leave.
_FAREWELL_S = 2.0
_ENDED = "the job has ended, and torchrun's workers with it"


class Order:
    """A rank process on a supervisor, from the hub's side. Its fields change on the hub's loop.

    Attributes:
        number: of the order; spawned: done when the supervisor has started the process, or failed to (LaunchError);
        exited: done, with how, when it has ended, or its supervisor has. tail: its last lines.
    """

    def __init__(self, number: int, link: Link, loop: asyncio.AbstractEventLoop) -> None:
        self.number, self.link = number, link
        self.spawned: asyncio.Future[None] = loop.create_future()
        self.exited: asyncio.Future[str] = loop.create_future()
        self.tail: deque[str] = deque(maxlen=_TAIL_LINES)


class Link:
    """One supervisor.

    Attributes:
        rank, host, local_rank: torchrun's; group: number of its host. affinity: cores that it may use, as the system
            numbers them; cores: how many of them its quota allows.
        order: the rank that it is for; None while it is a spare one. taken: by a launcher.
        gone: why it is not there any more; "" while it is.
    """

    def __init__(self, connection: Connection) -> None:
        info = connection.info
        assert info is not None
        self.connection = connection
        self.rank, self.host, self.local_rank = info.slot, info.host, info.local_rank
        self.group, self.affinity, self.cores = -1, frozenset[int](), 1
        self.order: Order | None = None
        self.taken, self.gone = False, ""

    def __str__(self) -> str:
        return f"torchrun worker {self.rank} on host {self.host}"

    def tell(self, message: Message) -> None:
        """Sends it; nothing to do if the supervisor is gone."""
        with contextlib.suppress(ConnectionClosedError):
            self.connection.send(message)


class SupervisorHub:
    """All supervisors of this job.

    Args:
        worker: torchrun's worker 0, which started this process.
        job_secret: given to all processes of the job by the user; None draws one, which goes into torchrun's store.
        on_signal: called, in the hub's thread, with the number of a signal that supervisors have got.
    """

    def __init__(
        self,
        worker: TorchrunWorker,
        *,
        job_secret: bytes | None,
        on_signal: Callable[[int], None] = lambda number: os.kill(os.getpid(), number),
    ) -> None:
        self.worker = worker
        self._secret = job_secret or auth.new_secret()
        self._told_secret = b"" if job_secret else self._secret
        self._on_signal, self._num_signals = on_signal, 0
        self._server = ControlServer(self._secret, on_join=self._on_join)
        self._links: dict[int, Link] = {}
        self._joined: list[Link] = []  # those too that have not said where they are
        self._orders: dict[int, Order] = {}
        self._numbers = itertools.count(1)
        self._meeting: MeetingPoint | None = None
        self._closed = False
        self._lock, self._ended = threading.Lock(), False
        self.host = LOOPBACK
        self.exit_code = 0
        self.cause = ""
        self._loop = asyncio.new_event_loop()
        self._changed = asyncio.Event()
        self._thread = threading.Thread(target=self._loop.run_forever, name="epruntime-torchrun", daemon=True)

    def start(self) -> None:
        """Listens, and tells the supervisors where.

        Raises:
            ConfigError: no address of this host is known to be reached by the others.
            LaunchError: torchrun's store was not reached.
        """
        worker = self.worker
        if worker.num_hosts > 1:
            chosen = coordinator_address([worker.store_host])
            self.host = chosen.address
            logger.info("the coordinator is on host %s, address %s", socket.gethostname(), chosen)
        self._thread.start()
        address = self.run(self._listen())
        self._meeting = MeetingPoint.of(worker, hosts_it=not worker.agent_store)
        self._meeting.post(MeetingLetter(address=address, host=socket.gethostname(), secret=self._told_secret))

    def close(self) -> None:
        """Tells the supervisors that the job has ended with `exit_code`. Safe to call again."""
        if not self._closed and self._thread.is_alive():
            self._closed = True
            self.run(self._say_the_end())
            self._leave_last_letter()
            self.run(self._close_links())
            with self._lock:
                self._ended = True
            asyncio.run_coroutine_threadsafe(self._end_calls(), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(_FAREWELL_S)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of a coroutine on the hub's loop; called in another thread.

        Raises:
            LaunchError: the hub is closed, or was meanwhile.
        """
        return self._begin(work).result()

    async def call(self, work: Coroutine[Any, Any, T]) -> T:
        """As `run`, for a caller on another loop."""
        return await asyncio.wrap_future(self._begin(work))

    def call_soon(self, function: Callable[..., None], *arguments: object) -> None:
        """Calls it on the hub's loop, from any thread."""
        self._loop.call_soon_threadsafe(function, *arguments)

    def _begin(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        with self._lock:
            if not self._ended:
                return asyncio.run_coroutine_threadsafe(self._unless_ended(work), self._loop)
        work.close()
        raise LaunchError(_ENDED)

    # on the hub's loop

    async def _unless_ended(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            return await work
        except asyncio.CancelledError:
            if self._ended:
                raise LaunchError(_ENDED) from None
            raise

    async def _end_calls(self) -> None:
        calls = asyncio.all_tasks() - {asyncio.current_task()}
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)

    async def seats(self, num_ranks: int, timeout_s: float) -> list[Link]:
        """Takes the first `num_ranks` supervisors that are free, in rank order, which is host order.

        Raises:
            LaunchError: there are not so many, or not in time.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            self._changed.clear()
            free = [rank for rank in range(self.worker.world_size) if self._is_free(rank)]
            if len(free) < num_ranks:
                raise LaunchError(self._too_few(num_ranks, len(free)))
            wanted = free[:num_ranks]
            absent = [rank for rank in wanted if rank not in self._links]
            if not absent:
                break
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise LaunchError(self._absent(absent, timeout_s))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), left_s)
        links = [self._links[rank] for rank in wanted]
        for link in links:
            link.taken = True
        return links

    async def spare(self, lost: Link, *, same_host: bool) -> Link:
        """Takes a free supervisor in place of a lost one, on its host if there is one there.

        Args:
            same_host: only the coordinator's own host will do.

        Raises:
            LaunchError: there is none.
        """
        usable = [link for link in self._links.values() if not link.taken and not link.gone]
        usable = [link for link in usable if link.group == self.worker.group_rank or not same_host]
        if not usable:
            raise LaunchError(f"{lost} is gone ({lost.gone}), and torchrun has started no spare worker for its rank")
        best = min(usable, key=lambda link: (link.group != lost.group, link.rank))
        best.taken, lost.taken = True, False
        return best

    async def give_back(self, links: list[Link]) -> None:
        for link in links:
            if link.order is not None:
                link.tell({"type": "kill", "id": link.order.number})
            link.taken = False
        self._changed.set()

    async def spawn(self, link: Link, bootstrap: RankBootstrap) -> Order:
        """Orders a rank. Its `spawned` tells whether that worked."""
        order = Order(next(self._numbers), link, self._loop)
        if link.gone:
            order.spawned.set_exception(LaunchError(f"{link} is gone: {link.gone}"))
            return order
        nonce = auth.new_nonce()
        secret = auth.masked(self._secret, nonce, bootstrap.secret)
        self._orders[order.number] = link.order = order
        letter = dataclasses.replace(bootstrap, secret=secret).to_bytes()
        link.tell({"type": "spawn", "id": order.number, "bootstrap": letter, "nonce": nonce})
        return order

    async def _listen(self) -> str:
        for rank in range(self.worker.world_size):
            self._server.expect(rank, self.worker.restart_count)
        return await self._server.listen_tcp(self.host)

    async def _say_the_end(self) -> None:
        self._server.close_listeners()
        for link in self._joined:
            self._say_the_end_to(link)

    def _say_the_end_to(self, link: Link) -> None:
        link.tell({"type": "end", "code": self.exit_code, "stopped": self._num_signals > 0, "cause": self.cause})
        # closed on this side with something unread, the connection would be reset, and the word lost
        link.connection.end_messages()

    def _leave_last_letter(self) -> None:
        """For supervisors that have not joined. In the caller's thread: the store blocks, and this process may have no
        new threads any more.

        None is left of a job that was stopped: its agents end, and the store with them, or start all anew, perhaps with
        the restart count of before, and this letter would end that job.
        """
        if self._meeting is not None and not self._num_signals and len(self._joined) < self.worker.world_size:
            with contextlib.suppress(RuntimeError):  # the store is gone, and with it whoever could read this
                self._meeting.post(LastLetter(code=self.exit_code, cause=self.cause, host=socket.gethostname()))

    async def _close_links(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_FAREWELL_S):
                while any(not link.gone for link in self._joined):
                    self._changed.clear()
                    await self._changed.wait()
        for link in self._joined:
            link.connection.close("the job has ended")

    def _is_free(self, rank: int) -> bool:
        link = self._links.get(rank)
        return link is None or not (link.taken or link.gone)

    def _on_join(self, connection: Connection) -> None:
        link = Link(connection)
        self._joined.append(link)
        connection.on_message = lambda message: self._take(link, message)
        connection.on_close = lambda reason: self._lost(link, reason)
        if self._closed:
            self._say_the_end_to(link)

    def _take(self, link: Link, message: Message) -> None:
        kind = message["type"]
        order = self._orders.get(message.get("id", 0))
        if kind == "here":
            link.group, link.affinity, link.cores = message["group"], frozenset(message["affinity"]), message["cores"]
            self._links[link.rank] = link
            self._changed.set()
            if len(self._links) == self.worker.world_size and not self._closed:
                self._all_here()
        elif kind == "signal":
            if message["count"] > self._num_signals:  # the agents of all hosts hand on what is one wish
                self._num_signals = message["count"]
                self._on_signal(message["number"])
        elif order is None or order.link is not link:
            logger.debug("%s: %r of order %r, which is over", link, kind, message.get("id"))
        elif kind == "spawned":
            if not order.spawned.done():
                order.spawned.set_result(None)
        elif kind == "failed":
            self._over(order, LaunchError(str(message["reason"])), "it was not started")
        elif kind == "line":
            order.tail.append(str(message["text"]))
        elif kind == "exited":
            self._over(order, LaunchError("it ended at once"), str(message["how"]))
        else:
            raise ProtocolError(f"{link} sent {kind!r:.40}")

    def _over(self, order: Order, error: LaunchError, how: str) -> None:
        self._orders.pop(order.number, None)
        if order.link.order is order:
            order.link.order = None
        if not order.spawned.done():
            order.spawned.set_exception(error)
            order.spawned.exception()  # whoever gave the order may not wait any more
        if not order.exited.done():
            order.exited.set_result(how)

    def _lost(self, link: Link, reason: str) -> None:
        link.gone = reason
        if not self._closed:
            logger.error("%s is gone: %s", link, reason)
        if link.order is not None:
            words = f"{link}, which started it, is gone: {reason}"
            self._over(link.order, LaunchError(words), words)
        self._changed.set()

    def _all_here(self) -> None:
        """Nobody else is expected: neither a listener nor the secret in torchrun's store is needed."""
        self._server.close_listeners()
        if self._meeting is not None:
            self._loop.run_in_executor(None, self._meeting.remove)

    def _too_few(self, num_ranks: int, num_free: int) -> str:
        total = self.worker.world_size
        gone = [str(link) for link in self._links.values() if link.gone]
        return (
            f"{counted(num_ranks, 'rank was', 'ranks were')} asked for (expert_parallel_size), and torchrun has "
            f"started {counted(total, 'worker')} on {counted(self.worker.num_hosts, 'host')}, of which {num_free} are "
            "free"
            + (f"; gone: {', '.join(gone)}" if gone else "")
            + ". Raise torchrun's --nproc-per-node or --nnodes, or ask for fewer ranks"
        )

    def _absent(self, absent: list[int], timeout_s: float) -> str:
        here = ", ".join(str(link) for link in self._links.values()) or "none"
        return (
            f"torchrun's workers {', '.join(map(str, absent))} did not reach the coordinator on host "
            f"{socket.gethostname()}, address {self.host}, within {timeout_s:g} s (start_timeout_s). Here are: {here}. "
            "Look at their hosts' output; if they do not reach this address, set EPRUNTIME_HOST_IP on this host"
        )


_hub: SupervisorHub | None = None


def set_hub(hub: SupervisorHub | None) -> None:
    """The hub of this process, which is a coordinator."""
    global _hub
    _hub = hub


def this_hub() -> SupervisorHub:
    """Raises ConfigError: this process is not a coordinator that torchrun's worker 0 started."""
    if _hub is None:
        raise ConfigError(
            "launcher='torchrun' works in a coordinator under torchrun only: `torchrun ... launch/torchrun_serve.py "
            "MODEL` serves, launch/torchrun_verify.py checks; or a program of your own that calls "
            "epruntime.launchers.torchrun.run_coordinator(main)"
        )
    return _hub
