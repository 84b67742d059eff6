"""A gRPC call by hand, over HTTP/2 frames (RFC 9113), that grants the server no window: it can send headers only.

Client libraries read ahead into buffers of their own. This one is the reader that never reads.
"""

from __future__ import annotations

import socket
import struct

_DATA, _HEADERS, _SETTINGS = 0x0, 0x1, 0x4
_END_STREAM, _END_HEADERS = 0x1, 0x4
_INITIAL_WINDOW_SIZE = 0x4


class UnreadCall:
    """Sends one request message on stream 1 of a connection of its own. `close` ends the connection."""

    def __init__(self, address: str, method: str, message: bytes) -> None:
        host, _, port = address.rpartition(":")
        self._socket = socket.create_connection((host, int(port)), timeout=10)
        headers = [
            (":method", "POST"), (":scheme", "http"), (":path", method), (":authority", address),
            ("te", "trailers"), ("content-type", "application/grpc"),
        ]  # fmt: skip
        body = struct.pack(">BI", 0, len(message)) + message
        self._socket.sendall(
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
            + _frame(_SETTINGS, 0, 0, struct.pack(">HI", _INITIAL_WINDOW_SIZE, 0))
            + _frame(_HEADERS, _END_HEADERS, 1, b"".join(_literal(name, value) for name, value in headers))
            + _frame(_DATA, _END_STREAM, 1, body)
        )

    def close(self) -> None:
        self._socket.close()


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def _literal(name: str, value: str) -> bytes:
    """A header field without indexing, new name (RFC 7541, 6.2.2); texts are below 127 bytes."""
    return b"\x00" + b"".join(bytes([len(text)]) + text.encode() for text in (name, value))
