"""Who a rank is, and the letter that tells a new rank process so."""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import dataclass, field
from typing import Any, BinaryIO

import msgpack

from epruntime.comm.lifeline import die_with_parent
from epruntime.errors import ProtocolError

#: the connections of one rank: its conversation, and its heartbeats.
CONTROL, BEATS = "control", "beats"


@dataclass(frozen=True, kw_only=True)
class RankInfo:
    """A rank as the coordinator knows it after the handshake.

    Attributes:
        slot: seat in the pool, 0..num_ranks-1, ordered by host; kept when the rank is replaced.
        incarnation: counts the processes that have held this slot, from 0.
        host: host name; local_rank: index among the ranks of that host.
        pool: name of the rank pool; attn_group, attn_rank: group that holds a request's KV, and the place in it
            (one rank per group: attn_group == slot, attn_rank == 0).
        ep_rank: place in the expert exchange; set by `configure`, before that equal to slot.
        pid: process id, in the rank's own pid namespace.
        signature: kernel signature; ranks with unequal ones do not share a pool.
    """

    slot: int
    incarnation: int = 0
    host: str
    local_rank: int = 0
    pool: str = "main"
    attn_group: int = 0
    attn_rank: int = 0
    ep_rank: int = 0
    pid: int = 0
    signature: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class RankBootstrap:
    """All that a new rank process needs to reach its coordinator. Holds the secret: never print or log its bytes.

    Attributes:
        address: control address, `unix:PATH` or `tcp:HOST:PORT`.
        secret: 32 random bytes, one value per pool; proves each side to the other and is never sent.
        slot, incarnation, host, local_rank, pool: see RankInfo.
        threads: compute threads of this rank.
        device: torch device type ("cpu" or "cuda"); device_index: which of that type's devices is this rank's.
        parent_pid: pid of the process that must not be outlived; 0: the launcher's own machinery sees to it.
        connect_timeout_s: seconds to reach the coordinator and end the handshake.
    """

    address: str
    secret: bytes = field(repr=False)
    slot: int
    incarnation: int = 0
    host: str
    local_rank: int = 0
    pool: str = "main"
    threads: int = 1
    device: str = "cpu"
    device_index: int = 0
    parent_pid: int = 0
    connect_timeout_s: float = 60.0

    def to_bytes(self) -> bytes:
        return bytes(msgpack.packb({f.name: getattr(self, f.name) for f in dataclasses.fields(self)}))

    @classmethod
    def from_bytes(cls, data: bytes) -> RankBootstrap:
        """Reads what `to_bytes` wrote.

        Raises:
            ProtocolError: not a bootstrap, for example because the process was started by hand.
        """
        try:
            fields: Any = msgpack.unpackb(data)
            return cls(**fields)
        except (ValueError, TypeError, msgpack.UnpackException) as error:
            raise ProtocolError(
                f"bootstrap of {len(data)} bytes is unreadable: rank processes are started by a launcher, which "
                "writes it to their standard input"
            ) from error


def receive_bootstrap(stream: BinaryIO | None = None) -> RankBootstrap:
    """First act of a rank process started by the local launcher: reads the bootstrap (standard input, up to its
    end) and ties this process's life to the launcher's. Call it before heavy imports."""
    source = stream if stream is not None else sys.stdin.buffer
    bootstrap = RankBootstrap.from_bytes(source.read())
    if bootstrap.parent_pid:
        die_with_parent(bootstrap.parent_pid)
    return bootstrap
