"""Frames: what goes in comes out, however the stream is cut; what is malformed is refused, and nothing else happens."""

from __future__ import annotations

import contextlib
import struct

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epruntime.comm.frames import MAX_FRAME_BYTES, SMALL_FRAME_BYTES, FrameReader, Message, decode, encode
from epruntime.errors import EPRuntimeError, ProtocolError


def read_all(reader: FrameReader, stream: bytes, cuts: list[int]) -> list[Message]:
    """Feeds the stream in pieces of the given sizes (in turn), as a socket might."""
    out, at, turn = [], 0, 0
    while at < len(stream):
        buffer = reader.get_buffer()
        assert len(buffer) > 0
        size = min(len(buffer), cuts[turn % len(cuts)], len(stream) - at)
        buffer[:size] = stream[at : at + size]
        at, turn = at + size, turn + 1
        out += [decode(payload) for payload in reader.payloads(size)]
    return out


def test_header_is_a_big_endian_length():
    (frame,) = encode({"type": "a"})
    assert frame == struct.pack(">I", len(frame) - 4) + msgpack.packb({"type": "a"})


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.sampled_from([0, 1, 100, SMALL_FRAME_BYTES, 65_531, 65_536, 70_000, 200_000]), max_size=5),
    cuts=st.lists(st.integers(1, 90_000), min_size=1, max_size=4),
)
def test_any_cut_of_the_stream_gives_the_same_messages(sizes, cuts):
    messages = [{"type": "m", "id": i, "data": bytes([i]) * size} for i, size in enumerate(sizes)]
    stream = b"".join(b"".join(encode(m)) for m in messages)
    reader = FrameReader()
    assert read_all(reader, stream, cuts) == messages
    assert not reader.in_frame


def test_one_byte_at_a_time():
    messages = [{"type": "m", "id": i} for i in range(3)]
    assert read_all(FrameReader(), b"".join(b"".join(encode(m)) for m in messages), [1]) == messages


def test_integer_keys_and_bytes_survive():
    message = {"type": "plan", "plan": [1, {5: [1, 2]}, b"\x00\xff", 2**63 - 1, 1.5, None, True]}
    assert read_all(FrameReader(), b"".join(encode(message)), [7]) == [message]


def test_length_above_the_limit_is_refused_before_memory_is_taken():
    reader = FrameReader(limit=100)
    with pytest.raises(ProtocolError, match="4294967295 bytes is above the limit of 100"):
        read_all(reader, b"\xff\xff\xff\xff", [4])


def test_a_raised_limit_counts_for_the_next_frame_in_the_buffer():
    reader = FrameReader(limit=50)
    small, large = encode({"type": "a"}), encode({"type": "b", "data": bytes(300)})
    stream = b"".join([*small, *large])
    reader.get_buffer()[: len(stream)] = stream
    payloads = reader.payloads(len(stream))
    assert decode(next(payloads))["type"] == "a"
    reader.limit = 1000
    assert decode(next(payloads))["type"] == "b"


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",  # never used in msgpack
        msgpack.packb([1, 2]),
        msgpack.packb({"id": 1}),
        msgpack.packb({"type": 7}),
        msgpack.packb({"type": "a"}) + b"\x00",  # trailing byte
        msgpack.packb({"type": "a"})[:-1],
        b"\x81\x91\x01\x01",  # a list as a key
        b"\x91" * 100_000,  # nested without end
        b"\xdf\xff\xff\xff\xff",  # a map of 4 billion entries in 5 bytes
        b"\xa5\xff\xff\xff\xff\xff",  # a string that is not UTF-8
    ],
)
def test_malformed_payloads_are_refused(payload):
    with pytest.raises(ProtocolError):
        decode(payload)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200))
def test_random_bytes_never_raise_anything_else(payload):
    with contextlib.suppress(EPRuntimeError):
        assert isinstance(decode(payload)["type"], str)


def test_what_cannot_be_packed_names_the_message():
    with pytest.raises(ProtocolError, match="'plan' cannot be packed"):
        encode({"type": "plan", "plan": object()})
    with pytest.raises(ProtocolError, match="above the frame limit of 10"):
        encode({"type": "plan", "data": bytes(11)}, limit=10)
    assert MAX_FRAME_BYTES < 2**32
