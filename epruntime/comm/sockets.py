"""Socket settings that both ends of the control channel share."""

from __future__ import annotations

import socket

#: seconds after which a peer that acknowledges nothing counts as gone (cut link, host without power).
_DEAD_PEER_S = 20


def tune_tcp(sock: socket.socket) -> None:
    """Small frames leave at once, and a peer that vanished without a word is noticed within about 20 s."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", _DEAD_PEER_S // 2),
        ("TCP_KEEPINTVL", 2),
        ("TCP_KEEPCNT", _DEAD_PEER_S // 4),
        ("TCP_USER_TIMEOUT", _DEAD_PEER_S * 1000),  # milliseconds; bounds data that nobody acknowledges
    ):
        option = getattr(socket, name, None)
        if option is not None:  # Linux has all four, others only some
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
