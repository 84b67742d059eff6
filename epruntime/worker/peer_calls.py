"""Whether ranks reach each other by TCP: each waits at its own address, and calls all the others at theirs.

Listener (a thread: accept -> greeting -> close)  <-  call_all (connect -> greeting -> whose is it)

A greeting is a random number of this preflight and the slot of the rank, so that an address that leads to another
rank, or to something else, is told from the right one. Nothing is read from a caller.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import selectors
import socket
import struct
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

GREETING = struct.Struct("<16si")
#: seconds that a listener rests when a caller could not be taken.
_BREATH_S = 0.01
_IN_PROGRESS = (errno.EINPROGRESS, errno.EWOULDBLOCK)


@dataclass(frozen=True, kw_only=True)
class Peer:
    """Whom to call. `slot`: -1 for one that says nothing, as the store: a connection is enough."""

    slot: int
    host: str
    port: int


@dataclass(kw_only=True)
class Answer:
    """What came of a call. `slot`: who answered, -1: nobody that knows the greeting; error: why there is no answer."""

    slot: int = -1
    error: str = ""


class Listener:
    """Greets whoever calls, until it is closed.

    Raises:
        OSError: the address is not this host's.
    """

    def __init__(self, address: str, *, nonce: bytes, slot: int) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._socket = socket.create_server((address, 0), family=family, backlog=1024)
        self._greeting = GREETING.pack(nonce, slot)
        self.port: int = self._socket.getsockname()[1]
        self._closed = False
        self._thread = threading.Thread(target=self._serve, name="epruntime-preflight", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Safe to call again."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._socket.close()
        self._thread.join(timeout=1.0)

    def _serve(self) -> None:
        while True:
            try:
                caller, _ = self._socket.accept()
            except OSError:
                if self._closed:
                    return
                time.sleep(_BREATH_S)  # a caller has left too early, or all files are in use for a moment
                continue
            with caller, contextlib.suppress(OSError):  # it has gone again
                caller.setblocking(False)  # an empty send buffer holds a greeting
                caller.send(self._greeting)


@dataclass(kw_only=True)
class _Line:
    """One call under way."""

    peer: Peer
    socket: socket.socket
    received: bytes = b""
    answer: Answer | None = field(default=None)


def call_all(peers: Sequence[Peer], *, nonce: bytes, timeout_s: float) -> list[Answer]:
    """Calls all peers at once; one answer for each, in order, after `timeout_s` seconds at the latest."""
    deadline = time.monotonic() + timeout_s
    lines: list[_Line | Answer] = []
    with selectors.DefaultSelector() as selector:
        for peer in peers:
            opened = _dial(peer)
            lines.append(opened)
            if isinstance(opened, _Line):
                selector.register(opened.socket, selectors.EVENT_WRITE, opened)
        while selector.get_map():
            ready = selector.select(max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for key, _ in ready:
                line: _Line = key.data
                _advance(line, nonce)
                selector.unregister(line.socket)
                if line.answer is None:
                    selector.register(line.socket, selectors.EVENT_READ, line)
    answers = []
    for item in lines:
        if isinstance(item, _Line):
            item.socket.close()
            item = item.answer or Answer(error=f"no answer within {timeout_s:g} s")
        answers.append(item)
    return answers


def _dial(peer: Peer) -> _Line | Answer:
    try:
        host = peer.host.strip("[]")
        try:
            version = ipaddress.ip_address(host.partition("%")[0]).version
            family, target = (socket.AF_INET6 if version == 6 else socket.AF_INET), (host, peer.port)
        except ValueError:
            family, _, _, _, found = socket.getaddrinfo(host, peer.port, type=socket.SOCK_STREAM)[0]
            target = (str(found[0]), int(found[1]))
        line = _Line(peer=peer, socket=socket.socket(family, socket.SOCK_STREAM))
    except OSError as error:
        return Answer(error=str(error))
    line.socket.setblocking(False)
    code = line.socket.connect_ex(target)
    if code not in (0, *_IN_PROGRESS):
        line.socket.close()
        return Answer(error=os.strerror(code))
    return line


def _advance(line: _Line, nonce: bytes) -> None:
    """Takes the next step of a call that can take one; sets its answer when it has ended."""
    code = line.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if code:
        line.answer = Answer(error=os.strerror(code))
        return
    if line.peer.slot < 0:
        line.answer = Answer()
        return
    try:
        data = line.socket.recv(GREETING.size - len(line.received))
    except BlockingIOError:
        return  # connected just now; the greeting is on its way
    except OSError as error:
        line.answer = Answer(error=str(error))
        return
    line.received += data
    if not data or len(line.received) == GREETING.size:
        known = len(line.received) == GREETING.size
        theirs, slot = GREETING.unpack(line.received) if known else (b"", -1)
        line.answer = Answer(slot=slot if theirs == nonce else -1)
