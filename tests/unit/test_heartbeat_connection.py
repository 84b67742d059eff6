"""The connection for heartbeats: who may open it, and what may come on it."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from epruntime.comm.beats import publish
from epruntime.comm.control import Connection, ControlClient, ControlServer, RankBootstrap
from epruntime.comm.identity import BEATS, RankInfo
from epruntime.comm.progress import Phase, Stamp, Stamps
from epruntime.errors import HandshakeError

SECRET = bytes(range(32))


class Harness:
    def __init__(self) -> None:
        self.beats: list[Connection] = []
        self.refused: list[tuple[int, int]] = []
        self.server = ControlServer(
            SECRET, on_join=lambda connection: None, on_beats=self.beats.append, on_refused=self._refused
        )
        self.letter = RankBootstrap(address="", secret=SECRET, slot=0, host="h", connect_timeout_s=30)

    def _refused(self, info: RankInfo, error: HandshakeError) -> None:
        self.refused.append((info.slot, info.incarnation))

    async def connect(self, channel: str, **changes) -> ControlClient:
        letter = replace(self.letter, **changes)
        return await asyncio.to_thread(ControlClient.connect, letter, signature={}, channel=channel)


@contextlib.asynccontextmanager
async def harness(tmp_path) -> AsyncIterator[Harness]:
    h = Harness()
    h.letter = replace(h.letter, address=await h.server.listen_unix(str(tmp_path / "c")))
    h.server.expect(0, 3)
    try:
        yield h
    finally:
        h.server.close()


def run(coroutine) -> None:
    asyncio.run(asyncio.wait_for(coroutine, 120))


def test_it_needs_a_rank_that_has_joined_and_comes_once(tmp_path):
    async def body():
        async with harness(tmp_path) as h:
            with pytest.raises(HandshakeError, match="heartbeats of slot 0, incarnation 3, which is not here"):
                await h.connect(BEATS, incarnation=3)
            rank = await h.connect("control", incarnation=3)
            for changes, words in (
                ({"incarnation": 2}, "old incarnation 2 of slot 0: this pool expects 3"),
                ({"incarnation": 3, "secret": bytes(32)}, "secret"),
                ({"incarnation": 3, "host": "elsewhere"}, "which is not here"),
                ({"incarnation": 3, "slot": 1}, "slot 1 is not part of this pool"),
            ):
                with pytest.raises(HandshakeError, match=words):
                    await h.connect(BEATS, **changes)
            with pytest.raises(HandshakeError, match="control or beats"):
                await h.connect("gossip", incarnation=3)
            beats = await h.connect(BEATS, incarnation=3)
            assert [connection.channel for connection in h.beats] == [BEATS]
            with pytest.raises(HandshakeError, match=r"has joined already \(beats\)"):
                await h.connect(BEATS, incarnation=3)
            rank.close()
            beats.close()

    run(body())


def test_stamps_come_through_and_anything_else_ends_the_connection(tmp_path):
    async def body():
        async with harness(tmp_path) as h:
            rank = await h.connect("control", incarnation=3)
            stamps = Stamps()
            stamps.enter(Phase.FORWARD, step=os.getpid())
            letter = replace(h.letter, incarnation=3)
            publisher = await asyncio.to_thread(publish, letter, stamps, signature={})
            seen: asyncio.Queue[dict] = asyncio.Queue()
            h.beats[0].on_message = seen.put_nowait
            message = await asyncio.wait_for(seen.get(), 30)
            assert Stamp.from_bytes(message["stamp"]).step == os.getpid()
            publisher.stop()
            rank.close()

            h.server.expect(0, 4)
            rank = await h.connect("control", incarnation=4)
            beats = await h.connect(BEATS, incarnation=4)
            ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
            h.beats[1].on_close = ended.set_result
            beats.send({"type": "plan", "id": 1})
            assert "on the connection for heartbeats" in await asyncio.wait_for(ended, 30)
            rank.close()
            beats.close()

    run(body())
