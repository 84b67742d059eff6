"""The rank's side of heartbeats: a second connection of the control channel, on which a thread sends the stamps.

connect (same secret, slot and incarnation, channel "beats") -> socket -> native thread, or this file's Python thread
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from typing import Any, Protocol

from epruntime.comm.control_client import ControlClient
from epruntime.comm.identity import BEATS, RankBootstrap
from epruntime.comm.progress import STAMP_BYTES, Stamps, beat_frame

logger = logging.getLogger("epruntime.comm.beats")

#: seconds between heartbeats.
INTERVAL_S = 0.1


class Publisher(Protocol):
    """Sends the stamps until the peer is gone or `stop` is called."""

    @property
    def running(self) -> bool: ...
    @property
    def num_sent(self) -> int: ...
    def stop(self) -> None: ...


class ThreadPublisher:
    """A publisher that needs the interpreter's lock: code that keeps it for seconds delays its beats.

    Args:
        sock: taken over, and closed at the end.
    """

    def __init__(self, sock: socket.socket, stamps: Stamps, *, interval_s: float = INTERVAL_S) -> None:
        sock.setblocking(False)
        self._sock, self._memory, self._interval_s = sock, stamps.memory, interval_s
        self._frame = bytearray(beat_frame())
        self._left = memoryview(b"")  # of a frame that was sent in part
        self._stopping = threading.Event()
        self.num_sent = 0
        self._thread = threading.Thread(target=self._run, name="epruntime-progress", daemon=True)
        self._thread.start()

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        with self._sock, contextlib.suppress(OSError):  # the peer is gone: nobody wants to know any more
            while True:
                if not self._left:
                    self._frame[-STAMP_BYTES:] = self._memory
                    self._left = memoryview(bytes(self._frame))
                with contextlib.suppress(BlockingIOError):  # a peer that does not read is not waited for
                    while self._left:
                        self._left = self._left[self._sock.send(self._left) :]
                    self.num_sent += 1
                if self._stopping.wait(self._interval_s):
                    return


def publish(bootstrap: RankBootstrap, stamps: Stamps, *, signature: dict[str, str], native: Any = None) -> Publisher:
    """Connects, and starts the thread. Call it when the rank has joined.

    Args:
        signature: as the rank joined with.
        native: the extension module, whose thread needs no lock of the interpreter; None: a Python thread.

    Raises:
        HandshakeError: the coordinator was not reached, or refused it.
    """
    sock = ControlClient.connect(bootstrap, signature=signature, channel=BEATS).detach()
    if native is None:
        return ThreadPublisher(sock, stamps)
    publisher: Publisher = native.ProgressPublisher(
        fd=sock.fileno(), cells=stamps.memory, frame=beat_frame(), interval_s=INTERVAL_S
    )
    sock.detach()  # the thread closes it
    return publisher
