"""One HTTP/1.1 connection: uvicorn's protocol, with the time limits that it lacks."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from epruntime.serve.openai.errors import HttpError
from epruntime.serve.openai.json import encode

#: Seconds in which the headers of a request must have arrived, from the connection or from their first byte on.
HEADERS_S = 20.0
#: Seconds that a reader may take nothing of an answer that waits for it.
STALL_S = 60.0
#: A peer whose host has gone without a word: asked after IDLE_S, given up after PROBES times INTERVAL_S more.
_IDLE_S, _INTERVAL_S, _PROBES = 30, 10, 3

#: What uvicorn says about single connections: anyone could fill the log with it.
_quiet = logging.getLogger("epruntime.serve.openai.uvicorn")
_quiet.setLevel(logging.CRITICAL)


class Alarm:
    """A timer: `set` does nothing while it is set."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._handle: asyncio.TimerHandle | None = None

    def set(self, seconds: float, action: Callable[[], None]) -> None:
        if self._handle is None:
            self._handle = self._loop.call_later(seconds, action)

    def cancel(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None


class Connection(H11Protocol):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.logger = _quiet
        self._headers_alarm, self._stall_alarm = Alarm(self.loop), Alarm(self.loop)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        _watch(transport.get_extra_info("socket"))
        self._headers_alarm.set(HEADERS_S, transport.close)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state is h11.IDLE:  # the headers are not complete
            self._headers_alarm.set(HEADERS_S, self.transport.close)
        else:
            self._headers_alarm.cancel()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._expect_reading()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stall_alarm.cancel()

    def connection_lost(self, exc: Exception | None) -> None:
        self._headers_alarm.cancel()
        self._stall_alarm.cancel()
        super().connection_lost(exc)

    def _expect_reading(self) -> None:
        """Ends the connection if in time nothing is taken of what waits; a large answer may take longer than that."""
        waiting = self.transport.get_write_buffer_size()

        def look() -> None:
            self._stall_alarm.cancel()
            if self.transport.get_write_buffer_size() < waiting:
                self._expect_reading()
            else:
                self.transport.abort()

        self._stall_alarm.set(STALL_S, look)

    def send_400_response(self, msg: str) -> None:
        """The answer to what is no HTTP."""
        body = encode(HttpError(400, "this is no valid HTTP/1.1 request, or its headers are too large").body)
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):  # else an answer is under way
            for event in (h11.Response(status_code=400, headers=headers), h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()


def _watch(sock: socket.socket | None) -> None:
    if sock is None or sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", _IDLE_S), ("TCP_KEEPINTVL", _INTERVAL_S), ("TCP_KEEPCNT", _PROBES)):
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # for what was sent and not acknowledged; milliseconds
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, (_IDLE_S + _INTERVAL_S * _PROBES) * 1000)
