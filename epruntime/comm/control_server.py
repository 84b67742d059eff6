"""ControlServer: the coordinator's end of the control channel (asyncio).

listen -> Connection: knock -> challenge -> hello -> checks -> joined (on_join, on_beats), or refused and logged

What a stranger can do is bounded: frames of 8 KiB, `handshake_timeout_s` seconds, `MAX_STRANGERS` at a time; whatever
it sends ends its own connection only.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import msgpack

from epruntime.comm import auth
from epruntime.comm.frames import MAX_FRAME_BYTES, MAX_HANDSHAKE_BYTES, FrameReader, Message, decode, encode
from epruntime.comm.identity import BEATS, CONTROL, RankInfo
from epruntime.comm.progress import BEAT_TYPE
from epruntime.comm.sockets import tune_tcp
from epruntime.errors import ConnectionClosedError, HandshakeError, ProtocolError

logger = logging.getLogger("epruntime.comm.control_server")

#: unauthenticated connections held at a time; further ones are closed at once.
MAX_STRANGERS = 256


@dataclass(frozen=True, kw_only=True)
class _Knock:
    slot: int
    incarnation: int
    rank_nonce: bytes
    coordinator_nonce: bytes


class Connection(asyncio.BufferedProtocol):
    """One peer. Until it has proved itself it is a stranger, and `info` is None.

    Attributes:
        info: who the rank is, once joined; channel: which of its connections this is, "control" or "beats".
        on_message: called with each message of a joined rank; on_close: called once when a joined rank's connection
            has ended, with the reason. The owner sets both in `on_join`.
        generation: of the last `configure` sent; frames of an older one are dropped and counted in `num_stale`.
    """

    def __init__(self, server: ControlServer) -> None:
        self._server = server
        self._reader = FrameReader(MAX_HANDSHAKE_BYTES)
        self._transport: asyncio.Transport | None = None
        self._knock: _Knock | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._refused = False
        self._messages_ended = False
        self._end = "closed by the peer"
        self.info: RankInfo | None = None
        self.channel = CONTROL
        self.on_message: Callable[[Message], None] = lambda message: None
        self.on_close: Callable[[str], None] = lambda reason: None
        self.generation = -1
        self.num_stale = 0

    def __str__(self) -> str:
        if self.info is not None:
            return f"rank {self.info.slot} on host {self.info.host}"
        peer = self._transport.get_extra_info("peername") if self._transport is not None else None
        return f"peer {peer}" if peer else "peer on the local socket"

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def send(self, message: Message) -> None:
        """Sends a message; `generation` is added unless it is there.

        Raises:
            ConnectionClosedError: the rank is gone, or was sent its last message.
            ProtocolError: the message cannot be packed or exceeds the frame limit; nothing was sent.
        """
        if self.is_open and self._messages_ended:
            raise ConnectionClosedError(f"{self}: the last message on the control connection was sent before this one")
        if not self.is_open:
            raise ConnectionClosedError(f"{self}: the control connection is closed ({self._end})")
        if message["type"] == "configure":
            self.generation = message["generation"]
        self._write(encode({"generation": self.generation, **message}))

    def close(self, reason: str = "closed by the coordinator") -> None:
        """Sends what is still buffered, then ends the connection. Safe to call again."""
        self._finish(reason, abort=False)

    def end_messages(self) -> None:
        """Sends what is still buffered, and nothing after it; goes on reading until the other side ends."""
        self._messages_ended = True
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write_eof()

    def abort(self, reason: str) -> None:
        """Ends the connection at once."""
        self._finish(reason, abort=True)

    # asyncio calls the following

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        sock: socket.socket = transport.get_extra_info("socket")
        if sock.family != socket.AF_UNIX:
            tune_tcp(sock)
        if not self._server._admit_stranger(self):
            self.abort(f"{MAX_STRANGERS} peers are in the handshake already")
            return
        timeout_s = self._server.handshake_timeout_s
        self._timer = asyncio.get_running_loop().call_later(
            timeout_s, self._refuse, f"no handshake within {timeout_s:g} s"
        )

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._reader.get_buffer()

    def buffer_updated(self, nbytes: int) -> None:
        try:
            for payload in self._reader.payloads(nbytes):
                if not self.is_open:
                    return
                self._take(decode(payload))
        except (ProtocolError, HandshakeError) as error:
            if self.info is None:
                self._refuse(str(error))
            else:
                logger.error("%s: connection closed: %s", self, error)
                self.abort(str(error))

    def connection_lost(self, exc: Exception | None) -> None:
        if exc is not None:
            self._end = f"connection error: {exc}"
        if self._timer is not None:
            self._timer.cancel()
        self._server._forget(self)
        if self.info is not None:
            self.on_close(self._end)
        elif self._knock is None:
            logger.info("%s left before the handshake: %s", self, self._end)
        elif not self._refused:
            logger.warning(
                "%s left after the challenge to slot %d: it may hold another pool's secret", self, self._knock.slot
            )

    def _take(self, message: Message) -> None:
        if self.info is not None and self.channel == BEATS:
            if message["type"] != BEAT_TYPE:
                raise ProtocolError(f"message {message['type']!r:.40} on the connection for heartbeats")
            self.on_message(message)
        elif self.info is not None:
            generation = message.get("generation")
            if not isinstance(generation, int):
                raise ProtocolError(f"message {message['type']!r} names no generation")
            if generation < self.generation:
                self.num_stale += 1
                logger.info(
                    "%s: dropped message %r of generation %d, now at %d",
                    self,
                    message["type"],
                    generation,
                    self.generation,
                )
                return
            self.on_message(message)
        elif self._knock is None:
            self._knock = self._challenge(message)
        else:
            self._join(self._knock, message)

    def _challenge(self, message: Message) -> _Knock:
        if message["type"] != "knock":
            raise HandshakeError(f"expected 'knock', got {message['type']!r:.40}")
        if message.get("protocol") != auth.PROTOCOL_VERSION:
            raise HandshakeError(
                f"control protocol {message.get('protocol')!r:.40}, this coordinator speaks {auth.PROTOCOL_VERSION}: "
                "install the same epruntime on every host"
            )
        slot, incarnation, nonce = (message.get(key) for key in ("slot", "incarnation", "nonce"))
        if not isinstance(slot, int) or not isinstance(incarnation, int) or slot < 0 or incarnation < 0:
            raise HandshakeError("slot and incarnation must be integers from 0 up")
        if not isinstance(nonce, bytes) or len(nonce) != auth.NONCE_BYTES:
            raise HandshakeError(f"nonce must be {auth.NONCE_BYTES} bytes")
        knock = _Knock(slot=slot, incarnation=incarnation, rank_nonce=nonce, coordinator_nonce=auth.new_nonce())
        self._write(
            encode({"type": "challenge", "nonce": knock.coordinator_nonce, "proof": self._proof(knock, "coordinator")})
        )
        return knock

    def _join(self, knock: _Knock, message: Message) -> None:
        claims = message.get("identity")
        if message["type"] != "hello" or not isinstance(claims, bytes):
            raise HandshakeError(f"expected 'hello' with an identity, got {message['type']!r:.40}")
        if not auth.matches(self._proof(knock, "rank", claims), message.get("proof")):
            raise HandshakeError(f"the peer that claims slot {knock.slot} does not know this pool's secret")
        try:
            identity: dict[str, Any] = msgpack.unpackb(claims)
            channel = identity.pop("channel")
            info = RankInfo(
                slot=knock.slot, incarnation=knock.incarnation, attn_group=knock.slot, ep_rank=knock.slot, **identity
            )
            _check_types(info)
        except (ValueError, TypeError, KeyError, AttributeError, msgpack.UnpackException) as error:
            raise HandshakeError(f"identity of slot {knock.slot} is unreadable: {error}") from error
        self._server._check(info, channel)
        if self._timer is not None:
            self._timer.cancel()
        self.info, self.channel = info, channel
        if channel == CONTROL:
            self._reader.limit = MAX_FRAME_BYTES
        self._write(encode({"type": "welcome"}))
        self._server._joined(self, info)

    def _proof(self, knock: _Knock, side: str, claims: bytes = b"") -> bytes:
        return auth.proof(
            self._server._secret,
            side,
            rank_nonce=knock.rank_nonce,
            coordinator_nonce=knock.coordinator_nonce,
            slot=knock.slot,
            incarnation=knock.incarnation,
            claims=claims,
        )

    def _refuse(self, reason: str) -> None:
        logger.warning("refused %s: %s", self, reason)
        self._refused = True
        if self.is_open:
            self._write(encode({"type": "refused", "reason": reason}))
        self._finish(reason, abort=False)

    def _write(self, buffers: list[bytes]) -> None:
        assert self._transport is not None
        for buffer in buffers:
            self._transport.write(buffer)

    def _finish(self, reason: str, *, abort: bool) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        self._end = reason
        if abort:
            self._transport.abort()
        else:
            self._transport.close()


def _check_types(info: RankInfo) -> None:
    """Raises TypeError: a claim is not of the type that those who read it count on."""
    texts = (info.host, info.pool, *info.signature.keys(), *info.signature.values())
    if not all(isinstance(text, str) for text in texts):
        raise TypeError("host, pool and signature must be text")
    if not all(isinstance(number, int) for number in (info.pid, info.local_rank)):
        raise TypeError("pid and local_rank must be integers")


class ControlServer:
    """Listens for ranks and lets in those that are expected.

    Args:
        secret: shared with the ranks through their bootstrap.
        on_join: called with each control connection that has joined.
        on_beats: called with each connection for heartbeats that has joined; its rank has, before.
        on_refused: called with (info, error) when a rank that knows the secret is refused all the same.
        handshake_timeout_s: seconds from connect to joined.
    """

    def __init__(
        self,
        secret: bytes,
        *,
        on_join: Callable[[Connection], None],
        on_beats: Callable[[Connection], None] = lambda connection: None,
        on_refused: Callable[[RankInfo, HandshakeError], None] = lambda info, error: None,
        handshake_timeout_s: float = 10.0,
    ) -> None:
        self._secret = secret
        self._on_join, self._on_beats, self._on_refused = on_join, on_beats, on_refused
        self.handshake_timeout_s = handshake_timeout_s
        self._servers: list[asyncio.Server] = []
        self._strangers: set[Connection] = set()
        self._expected: dict[int, int] = {}
        self._seen: set[tuple[int, int, str]] = set()
        self._ranks: dict[int, Connection] = {}
        self._beats: dict[int, Connection] = {}
        self._reference: RankInfo | None = None

    async def listen_unix(self, path: str) -> str:
        """Listens on a Unix socket, to be put in a directory that only this user can enter.

        Returns the control address.
        """
        loop = asyncio.get_running_loop()
        self._servers.append(await loop.create_unix_server(lambda: Connection(self), path, backlog=1024))
        return f"unix:{path}"

    async def listen_tcp(self, host: str, port: int = 0) -> str:
        """Listens on `host` (an address of this machine; port 0 picks one). Returns the control address."""
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: Connection(self), host, port, backlog=1024)
        self._servers.append(server)
        return f"tcp:{host}:{server.sockets[0].getsockname()[1]}"

    def expect(self, slot: int, incarnation: int) -> None:
        """Lets a rank with this slot and incarnation in, once; earlier incarnations are refused from now on."""
        self._expected[slot] = incarnation

    def close_listeners(self) -> None:
        """Lets nobody in any more. Joined ranks stay. Safe to call again."""
        for server in self._servers:
            server.close()
        self._servers.clear()
        for stranger in list(self._strangers):
            stranger.abort("the coordinator has stopped listening")

    def close(self) -> None:
        """Ends everything. Safe to call again."""
        self.close_listeners()
        for connection in [*self._ranks.values(), *self._beats.values()]:
            connection.abort("the coordinator has stopped")

    # Connection calls the following

    def _admit_stranger(self, connection: Connection) -> bool:
        if len(self._strangers) >= MAX_STRANGERS:
            logger.warning("refused %s: %d peers are in the handshake already", connection, MAX_STRANGERS)
            return False
        self._strangers.add(connection)
        return True

    def _check(self, info: RankInfo, channel: object) -> None:
        error = self._objection(info, channel)
        if error is not None:
            self._on_refused(info, error)
            raise error

    def _objection(self, info: RankInfo, channel: object) -> HandshakeError | None:
        if channel not in (CONTROL, BEATS):
            return HandshakeError(f"slot {info.slot} wants a connection for {channel!r:.40}: {CONTROL} or {BEATS}")
        expected = self._expected.get(info.slot)
        if expected is None:
            return HandshakeError(f"slot {info.slot} is not part of this pool")
        if info.incarnation != expected:
            age = "old" if info.incarnation < expected else "unknown"
            return HandshakeError(
                f"{age} incarnation {info.incarnation} of slot {info.slot}: this pool expects {expected}"
            )
        if (info.slot, info.incarnation, channel) in self._seen:
            return HandshakeError(f"slot {info.slot}, incarnation {info.incarnation} has joined already ({channel})")
        if channel == BEATS:
            rank = self._ranks.get(info.slot)
            if rank is None or rank.info != info:
                return HandshakeError(
                    f"heartbeats of slot {info.slot}, incarnation {info.incarnation}, which is not here"
                )
        first = self._reference
        if first is not None and first.signature != info.signature:
            keys = sorted(first.signature.keys() | info.signature.keys())
            unequal = "; ".join(
                f"{key}: {first.signature.get(key)!r} against {info.signature.get(key)!r}"
                for key in keys
                if first.signature.get(key) != info.signature.get(key)
            )
            return HandshakeError(
                f"kernel signatures differ between rank {first.slot} on host {first.host} and rank {info.slot} on "
                f"host {info.host} ({unequal}): install the same build of epruntime and torch on every host"
            )
        return None

    def _joined(self, connection: Connection, info: RankInfo) -> None:
        self._strangers.discard(connection)
        self._seen.add((info.slot, info.incarnation, connection.channel))
        if connection.channel == BEATS:
            self._beats[info.slot] = connection
            self._on_beats(connection)
            return
        self._ranks[info.slot] = connection
        if self._reference is None:
            self._reference = info
        self._on_join(connection)

    def _forget(self, connection: Connection) -> None:
        self._strangers.discard(connection)
        joined = self._beats if connection.channel == BEATS else self._ranks
        if connection.info is not None and joined.get(connection.info.slot) is connection:
            del joined[connection.info.slot]
