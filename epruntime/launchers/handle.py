"""RankHandle: one rank as the engine uses it: calls, answers, progress, and the news of its end."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from epruntime.comm.control import Connection, RankInfo, error_of
from epruntime.comm.frames import Message
from epruntime.errors import ConfigError, EngineDeadError, EPRuntimeError, RankLostError
from epruntime.launchers.base import RankProcess, Seat
from epruntime.launchers.clock import LoopClock
from epruntime.launchers.progress import Heartbeats, RankProgress

logger = logging.getLogger("epruntime.launchers.handle")

Reply = dict[str, Any]
Progress = Callable[[Reply], None]


@dataclass(kw_only=True)
class _Pending:
    type: str
    future: asyncio.Future[Reply]
    on_progress: Progress | None
    sent: float
    timer: asyncio.TimerHandle | None = None


class RankHandle:
    """A rank of a pool. All methods run on the pool's loop.

    Attributes:
        seat: where it runs; incarnation: which process of its slot this is.
        process: its process; connection, beats: its connections. None until started and joined.
        ready: done when it has joined with both connections, or failed to (LaunchError, HandshakeError).
        closed, beats_closed: done, with the reason, when that connection has ended and all that came on it was read.
        condemned: done, with the reason, when it is to be killed as lost.
        lost: why it is gone; None while it is alive. gone: done when `lost` is set.

    Args:
        clock: ticked by whoever watches over the rank.
    """

    def __init__(self, seat: Seat, incarnation: int, clock: LoopClock | None = None) -> None:
        self.seat, self.incarnation = seat, incarnation
        self.process: RankProcess | None = None
        self.connection: Connection | None = None
        self.beats: Connection | None = None
        loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[None] = loop.create_future()
        self.condemned: asyncio.Future[str] = loop.create_future()
        self.gone: asyncio.Future[None] = loop.create_future()
        self.closed: asyncio.Future[str] = loop.create_future()
        self.beats_closed: asyncio.Future[str] = loop.create_future()
        self.lost: EngineDeadError | None = None
        self._info = RankInfo(
            slot=seat.slot,
            incarnation=incarnation,
            host=seat.host,
            local_rank=seat.local_rank,
            attn_group=seat.slot,
            ep_rank=seat.slot,
        )
        self._pending: dict[int, _Pending] = {}
        self._ids = itertools.count(1)
        self._heartbeats = Heartbeats(clock or LoopClock())

    def __repr__(self) -> str:
        return f"RankHandle(slot={self.seat.slot}, host={self.seat.host!r}, lost={self.lost!r})"

    @property
    def info(self) -> RankInfo:
        """Who the rank is; pid and signature are there once it has joined."""
        return self._info

    @property
    def progress(self) -> RankProgress:
        """What it last said that it was doing, and how long ago."""
        return self._heartbeats.progress

    def condemn(self, reason: str) -> None:
        """Declares it lost: the pool kills its process, and tells everybody when that is confirmed dead."""
        if not self.condemned.done():
            self.condemned.set_result(reason)

    def call(
        self, type: str, timeout_s: float | None = None, *, on_progress: Progress | None = None, **body: Any
    ) -> asyncio.Future[Reply]:
        """Sends a message and returns the future of its reply. Never raises itself.

        Cancelling the future only stops waiting: the rank still carries the message out.

        Args:
            type: message type, for example "plan"; body: its other fields.
            timeout_s: seconds until the future fails with RankLostError("... did not answer"); the rank is left as
                it is.
            on_progress: called with each `progress` message before the reply.

        Raises (through the future):
            the rank's own error, rebuilt; RankLostError: it died; EngineDeadError: the pool was stopped, or a newer
            generation was configured before the reply came; ConfigError: `configure` with a generation that is not
            newer; ProtocolError: the message cannot be sent.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Reply] = loop.create_future()
        connection = self.connection
        if self.lost is not None or connection is None:
            _fail(future, self.lost or EngineDeadError(f"rank {self.seat.slot} has not joined"))
            return future
        if type == "configure":
            if body["generation"] <= connection.generation:
                _fail(
                    future,
                    ConfigError(
                        f"generation={body['generation']}: rank {self.seat.slot} has seen {connection.generation}; "
                        "take a new number from RankPool.next_generation()"
                    ),
                )
                return future
            self._fail_all(
                EngineDeadError(
                    f"generation {connection.generation} ended: rank {self.seat.slot} goes to {body['generation']}"
                )
            )
            ep_rank = body.get("ep_rank", self._info.ep_rank)
            future.add_done_callback(lambda done: self._configured(done, ep_rank))
        message_id = next(self._ids)
        try:
            connection.send({**body, "type": type, "id": message_id})
        except EPRuntimeError as error:
            _fail(future, error)
            return future
        pending = _Pending(type=type, future=future, on_progress=on_progress, sent=time.monotonic())
        if timeout_s is not None:
            pending.timer = loop.call_later(timeout_s, self._expire, message_id, timeout_s)
        self._pending[message_id] = pending
        # Whatever ends the future, also a cancel by its owner, ends the wait for the reply.
        future.add_done_callback(lambda _: self._forget(message_id))
        return future

    def joined(self, connection: Connection) -> None:
        """Takes the connection of this rank, which has proved itself."""
        assert connection.info is not None
        self.connection = connection
        self._info = connection.info
        connection.on_message = self._take
        connection.on_close = self._on_close

    def beats_joined(self, connection: Connection) -> None:
        """Takes the connection of its heartbeats: it is ready."""
        self.beats = connection
        self._heartbeats.begin()
        connection.on_message = self._heartbeats.take
        connection.on_close = self.beats_closed.set_result  # called once
        if not self.ready.done():
            self.ready.set_result(None)

    def failed_to_start(self, error: EPRuntimeError) -> None:
        """It will never be ready; nothing to do if it is."""
        if not self.ready.done():
            _fail(self.ready, error)

    def fail(self, error: EngineDeadError) -> None:
        """No answer will come any more: every pending and future call fails with `error`."""
        if self.lost is None:
            self.lost = error
            self.gone.set_result(None)
            self._fail_all(error)

    def activity(self) -> str:
        """What the rank was asked and has not answered, for error messages; empty if nothing."""
        now = time.monotonic()
        return ", ".join(f"{p.type!r} (id {i}, sent {now - p.sent:.1f} s ago)" for i, p in self._pending.items())

    def _take(self, message: Message) -> None:
        message_id = message.get("id")
        pending = self._pending.get(message_id) if isinstance(message_id, int) else None
        if pending is None:
            # The caller stopped waiting (cancelled, timed out, a newer generation): nothing is wrong.
            logger.debug(
                "rank %d: %r with id %r answers nothing that is waited for", self.seat.slot, message["type"], message_id
            )
        elif message["type"] == "progress":
            if pending.on_progress is not None:
                try:
                    pending.on_progress(message)
                except Exception:  # the callback's fault must not cut the rank off
                    logger.exception("progress callback of %r failed", pending.type)
        elif pending.future.done():
            return
        elif message["type"] == "failed":
            _fail(pending.future, error_of(message, slot=self.seat.slot, host=self.seat.host))
        else:
            pending.future.set_result(message)

    def _on_close(self, reason: str) -> None:
        if not self.closed.done():
            self.closed.set_result(reason)

    def _configured(self, done: asyncio.Future[Reply], ep_rank: int) -> None:
        if not done.cancelled() and done.exception() is None:
            self._info = dataclasses.replace(self._info, ep_rank=ep_rank)

    def _expire(self, message_id: int, timeout_s: float) -> None:
        pending = self._pending.get(message_id)
        if pending is not None and not pending.future.done():
            _fail(
                pending.future,
                RankLostError(
                    slot=self.seat.slot,
                    host=self.seat.host,
                    detail=f"it did not answer {pending.type!r} within {timeout_s:g} s",
                ),
            )

    def _forget(self, message_id: int) -> None:
        pending = self._pending.pop(message_id, None)
        if pending is not None and pending.timer is not None:
            pending.timer.cancel()

    def _fail_all(self, error: EngineDeadError) -> None:
        for pending in list(self._pending.values()):
            if not pending.future.done():
                _fail(pending.future, error)


def _fail(future: asyncio.Future[Any], error: BaseException) -> None:
    future.set_exception(error)
    # Whoever dropped the future does not want the error, and learns of a lost rank through on_lost.
    future.exception()
