"""Calls from rank to rank: who answers, who does not, and that nothing is left."""

from __future__ import annotations

import socket
import threading
import time

import pytest

from epruntime.testing.patience import soon
from epruntime.worker.peer_calls import GREETING, Answer, Listener, Peer, call_all

NONCE, OTHER = b"n" * 16, b"o" * 16


def _peer(slot: int, port: int, host: str = "127.0.0.1") -> Peer:
    return Peer(slot=slot, host=host, port=port)


def test_each_call_is_answered_by_its_rank() -> None:
    listeners = [Listener("127.0.0.1", nonce=NONCE, slot=slot) for slot in range(5)]
    try:
        peers = [_peer(slot, listener.port) for slot, listener in enumerate(listeners)]
        assert call_all(peers, nonce=NONCE, timeout_s=30) == [Answer(slot=slot) for slot in range(5)]
        assert call_all(peers[:2], nonce=NONCE, timeout_s=30) == [Answer(slot=0), Answer(slot=1)]  # and again
        # another preflight's rank, and one that was called by the name of another
        assert call_all(peers[:1], nonce=OTHER, timeout_s=30) == [Answer(slot=-1)]
        assert call_all([_peer(4, listeners[3].port)], nonce=NONCE, timeout_s=30) == [Answer(slot=3)]
    finally:
        for listener in listeners:
            listener.close()
            listener.close()
    (answer,) = call_all([_peer(0, listeners[0].port)], nonce=NONCE, timeout_s=30)
    assert "refused" in answer.error


def test_a_listener_that_is_closed_leaves_no_thread() -> None:
    before = threading.active_count()
    Listener("127.0.0.1", nonce=NONCE, slot=0).close()
    assert threading.active_count() == before


def test_ipv6() -> None:
    if not socket.has_ipv6:
        pytest.skip("this system has no IPv6")
    try:
        listener = Listener("::1", nonce=NONCE, slot=2)
    except OSError as error:
        pytest.skip(f"no IPv6 loopback: {error}")
    try:
        assert call_all([_peer(2, listener.port, "::1")], nonce=NONCE, timeout_s=30) == [Answer(slot=2)]
    finally:
        listener.close()


def test_silence_refusals_and_strangers_are_told_within_the_deadline() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, socket.create_server(("127.0.0.1", 0)) as stranger:
        closed = socket.create_server(("127.0.0.1", 0))
        free_port = closed.getsockname()[1]
        closed.close()

        def talk() -> None:
            caller, _ = stranger.accept()
            with caller:
                caller.sendall(b"SSH-2.0-OpenSSH_9.9 and more than a greeting")

        thread = threading.Thread(target=talk, daemon=True)
        thread.start()
        began = time.monotonic()
        answers = call_all(
            [
                _peer(0, silent.getsockname()[1]),
                _peer(1, free_port),
                _peer(2, stranger.getsockname()[1]),
                _peer(-1, silent.getsockname()[1]),
                _peer(3, 1, "no-such-host.invalid"),
            ],
            nonce=NONCE,
            timeout_s=1.0,
        )
        assert time.monotonic() - began < soon(4)
        thread.join(timeout=30)
    assert answers[0].error == "no answer within 1 s"
    assert "refused" in answers[1].error
    assert answers[2] == Answer(slot=-1)
    assert answers[3] == Answer()  # of the store a connection is enough
    assert answers[4].error


def test_a_greeting_in_pieces_is_put_together() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def dribble() -> None:
            caller, _ = listener.accept()
            with caller:
                for byte in GREETING.pack(NONCE, 6):
                    caller.sendall(bytes([byte]))
                    time.sleep(0.002)

        thread = threading.Thread(target=dribble, daemon=True)
        thread.start()
        assert call_all([_peer(6, listener.getsockname()[1])], nonce=NONCE, timeout_s=30) == [Answer(slot=6)]
        thread.join(timeout=30)


def test_an_address_that_is_not_this_hosts() -> None:
    with pytest.raises(OSError, match="assign"):
        Listener("192.0.2.1", nonce=NONCE, slot=0)  # TEST-NET-1: nobody's address


def test_a_caller_that_cannot_be_taken_ends_no_listener(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when the process has no file left for a moment, or a caller is gone before it is taken."""
    failures = [OSError(24, "Too many open files"), ConnectionAbortedError()]
    accept = socket.socket.accept

    def failing(self: socket.socket) -> tuple[socket.socket, object]:
        if failures and threading.current_thread() is not threading.main_thread():
            raise failures.pop()
        return accept(self)

    monkeypatch.setattr(socket.socket, "accept", failing)
    listener = Listener("127.0.0.1", nonce=NONCE, slot=3)
    try:
        assert call_all([_peer(3, listener.port)], nonce=NONCE, timeout_s=30) == [Answer(slot=3)]
        assert failures == []
    finally:
        listener.close()
