"""Progress stamps: what they say, and that they are sent whatever the interpreter does."""

from __future__ import annotations

import contextlib
import ctypes
import socket
import time
from collections.abc import Callable

import pytest

from epruntime.comm.beats import Publisher, ThreadPublisher
from epruntime.comm.frames import FrameReader, decode
from epruntime.comm.progress import NOTE_BYTES, STAMP_BYTES, Collective, Phase, Stamp, Stamps, beat_frame
from epruntime.errors import ProtocolError
from epruntime.ops import extension
from epruntime.testing.patience import PATIENCE_S

INTERVAL_S = 0.02

Make = Callable[[socket.socket, Stamps], Publisher]


def native(sock: socket.socket, stamps: Stamps) -> Publisher:
    module = extension.load()
    if module is None:
        pytest.skip(extension.why_absent())
    publisher: Publisher = module.ProgressPublisher(
        fd=sock.fileno(), cells=stamps.memory, frame=beat_frame(), interval_s=INTERVAL_S
    )
    sock.detach()
    return publisher


def thread(sock: socket.socket, stamps: Stamps) -> Publisher:
    return ThreadPublisher(sock, stamps, interval_s=INTERVAL_S)


def _received(sock: socket.socket, enough: Callable[[list[Stamp]], bool]) -> list[Stamp]:
    """All stamps until there are enough of them, or the peer closes; within PATIENCE_S."""
    reader, stamps = FrameReader(), []
    deadline = time.monotonic() + PATIENCE_S
    while (reader.in_frame or not enough(stamps)) and (left := deadline - time.monotonic()) > 0:
        sock.settimeout(left)
        with contextlib.suppress(TimeoutError):
            count = sock.recv_into(reader.get_buffer())
            if count == 0:
                break
            stamps += [Stamp.from_bytes(decode(payload)["stamp"]) for payload in reader.payloads(count)]
    assert not reader.in_frame
    return stamps


def test_words_of_a_stamp():
    stamps = Stamps()
    assert str(stamps.read()) == "idle"
    stamps.enter(Phase.CONFIGURE)
    stamps.join(4)
    stamps.wait(Collective.RENDEZVOUS)
    assert str(stamps.read()) == "configure, waiting in rendezvous 1"
    stamps.go_on()
    stamps.enter(Phase.LOAD)
    stamps.note("model.layers.3.mlp.gate.weight")
    assert str(stamps.read()) == "load (model.layers.3.mlp.gate.weight)"
    stamps.enter(Phase.FORWARD, step=17)
    assert str(stamps.read()) == "step 17"
    stamps.at_layer(3)
    stamps.wait(Collective.COMBINE)
    assert str(stamps.read()) == "step 17, layer 3, waiting in combine 2"
    assert stamps.read().waits
    stamps.go_on()
    stamps.sampling()
    assert str(stamps.read()) == "step 17, sampling after layer 3"
    assert not stamps.read().waits
    stamps.enter(Phase.IDLE)
    assert str(stamps.read()) == "idle"
    assert stamps.read().generation == 4
    stamps.join(5)
    assert stamps.read().sequence == 0, "every rank of a generation counts its waits from there"


def test_every_change_is_counted():
    stamps, counts = Stamps(), [0]
    for change in (
        lambda: stamps.enter(Phase.LOAD), lambda: stamps.note("x"), lambda: stamps.join(1), lambda: stamps.at_layer(0),
        lambda: stamps.wait(Collective.COUNTS), stamps.go_on, stamps.sampling,
    ):  # fmt: skip
        change()
        counts.append(stamps.read().count)
    assert counts == list(range(8))


def test_long_notes_keep_their_end():
    stamps = Stamps()
    stamps.note("a" * 100 + "end")
    assert stamps.read().note == "a" * (NOTE_BYTES - 3) + "end"
    stamps.note("ü" * 100)  # two bytes each, cut in the middle of none
    assert stamps.read().note == "ü" * (NOTE_BYTES // 2)
    stamps.note("short")
    assert stamps.read().note == "short"


@pytest.mark.parametrize("data", [b"", bytes(STAMP_BYTES - 1), bytes(STAMP_BYTES + 1), b"\xff" * STAMP_BYTES])
def test_what_is_no_stamp_is_refused(data):
    with pytest.raises(ProtocolError, match="progress stamp"):
        Stamp.from_bytes(data)


@pytest.mark.parametrize("make", [native, thread])
def test_stamps_arrive_until_stopped(make: Make):
    ours, theirs = socket.socketpair()
    stamps = Stamps()
    with ours:
        publisher = make(theirs, stamps)
        stamps.enter(Phase.FORWARD, step=9)
        stamps.wait(Collective.DISPATCH)
        got = _received(ours, lambda got: len(got) >= 5 and got[-1] == stamps.read())
        assert len(got) >= 5
        assert got[-1] == stamps.read()
        assert str(got[-1]) == "step 9, waiting in dispatch 1"
        assert publisher.running
        publisher.stop()
        publisher.stop()
        assert not publisher.running
        assert publisher.num_sent >= len(got)
        ours.settimeout(PATIENCE_S)
        while ours.recv(65536):  # what was under way, then the end
            pass


@pytest.mark.parametrize("make", [native, thread])
def test_it_ends_by_itself_when_the_peer_is_gone(make: Make):
    ours, theirs = socket.socketpair()
    publisher = make(theirs, Stamps())
    ours.close()
    deadline = time.monotonic() + PATIENCE_S
    while publisher.running and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not publisher.running
    publisher.stop()


@pytest.mark.parametrize("make", [native, thread])
def test_a_peer_that_does_not_read_is_not_waited_for_and_gets_whole_frames(make: Make):
    ours, theirs = socket.socketpair()
    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)  # the least that there is
    stamps = Stamps()
    with ours:
        publisher = make(theirs, stamps)
        deadline, before = time.monotonic() + 20, -1
        while publisher.num_sent != before and time.monotonic() < deadline:  # until there is no more room
            before = publisher.num_sent
            time.sleep(10 * INTERVAL_S)
        assert publisher.running
        stamps.note("later")
        got = _received(ours, lambda got: len(got) > before and got[-1].note == "later")
        assert len(got) > before
        assert got[-1].note == "later"
        publisher.stop()


def test_the_native_thread_needs_no_lock_of_the_interpreter():
    ours, theirs = socket.socketpair()
    with ours:
        publisher = native(theirs, Stamps())
        before = publisher.num_sent
        ctypes.PyDLL(None).usleep(800_000)  # keeps the lock
        during = publisher.num_sent - before
        publisher.stop()
    assert during > 2, "about 40 at 20 ms"


def test_arguments_of_the_native_publisher_are_checked():
    module = extension.load()
    if module is None:
        pytest.skip(extension.why_absent())
    for changes, words in (
        ({"fd": -1}, "fd = -1"),
        ({"interval_s": 0.0}, "interval_s = 0"),
        ({"frame": b"short"}, "a frame of 5 bytes has no room"),
        ({"cells": memoryview(bytearray(16))[:15]}, "no aligned int64"),
    ):
        arguments = {"fd": 0, "cells": Stamps().memory, "frame": beat_frame(), "interval_s": 1.0, **changes}
        with pytest.raises(ValueError, match=words):
            module.ProgressPublisher(**arguments)
