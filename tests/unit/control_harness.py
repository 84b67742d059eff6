"""A server of control connections in this thread's loop, and ranks that are blocking clients in other threads."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace

from epruntime.comm.control import Connection, ControlClient, ControlServer, RankBootstrap
from epruntime.errors import HandshakeError

SECRET = bytes(range(32))
SIGNATURE = {"extension": "native:1"}


class Harness:
    """A server in this thread's loop, whose ranks are blocking clients in other threads."""

    def __init__(self, server: ControlServer, address: str) -> None:
        self.server, self.address = server, address
        self.joined: list[Connection] = []
        self.refused: list[tuple[int, HandshakeError]] = []
        self.inbox: asyncio.Queue = asyncio.Queue()
        self.ends: list[str] = []

    def letter(self, **changes) -> RankBootstrap:
        return replace(
            RankBootstrap(address=self.address, secret=SECRET, slot=0, host="h", connect_timeout_s=30), **changes
        )

    async def connect(self, signature=SIGNATURE, **changes) -> ControlClient:
        return await asyncio.to_thread(ControlClient.connect, self.letter(**changes), signature=signature)

    async def echo_works(self, client: ControlClient, connection: Connection) -> None:
        connection.send({"type": "ping", "id": 1})
        assert (await asyncio.to_thread(client.recv))["type"] == "ping"
        client.send({"type": "pong", "id": 1})
        assert (await asyncio.wait_for(self.inbox.get(), 30))["type"] == "pong"


@contextlib.asynccontextmanager
async def harness(tmp_path, kind: str = "unix", slots: int = 2, **options) -> AsyncIterator[Harness]:
    def on_join(connection: Connection) -> None:
        connection.on_message = h.inbox.put_nowait
        connection.on_close = h.ends.append
        h.joined.append(connection)

    server = ControlServer(
        SECRET, on_join=on_join, on_refused=lambda info, error: h.refused.append((info.slot, error)), **options
    )
    if kind == "unix":
        h = Harness(server, await server.listen_unix(str(tmp_path / "c")))
    else:
        h = Harness(server, await server.listen_tcp("127.0.0.1"))
    for slot in range(slots):
        server.expect(slot, 0)
    try:
        yield h
    finally:
        server.close()


def run(coroutine) -> None:
    asyncio.run(asyncio.wait_for(coroutine, 60))
