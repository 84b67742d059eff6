"""Frames of the control channel: a u32 big-endian length, then that many bytes of one msgpack map.

message -> encode -> [header, payload] -> stream socket -> FrameReader -> payload -> decode -> message

The limit is checked on the four length bytes, before memory is taken. Payloads larger than the reader's scratch
buffer are received straight into a buffer of their own size.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import msgpack

from epruntime.errors import ProtocolError

_HEADER = struct.Struct(">I")
HEADER_BYTES = _HEADER.size

#: largest payload once both sides have proved themselves, bytes.
MAX_FRAME_BYTES = 256 * 2**20

#: largest payload before that, bytes: what a stranger can make the coordinator keep.
MAX_HANDSHAKE_BYTES = 8 * 2**10

#: frames up to this many bytes are sent as one piece; copying them is cheaper than a second buffer.
SMALL_FRAME_BYTES = 16 * 2**10

_SCRATCH_BYTES = 64 * 2**10

Message = dict[str, Any]


def encode(message: Message, *, limit: int = MAX_FRAME_BYTES) -> list[bytes]:
    """Message -> buffers to send in order: one for a small frame, header and payload for a large one.

    Raises:
        ProtocolError: the message holds a type that msgpack has not, or exceeds `limit` bytes.
    """
    try:
        payload: bytes = msgpack.packb(message, use_bin_type=True)
    except (TypeError, ValueError, OverflowError) as error:
        raise ProtocolError(f"message {message.get('type')!r} cannot be packed: {error}") from error
    size = len(payload)
    if size > limit:
        raise ProtocolError(f"message {message.get('type')!r} takes {size} bytes, above the frame limit of {limit}")
    header = _HEADER.pack(size)
    return [header + payload] if size <= SMALL_FRAME_BYTES else [header, payload]


def decode(payload: bytes | memoryview) -> Message:
    """Payload -> message.

    Raises:
        ProtocolError: not msgpack, trailing bytes, or not a map with a string `type`.
    """
    try:
        message = msgpack.unpackb(payload, raw=False, strict_map_key=False)
    except (ValueError, TypeError, OverflowError, RecursionError, msgpack.UnpackException) as error:
        raise ProtocolError(f"frame of {len(payload)} bytes is not msgpack: {type(error).__name__}: {error}") from error
    if not isinstance(message, dict) or not isinstance(message.get("type"), str):
        raise ProtocolError(f"frame of {len(payload)} bytes is not a map with a string 'type'")
    return message


class FrameReader:
    """Cuts a byte stream into payloads. Used by both sides: `get_buffer`, receive into it, `payloads(n)`.

    Attributes:
        limit: largest payload accepted, bytes; may be raised between two payloads (after authentication).
    """

    def __init__(self, limit: int = MAX_FRAME_BYTES) -> None:
        self.limit = limit
        self._scratch = bytearray(_SCRATCH_BYTES)
        self._view = memoryview(self._scratch)
        self._begin = self._end = 0  # unread bytes of the scratch buffer
        self._large: bytearray | None = None  # payload too long for the scratch buffer, while it fills
        self._filled = 0

    @property
    def in_frame(self) -> bool:
        """True while part of a frame has been received."""
        return self._large is not None or self._begin < self._end

    def get_buffer(self) -> memoryview:
        """Where to receive next. Views given out by `payloads` are invalid from here on."""
        if self._large is not None:
            return memoryview(self._large)[self._filled :]
        if self._begin:
            rest = self._end - self._begin
            self._scratch[:rest] = self._scratch[self._begin : self._end]
            self._begin, self._end = 0, rest
        return self._view[self._end :]

    def payloads(self, num_bytes: int) -> Iterator[bytes | memoryview]:
        """Takes note of `num_bytes` received bytes and yields the payloads that are complete.

        Exhaust it before the next `get_buffer`. A payload is a view that the next `get_buffer` invalidates.

        Raises:
            ProtocolError: a length above `limit`; the stream is then of no more use.
        """
        if self._large is not None:
            self._filled += num_bytes
            if self._filled == len(self._large):
                large, self._large = self._large, None
                yield memoryview(large)
            return
        self._end += num_bytes
        while self._end - self._begin >= HEADER_BYTES:
            (size,) = _HEADER.unpack_from(self._scratch, self._begin)
            if size > self.limit:
                raise ProtocolError(f"frame of {size} bytes is above the limit of {self.limit}")
            start = self._begin + HEADER_BYTES
            if self._end - start >= size:
                self._begin = start + size
                yield self._view[start : self._begin]
            elif HEADER_BYTES + size > _SCRATCH_BYTES:
                self._large = bytearray(size)
                self._filled = self._end - start
                self._large[: self._filled] = self._view[start : self._end]
                self._begin = self._end = 0
                return
            else:
                return
