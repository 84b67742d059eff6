"""Anything may be sent to the control channel: it ends the sender's connection at most, and good ranks still join."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import struct
import threading
import time
from collections.abc import Iterator
from typing import Any

import msgpack
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from epruntime.comm import auth
from epruntime.comm.control import Connection, ControlClient, ControlServer, RankBootstrap
from epruntime.comm.frames import MAX_FRAME_BYTES, MAX_HANDSHAKE_BYTES, FrameReader, Message, decode, encode
from epruntime.errors import ConnectionClosedError, EPRuntimeError, HandshakeError
from epruntime.testing.patience import soon

SECRET = bytes(range(32))
DEADLINE_S = 60
HANDSHAKE_S = 1.0
FUZZ = settings(
    max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


class Channel:
    """A server on its own loop and thread; blocking sockets in the test. It notes whatever went wrong in the loop."""

    def __init__(self, path: str) -> None:
        self.joined: list[Connection] = []
        self.taken: list[Message] = []
        self.faults: list[str] = []
        self._incarnations = itertools.count()
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(lambda loop, context: self.faults.append(repr(context)))
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.server = ControlServer(SECRET, on_join=self._on_join, handshake_timeout_s=HANDSHAKE_S)
        self.address = asyncio.run_coroutine_threadsafe(self.server.listen_unix(path), self._loop).result(DEADLINE_S)

    def close(self) -> None:
        self.call(self.server.close)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive(), "the loop hangs"
        self._loop.close()

    def call(self, function: Any, *args: Any) -> Any:
        async def on_loop() -> Any:
            return function(*args)

        return asyncio.run_coroutine_threadsafe(on_loop(), self._loop).result(DEADLINE_S)

    def connect(self) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(DEADLINE_S)
        sock.connect(self.address.removeprefix("unix:"))
        return sock

    def expect(self) -> int:
        """Slot 0 is replaced: a new incarnation may join, once."""
        incarnation = next(self._incarnations)
        self.call(self.server.expect, 0, incarnation)
        return incarnation

    def join(self) -> ControlClient:
        incarnation, before = self.expect(), len(self.joined)
        letter = RankBootstrap(
            address=self.address, secret=SECRET, slot=0, host="h", incarnation=incarnation, connect_timeout_s=DEADLINE_S
        )
        rank = ControlClient.connect(letter, signature={"build": "1"})
        _wait(lambda: len(self.joined) > before)  # the server's side of it comes after its welcome
        return rank

    def check(self) -> None:
        """A good rank joins and is heard, and nothing went wrong in the loop."""
        with self.join() as rank:
            rank.send({"type": "hello from a good rank", "id": 7, "generation": 0})
            _wait(lambda: any(m["type"] == "hello from a good rank" for m in self.taken))
            self.taken.clear()
        assert not self.faults, self.faults

    def _on_join(self, connection: Connection) -> None:
        connection.on_message = self.taken.append
        self.joined.append(connection)


@pytest.fixture(scope="module")
def channel(tmp_path_factory) -> Iterator[Channel]:
    made = Channel(str(tmp_path_factory.mktemp("c") / "c"))
    made.check()  # the first rank says what build all others must have
    yield made
    made.close()


def _wait(condition: Any) -> None:
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end, "not within the deadline"
        time.sleep(0.002)


def _frame(payload: bytes) -> bytes:
    return struct.pack(">I", len(payload)) + payload


def _until_closed(sock: socket.socket) -> list[Message]:
    """What the server says until it closes; it must, in time."""
    reader, said = FrameReader(), []
    with contextlib.suppress(ConnectionResetError, BrokenPipeError):
        while received := sock.recv_into(reader.get_buffer()):
            said += [decode(payload) for payload in reader.payloads(received)]
    return said


def _send(sock: socket.socket, data: bytes) -> None:
    with contextlib.suppress(ConnectionResetError, BrokenPipeError):  # it may cut us off in the middle
        sock.sendall(data)
        sock.shutdown(socket.SHUT_WR)


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=8)
    | st.binary(max_size=40),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8) | st.integers(0, 9), inner, max_size=4)
    ),
    max_leaves=8,
)  # fmt: skip
KNOCK = {"type": "knock", "protocol": auth.PROTOCOL_VERSION, "slot": 0, "incarnation": 0, "nonce": bytes(32)}
HELLO = {"type": "hello", "identity": msgpack.packb({"host": "h", "pid": 1}), "proof": bytes(32)}
#: a handshake message in which some fields are something else, or absent
CHANGED = st.builds(
    lambda base, changes, absent: msgpack.packb({k: v for k, v in {**base, **changes}.items() if k not in absent}),
    st.sampled_from([KNOCK, HELLO]),
    st.dictionaries(st.sampled_from([*KNOCK, *HELLO, "generation", "id"]), JUNK, max_size=3),
    st.sets(st.sampled_from([*KNOCK, *HELLO]), max_size=2),
)
PIECES = st.one_of(
    st.binary(max_size=200),
    st.binary(max_size=200).map(_frame),
    CHANGED.map(_frame),
    st.just(_frame(msgpack.packb(KNOCK))),
    st.integers(0, 2**32 - 1).map(lambda n: struct.pack(">I", n)),
)


@FUZZ
@given(pieces=st.lists(PIECES, max_size=4), cut=st.integers(0, 2**16))
@example(pieces=[struct.pack(">I", MAX_HANDSHAKE_BYTES + 1)], cut=2**16)
@example(pieces=[_frame(b"\x91" * 8000)], cut=2**16)
@example(pieces=[_frame(b"\xdf\xff\xff\xff\xff")], cut=2**16)
@example(pieces=[_frame(msgpack.packb(KNOCK)), _frame(msgpack.packb(HELLO))], cut=60)
@example(pieces=[_frame(msgpack.packb({**KNOCK, "slot": 2**64 - 1}))], cut=2**16)
def test_strangers(channel, pieces, cut):
    """Random bytes, changed messages, in any order, cut off anywhere."""
    before = len(channel.joined)
    with channel.connect() as sock:
        _send(sock, b"".join(pieces)[:cut])
        said = _until_closed(sock)
    assert all(message["type"] in ("challenge", "refused") for message in said)
    assert len(channel.joined) == before
    assert not channel.faults, channel.faults


def _hello(channel: Channel, sock: socket.socket, identity: bytes, *, secret: bytes = SECRET) -> bytes:
    """Knocks, and makes the answer to the challenge."""
    incarnation = channel.expect()
    sock.sendall(_frame(msgpack.packb({**KNOCK, "incarnation": incarnation})))
    reader = FrameReader()
    (challenge,) = [decode(p) for p in reader.payloads(sock.recv_into(reader.get_buffer()))]
    proof = auth.proof(
        secret, "rank", rank_nonce=bytes(32), coordinator_nonce=challenge["nonce"], slot=0, incarnation=incarnation,
        claims=identity,
    )  # fmt: skip
    return b"".join(encode({"type": "hello", "identity": identity, "proof": proof}))


IDENTITY = st.dictionaries(
    st.sampled_from(["host", "pid", "pool", "local_rank", "signature", "channel", "slot", "x"]),
    JUNK | st.sampled_from(["control", "beats"]),
    max_size=6,
).map(msgpack.packb) | st.binary(max_size=60)  # fmt: skip


@settings(FUZZ, max_examples=60)
@given(identity=IDENTITY, known=st.booleans())
@example(identity=msgpack.packb({"host": "h", "channel": "control", "signature": 3}), known=True)
@example(identity=msgpack.packb({"host": None, "channel": [1], "signature": {}}), known=True)
@example(identity=b"\x81" * 7000, known=True)
def test_identities(channel, identity, known):
    """Whoever knows the secret may still say nonsense about itself; whoever does not is refused for that alone."""
    before = len(channel.joined)
    with channel.connect() as sock:
        _send(sock, _hello(channel, sock, identity, secret=SECRET if known else bytes(32)))
        said = _until_closed(sock)
    if not known:
        assert "does not know this pool's secret" in said[-1]["reason"]
        assert len(channel.joined) == before
    assert not channel.faults, channel.faults
    channel.check()


@settings(FUZZ, max_examples=60)
@given(pieces=st.lists(PIECES | st.builds(lambda body: _frame(msgpack.packb(body)), JUNK), min_size=1, max_size=4))
@example(pieces=[struct.pack(">I", MAX_FRAME_BYTES + 1)])
@example(pieces=[_frame(msgpack.packb({"type": "result", "generation": -5, "id": 1}))])
@example(pieces=[_frame(msgpack.packb({"type": "result", "generation": "x", "id": 1}))])
@example(pieces=[_frame(msgpack.packb({"type": "result", "id": []})), b"\x00"])
def test_a_joined_rank_that_goes_mad(channel, pieces):
    with channel.join() as rank:
        _send(rank._sock, b"".join(pieces))
        with pytest.raises(ConnectionClosedError):
            rank.recv()
    assert not channel.faults, channel.faults
    channel.check()


def test_slow_strangers_are_cut_off_and_nobody_waits_for_them(channel):
    """Forty that send a byte now and then: a rank joins beside them at once, and they are gone after the timeout."""
    frame = _frame(msgpack.packb(KNOCK))
    begin = time.monotonic()
    with contextlib.ExitStack() as stack:
        slow = [stack.enter_context(channel.connect()) for _ in range(40)]
        for byte in frame[:5]:
            for sock in slow:
                _send_byte(sock, byte)
            channel.check()
        assert time.monotonic() - begin < soon(HANDSHAKE_S + 2)
        for sock in slow:
            assert _until_closed(sock)[-1]["type"] == "refused"
    assert time.monotonic() - begin < soon(HANDSHAKE_S + 5)


def _send_byte(sock: socket.socket, byte: int) -> None:
    with contextlib.suppress(ConnectionResetError, BrokenPipeError):
        sock.send(bytes([byte]))


def test_a_rank_joins_once(channel):
    """Two with the same slot and incarnation, and one of an incarnation before: the first is kept."""
    with channel.join() as rank:
        connection = channel.joined[-1]
        info = connection.info
        for incarnation in (info.incarnation, info.incarnation - 1):
            letter = RankBootstrap(
                address=channel.address, secret=SECRET, slot=0, host="h", incarnation=incarnation,
                connect_timeout_s=DEADLINE_S,
            )  # fmt: skip
            with pytest.raises(HandshakeError, match=r"joined already|old incarnation"):
                ControlClient.connect(letter, signature={"build": "1"})
        channel.call(connection.send, {"type": "ping", "id": 1})
        assert rank.recv()["type"] == "ping"


@settings(FUZZ, max_examples=60)
@given(pieces=st.lists(PIECES, min_size=1, max_size=3))
@example(pieces=[_frame(msgpack.packb({"type": "challenge", "nonce": 3, "proof": None}))])
@example(pieces=[struct.pack(">I", 2**32 - 1)])
def test_a_mad_coordinator_ends_the_rank_with_a_reason(tmp_path_factory, pieces):
    """The rank's side: whatever answers its knock, it raises one of our errors, in time."""
    path = str(tmp_path_factory.mktemp("m") / "c")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()

        def answer() -> None:
            sock, _ = listener.accept()
            with sock:
                _send(sock, b"".join(pieces))
                _until_gone(sock)

        thread = threading.Thread(target=answer)
        thread.start()
        letter = RankBootstrap(address=f"unix:{path}", secret=SECRET, slot=0, host="h", connect_timeout_s=DEADLINE_S)
        with pytest.raises(EPRuntimeError):
            ControlClient.connect(letter, signature={"build": "1"})
        thread.join(DEADLINE_S)
        assert not thread.is_alive()


def _until_gone(sock: socket.socket) -> None:
    sock.settimeout(DEADLINE_S)
    with contextlib.suppress(ConnectionResetError):
        while sock.recv(4096):
            pass
