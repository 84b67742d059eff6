"""The control channel over real sockets: who is let in, who is not, and that a refusal hurts nobody else."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import struct
import threading
from dataclasses import replace

import msgpack
import pytest
from control_harness import SECRET, SIGNATURE, harness, run

from epruntime.comm import auth
from epruntime.comm.control import ControlClient, RankBootstrap
from epruntime.comm.frames import MAX_HANDSHAKE_BYTES, FrameReader, decode, encode
from epruntime.errors import ConnectionClosedError, HandshakeError, ProtocolError


async def until(condition) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.01)


def raw_connect(address: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(30)
    sock.connect(address.removeprefix("unix:"))
    return sock


def raw_read(sock: socket.socket) -> list[dict]:
    """All messages until the peer closes."""
    reader, out = FrameReader(), []
    while n := sock.recv_into(reader.get_buffer()):
        out += [decode(p) for p in reader.payloads(n)]
    return out


@pytest.mark.parametrize("kind", ["unix", "tcp"])
def test_join_and_talk(tmp_path, kind):
    async def body():
        async with harness(tmp_path, kind) as h:
            client = await h.connect(local_rank=3)
            info = h.joined[0].info
            assert (info.slot, info.incarnation, info.host, info.local_rank) == (0, 0, "h", 3)
            assert info.signature == SIGNATURE
            await h.echo_works(client, h.joined[0])
            large = {"type": "large", "id": 2, "data": bytes(range(256)) * 40_000}  # 10 MB, both ways
            h.joined[0].send(large)
            got = await asyncio.to_thread(client.recv)
            assert got["data"] == large["data"]
            await asyncio.to_thread(client.send, got)
            assert (await asyncio.wait_for(h.inbox.get(), 30))["data"] == large["data"]
            client.close()
            client.close()
            await until(lambda: len(h.ends) > 0)
            assert h.ends == ["closed by the peer"]
            with pytest.raises(ConnectionClosedError):
                h.joined[0].send({"type": "ping"})

    run(body())


def test_sending_from_many_threads_keeps_frames_whole(tmp_path):
    async def body():
        async with harness(tmp_path) as h:
            client = await h.connect()
            sizes = [10, 20_000, 300_000]

            def send(number: int) -> None:
                for size in sizes * 3:
                    client.send({"type": "t", "id": number, "data": bytes([number]) * size})

            threads = [threading.Thread(target=send, args=(n,)) for n in range(4)]
            for thread in threads:
                thread.start()
            for _ in range(4 * 9):
                message = await asyncio.wait_for(h.inbox.get(), 30)
                assert set(message["data"]) == {message["id"]}
            for thread in threads:
                thread.join()
            client.close()

    run(body())


def test_end_of_stream_raises(tmp_path):
    async def body():
        async with harness(tmp_path) as h:
            client = await h.connect()
            h.joined[0].close()
            with pytest.raises(ConnectionClosedError, match="closed the connection"):
                await asyncio.to_thread(client.recv)
            client.close()

    run(body())


REFUSALS = {
    "wrong secret": ({"secret": bytes(32)}, SIGNATURE, "does not know this pool's secret"),
    "unknown slot": ({"slot": 7}, SIGNATURE, "slot 7 is not part of this pool"),
    "old incarnation": ({"slot": 1}, SIGNATURE, "old incarnation 0 of slot 1: this pool expects 2"),
    "future incarnation": ({"slot": 1, "incarnation": 9}, SIGNATURE, "unknown incarnation 9"),
    "taken slot": ({"slot": 0}, SIGNATURE, "slot 0, incarnation 0 has joined already"),
    "other build": (
        {"slot": 1, "incarnation": 2, "host": "other"},
        {"extension": "plain"},
        "between rank 0 on host h and rank 1 on host other .*'native:1' against 'plain'",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refused_with_a_reason_and_without_harm(tmp_path, case, caplog):
    changes, signature, reason = REFUSALS[case]

    async def body():
        async with harness(tmp_path) as h:
            first = await h.connect()
            h.server.expect(1, 2)
            with pytest.raises(HandshakeError, match=reason):
                await h.connect(signature, **changes)
            assert len(h.joined) == 1
            await h.echo_works(first, h.joined[0])
            # the slot itself is not burnt
            second = await h.connect(slot=1, incarnation=2)
            await h.echo_works(second, h.joined[1])
            await until(lambda: len(h.refused) >= (case != "wrong secret"))
            # only those that know the secret are the owner's business
            assert [slot for slot, _ in h.refused] == ([] if case == "wrong secret" else [changes["slot"]])

    with caplog.at_level(logging.DEBUG):
        run(body())
    trace = "hold another pool's secret" if case == "wrong secret" else "refused peer"
    assert any(trace in record.getMessage() for record in caplog.records if record.levelno == logging.WARNING)
    for record in caplog.records:
        assert SECRET.hex() not in record.getMessage()
        assert repr(SECRET) not in record.getMessage()


def test_a_rank_that_left_is_not_let_in_again(tmp_path):
    async def body():
        async with harness(tmp_path) as h:
            (await h.connect()).close()
            await until(lambda: len(h.ends) > 0)
            with pytest.raises(HandshakeError, match="has joined already"):
                await h.connect()
            h.server.expect(0, 1)
            (await h.connect(incarnation=1)).close()

    run(body())


def knock(**changes) -> bytes:
    fields = {"type": "knock", "protocol": auth.PROTOCOL_VERSION, "slot": 0, "incarnation": 0, "nonce": bytes(32)}
    return b"".join(encode(fields | changes))


STRANGERS = {
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "oversized": struct.pack(">I", MAX_HANDSHAKE_BYTES + 1),
    "not msgpack": struct.pack(">I", 1) + b"\xc1",
    "not a map": struct.pack(">I", 1) + b"\x01",
    "no knock": b"".join(encode({"type": "hello"})),
    "other protocol": knock(protocol=999),
    "negative slot": knock(slot=-1),
    "huge slot": knock(slot="0" * 5000),
    "short nonce": knock(nonce=b"x"),
    "no proof": knock() + b"".join(encode({"type": "hello", "identity": b"\x80"})),
    "proof of another type": knock() + b"".join(encode({"type": "hello", "identity": b"\x80", "proof": "x" * 32})),
    "early command": knock() + b"".join(encode({"type": "result", "id": 1})),
}


@pytest.mark.parametrize("case", STRANGERS)
def test_strangers_are_cut_off_and_others_do_not_notice(tmp_path, case, caplog):
    async def body():
        async with harness(tmp_path) as h:
            client = await h.connect()
            with raw_connect(h.address) as sock:
                sock.sendall(STRANGERS[case])
                answers = await asyncio.to_thread(raw_read, sock)
            assert answers[-1]["type"] == "refused"
            assert answers[-1]["reason"]
            assert "no handshake within" not in answers[-1]["reason"], "it was waited for, not refused"
            await h.echo_works(client, h.joined[0])
            assert len(h.joined) == 1

    with caplog.at_level(logging.WARNING):
        run(body())
    assert any("refused peer" in record.message for record in caplog.records)


def test_a_silent_stranger_is_cut_off_in_time(tmp_path):
    async def body():
        async with harness(tmp_path, handshake_timeout_s=0.2) as h:
            with raw_connect(h.address) as sock:
                answers = await asyncio.wait_for(asyncio.to_thread(raw_read, sock), 30)
            assert "no handshake within 0.2 s" in answers[-1]["reason"]

    run(body())


def test_the_number_of_strangers_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr("epruntime.comm.control_server.MAX_STRANGERS", 3)

    async def body():
        async with harness(tmp_path) as h, contextlib.AsyncExitStack() as stack:
            for _ in range(3):
                stack.enter_context(raw_connect(h.address))
            await asyncio.sleep(0.1)
            with raw_connect(h.address) as sock:
                assert await asyncio.to_thread(raw_read, sock) == []

    run(body())


def test_a_recorded_handshake_cannot_be_played_again(tmp_path):
    """The proof covers the coordinator's fresh nonce."""

    async def body():
        async with harness(tmp_path) as h:
            with raw_connect(h.address) as sock:
                sock.sendall(knock())
                reader = FrameReader()
                n = await asyncio.to_thread(sock.recv_into, reader.get_buffer())
                (challenge,) = [decode(p) for p in reader.payloads(n)]
                identity = msgpack.packb({"host": "h", "pid": 1, "signature": {}})
                right = auth.proof(
                    SECRET,
                    "rank",
                    rank_nonce=bytes(32),
                    coordinator_nonce=challenge["nonce"],
                    slot=0,
                    incarnation=0,
                    claims=identity,
                )
                hello = b"".join(encode({"type": "hello", "identity": identity, "proof": right}))
            await asyncio.sleep(0.1)
            with raw_connect(h.address) as sock:  # the same bytes on a new connection
                sock.sendall(knock() + hello)
                assert (await asyncio.to_thread(raw_read, sock))[-1]["type"] == "refused"
            # the coordinator's own proof, sent back to it, is no rank's proof
            with raw_connect(h.address) as sock:
                sock.sendall(knock())
                reader = FrameReader()
                n = await asyncio.to_thread(sock.recv_into, reader.get_buffer())
                (challenge,) = [decode(p) for p in reader.payloads(n)]
                sock.sendall(b"".join(encode({"type": "hello", "identity": b"", "proof": challenge["proof"]})))
                assert (await asyncio.to_thread(raw_read, sock))[-1]["type"] == "refused"
            assert h.joined == []

    run(body())


def test_the_proof_covers_the_claims():
    fields = {"rank_nonce": b"a" * 32, "coordinator_nonce": b"b" * 32, "slot": 0, "incarnation": 0}
    proofs = {
        auth.proof(SECRET, "rank", **fields, claims=b"x"),
        auth.proof(SECRET, "rank", **fields, claims=b"y"),
        auth.proof(SECRET, "coordinator", **fields, claims=b"x"),
        auth.proof(SECRET, "rank", **fields | {"slot": 1}, claims=b"x"),
        auth.proof(SECRET, "rank", **fields | {"incarnation": 1}, claims=b"x"),
        auth.proof(SECRET[::-1], "rank", **fields, claims=b"x"),
        auth.proof(SECRET, "rank", **fields | {"rank_nonce": b"b" * 32, "coordinator_nonce": b"a" * 32}, claims=b"x"),
    }
    assert len(proofs) == 7
    assert not auth.matches(b"x" * 32, None)


def test_an_impostor_coordinator_gets_no_hello(tmp_path):
    """A rank proves nothing, and names nothing of itself but its slot, to one who does not know the secret."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(tmp_path / "c"))
    listener.listen()
    seen: list[dict] = []

    def impostor() -> None:
        sock, _ = listener.accept()
        sock.settimeout(30)
        with sock:
            reader = FrameReader()
            n = sock.recv_into(reader.get_buffer())
            seen.extend(decode(p) for p in reader.payloads(n))
            sock.sendall(b"".join(encode({"type": "challenge", "nonce": bytes(32), "proof": bytes(32)})))
            seen.extend(raw_read(sock))

    thread = threading.Thread(target=impostor)
    thread.start()
    letter = RankBootstrap(address=f"unix:{tmp_path}/c", secret=SECRET, slot=0, host="h", connect_timeout_s=30)
    with pytest.raises(HandshakeError, match="does not know this pool's secret"):
        ControlClient.connect(letter, signature=SIGNATURE)
    thread.join(5)
    listener.close()
    assert [m["type"] for m in seen] == ["knock"]


def test_a_peer_that_the_kernel_gives_up_on_is_gone():
    """A cut cable: keepalive ends the connection with ETIMEDOUT, which Python calls a TimeoutError."""
    letter = RankBootstrap(address="tcp:10.0.0.1:9", secret=SECRET, slot=0, host="h")

    class Cut:
        def recv_into(self, buffer):
            raise TimeoutError(110, "Connection timed out")

        def sendall(self, data):
            raise TimeoutError(110, "Connection timed out")

        def gettimeout(self):
            return None

    client = ControlClient(Cut(), letter)
    with pytest.raises(ConnectionClosedError, match=r"tcp:10\.0\.0\.1:9: .*Connection timed out"):
        client.recv()
    with pytest.raises(ConnectionClosedError, match="Connection timed out"):
        client.send({"type": "result", "id": 1})


def test_nobody_listens():
    letter = RankBootstrap(address="unix:/nonexistent/c", secret=SECRET, slot=0, host="h", connect_timeout_s=30)
    with pytest.raises(HandshakeError, match="no coordinator listens at unix:/nonexistent/c"):
        ControlClient.connect(letter, signature=SIGNATURE)
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
    letter = replace(letter, address=f"tcp:127.0.0.1:{port}", connect_timeout_s=0.3)
    with pytest.raises(HandshakeError, match="no coordinator listens"):
        ControlClient.connect(letter, signature=SIGNATURE)


def test_a_joined_rank_that_sends_rubbish_is_cut_off_alone(tmp_path):
    async def body():
        async with harness(tmp_path) as h:
            bad, good = await h.connect(), await h.connect(slot=1)
            bad._sock.sendall(struct.pack(">I", 0xFFFFFFFF))
            with pytest.raises(ConnectionClosedError):
                await asyncio.to_thread(bad.recv)
            await until(lambda: len(h.ends) > 0)
            assert len(h.ends) == 1
            assert "above the limit" in h.ends[0]
            await h.echo_works(good, h.joined[1])

    run(body())


def test_old_generations_are_refused_both_ways(tmp_path, caplog):
    async def body():
        async with harness(tmp_path) as h:
            client = await h.connect()
            rank = h.joined[0]
            rank.send({"type": "configure", "id": 1, "generation": 5})
            assert (await asyncio.to_thread(client.recv))["type"] == "configure"
            assert client.generation == 5
            client.send({"type": "result", "id": 9, "generation": 4})  # of the generation before: dropped
            client.send({"type": "configured", "id": 1})
            assert (await asyncio.wait_for(h.inbox.get(), 30))["type"] == "configured"
            assert rank.num_stale == 1

            rank.send({"type": "plan", "id": 2, "generation": 4})  # refused by the rank, which says so
            rank.send({"type": "plan", "id": 3})
            assert (await asyncio.to_thread(client.recv))["id"] == 3
            answer = await asyncio.wait_for(h.inbox.get(), 30)
            assert (answer["type"], answer["id"], answer["kind"]) == ("failed", 2, "ProtocolError")

    run(body())


def test_bootstrap_round_trip_and_its_secret_stays_out_of_sight():
    letter = RankBootstrap(address="unix:/x", secret=SECRET, slot=3, host="h", threads=2)
    assert RankBootstrap.from_bytes(letter.to_bytes()) == letter
    assert repr(SECRET) not in repr(letter)
    assert "secret" not in repr(letter)
    with pytest.raises(ProtocolError, match="started by a launcher"):
        RankBootstrap.from_bytes(b"")


def test_a_last_word_comes_through_whatever_is_unread(tmp_path) -> None:
    """A connection that is closed with something unread is reset, and what the other side has not read yet is lost."""

    async def scenario() -> None:
        async with harness(tmp_path, "tcp") as h:
            with await h.connect() as client:
                (connection,) = h.joined
                client.send({"type": "early"})  # this loop, which does not run in between, has not read it
                connection.send({"type": "end"})
                connection.end_messages()
                connection.end_messages()
                with pytest.raises(ConnectionClosedError, match="rank 0 on host h: the last message"):
                    connection.send({"type": "too late"})
                client.send({"type": "late"})
                assert client.recv()["type"] == "end"
                with pytest.raises(ConnectionClosedError, match="closed the connection"):
                    client.recv()
                assert [(await asyncio.wait_for(h.inbox.get(), 30))["type"] for _ in range(2)] == ["early", "late"]
            while not h.ends:
                await asyncio.sleep(0.01)

    run(scenario())
