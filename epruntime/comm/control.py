"""The control channel: how the coordinator and its ranks talk, whatever started the ranks.

coordinator: RankPool -> ControlServer -> Connection ==stream socket== ControlClient <- worker loop :rank

Frames are length-prefixed msgpack maps {"type", "id", "generation", ...} (`frames`); who is who is settled by a
mutual challenge (`auth`) before anything else is read. A rank answers each message with one of the same id, in any
order, perhaps after `progress` messages; `failed` is the answer that is an exception (`messages`). Frames of an older
generation than the last `configure` are dropped on both sides.
"""

from __future__ import annotations

from epruntime.comm.control_client import ControlClient
from epruntime.comm.control_server import Connection, ControlServer
from epruntime.comm.identity import RankBootstrap, RankInfo, receive_bootstrap
from epruntime.comm.messages import error_of, failed

__all__ = [
    "Connection",
    "ControlClient",
    "ControlServer",
    "RankBootstrap",
    "RankInfo",
    "error_of",
    "failed",
    "receive_bootstrap",
]
