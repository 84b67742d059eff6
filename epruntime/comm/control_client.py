"""ControlClient: a rank's end of the control channel. Blocking; sending is safe from any thread."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from collections import deque
from types import TracebackType
from typing import Any, NoReturn

import msgpack

from epruntime.comm import auth
from epruntime.comm.frames import MAX_FRAME_BYTES, MAX_HANDSHAKE_BYTES, FrameReader, Message, decode, encode
from epruntime.comm.identity import CONTROL, RankBootstrap
from epruntime.comm.lifeline import exit_on_hangup
from epruntime.comm.sockets import tune_tcp
from epruntime.errors import ConnectionClosedError, HandshakeError, ProtocolError

logger = logging.getLogger("epruntime.comm.control_client")

_RETRY_S = 0.05


class ControlClient:
    """One authenticated connection to the coordinator.

    Attributes:
        generation: of the last `configure` received; -1 before the first. Frames of an older one are refused.
    """

    def __init__(self, sock: socket.socket, bootstrap: RankBootstrap) -> None:
        self._sock, self._bootstrap = sock, bootstrap
        self._reader = FrameReader(MAX_HANDSHAKE_BYTES)
        self._inbox: deque[Message] = deque()
        self._send_lock = threading.Lock()
        self.generation = -1

    @classmethod
    def connect(cls, bootstrap: RankBootstrap, *, signature: dict[str, str], channel: str = CONTROL) -> ControlClient:
        """Reaches the coordinator, proves the secret, checks its proof, and says who this rank is.

        Args:
            signature: this rank's kernel signature; the coordinator refuses ranks with unequal ones.
            channel: which of the rank's connections this is; "beats" after "control".

        Raises:
            HandshakeError: refused (with the coordinator's reason), the coordinator's proof is wrong, or no answer
                within `bootstrap.connect_timeout_s`.
        """
        deadline = time.monotonic() + bootstrap.connect_timeout_s
        sock = _open(bootstrap.address, deadline)
        client = cls(sock, bootstrap)
        try:
            sock.settimeout(max(0.01, deadline - time.monotonic()))
            client._handshake(signature, channel)
            sock.settimeout(None)
        except (OSError, ConnectionClosedError, ProtocolError) as error:
            sock.close()
            raise HandshakeError(
                f"rank {bootstrap.slot} could not join the coordinator at {bootstrap.address}: {error}"
            ) from error
        except BaseException:
            sock.close()
            raise
        client._reader.limit = MAX_FRAME_BYTES
        return client

    def recv(self) -> Message:
        """The next message; waits for it without limit.

        Raises:
            ConnectionClosedError: the coordinator is gone.
            ProtocolError: the stream is malformed; it is closed and of no more use.
        """
        while True:
            message = self._next()
            generation = message.get("generation")
            if message["type"] == "configure" and isinstance(generation, int) and generation > self.generation:
                self.generation = generation
            elif isinstance(generation, int) and generation != self.generation:
                self._refuse(message, generation)
                continue
            return message

    def send(self, message: Message) -> None:
        """Sends one message; `generation` is added unless it is there.

        Raises:
            ConnectionClosedError: the coordinator is gone.
            ProtocolError: the message cannot be packed or exceeds the frame limit; nothing was sent.
        """
        self._write(encode({"generation": self.generation, **message}))

    def exit_on_hangup(self, *, grace_s: float = 2.0) -> None:
        """Lets this process end itself when the coordinator is gone, even while its main thread is stuck."""
        exit_on_hangup(self._sock, grace_s=grace_s)

    def detach(self) -> socket.socket:
        """The socket, which is the caller's from here on."""
        return self._sock

    def close(self) -> None:
        """Ends the connection. Safe to call again."""
        with contextlib.suppress(OSError):  # the peer was first
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()

    def __enter__(self) -> ControlClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _handshake(self, signature: dict[str, str], channel: str) -> None:
        letter = self._bootstrap
        nonce = auth.new_nonce()
        identity: dict[str, Any] = {
            "channel": channel,
            "host": letter.host,
            "local_rank": letter.local_rank,
            "pool": letter.pool,
            "pid": os.getpid(),
            "signature": signature,
        }
        claims: bytes = msgpack.packb(identity)
        knock: Message = {
            "type": "knock",
            "protocol": auth.PROTOCOL_VERSION,
            "slot": letter.slot,
            "incarnation": letter.incarnation,
            "nonce": nonce,
        }
        self._write(encode(knock, limit=MAX_HANDSHAKE_BYTES))
        challenge = self._answer("challenge")
        theirs = challenge.get("nonce")
        if not isinstance(theirs, bytes) or len(theirs) != auth.NONCE_BYTES:
            raise HandshakeError(f"the coordinator at {letter.address} sent no nonce of {auth.NONCE_BYTES} bytes")

        def prove(side: str, claimed: bytes = b"") -> bytes:
            return auth.proof(
                letter.secret,
                side,
                rank_nonce=nonce,
                coordinator_nonce=theirs,
                slot=letter.slot,
                incarnation=letter.incarnation,
                claims=claimed,
            )

        if not auth.matches(prove("coordinator"), challenge.get("proof")):
            raise HandshakeError(f"whoever listens at {letter.address} does not know this pool's secret")
        hello: Message = {"type": "hello", "identity": claims, "proof": prove("rank", claims)}
        self._write(encode(hello, limit=MAX_HANDSHAKE_BYTES))
        self._answer("welcome")

    def _answer(self, expected: str) -> Message:
        message = self._next()
        if message["type"] == "refused":
            raise HandshakeError(f"the coordinator refused rank {self._bootstrap.slot}: {message.get('reason')}")
        if message["type"] != expected:
            raise ProtocolError(f"expected {expected!r}, got {message['type']!r}")
        return message

    def _next(self) -> Message:
        try:
            while not self._inbox:
                received = self._sock.recv_into(self._reader.get_buffer())
                if received == 0:
                    raise ConnectionClosedError(f"the coordinator at {self._bootstrap.address} closed the connection")
                for payload in self._reader.payloads(received):
                    self._inbox.append(decode(payload))
        except OSError as error:
            self._lost(error)
        except ProtocolError:
            self.close()
            raise
        return self._inbox.popleft()

    def _write(self, buffers: list[bytes]) -> None:
        with self._send_lock:
            try:
                if len(buffers) == 1:
                    self._sock.sendall(buffers[0])
                    return
                views = [memoryview(b) for b in buffers]
                while views:
                    sent = self._sock.sendmsg(views)
                    while views and sent >= len(views[0]):
                        sent -= len(views.pop(0))
                    if views and sent:
                        views[0] = views[0][sent:]
            except OSError as error:
                self._lost(error)

    def _lost(self, error: OSError) -> NoReturn:
        """Raises what it means; a timeout of the handshake is none of the connection's, which the kernel gives up on
        with the same error."""
        if isinstance(error, TimeoutError) and self._sock.gettimeout() is not None:
            raise error
        raise ConnectionClosedError(f"control connection to {self._bootstrap.address}: {error}") from error

    def _refuse(self, message: Message, generation: int) -> None:
        text = f"message {message['type']!r} is of generation {generation}, this rank is at {self.generation}"
        logger.warning("refused: %s", text)
        self.send({"type": "failed", "id": message.get("id"), "kind": "ProtocolError", "message": text})


def _open(address: str, deadline: float) -> socket.socket:
    """Connects to `unix:PATH` or `tcp:HOST:PORT`, trying again until `deadline` (monotonic seconds)."""
    kind, _, rest = address.partition(":")
    if kind not in ("unix", "tcp"):
        raise HandshakeError(f"control address {address!r}: must be unix:PATH or tcp:HOST:PORT")
    while True:
        left = max(0.01, deadline - time.monotonic())
        try:
            if kind == "unix":
                sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                try:
                    sock.settimeout(left)
                    sock.connect(rest)
                except BaseException:
                    sock.close()
                    raise
                return sock
            host, _, port = rest.rpartition(":")
            sock = socket.create_connection((host.strip("[]"), int(port)), timeout=left)
            tune_tcp(sock)
            return sock
        except OSError as error:
            # The listener is there before any rank starts; only a full backlog or a network that is still coming
            # up is worth waiting for.
            if isinstance(error, FileNotFoundError) or time.monotonic() + _RETRY_S >= deadline:
                raise HandshakeError(f"no coordinator listens at {address}: {error}") from error
            time.sleep(_RETRY_S)
