"""Failure replies: an exception on a rank becomes a `failed` message, and an exception again at the coordinator."""

from __future__ import annotations

import traceback
from typing import Any

from epruntime import errors
from epruntime.comm.frames import Message

#: bytes of traceback kept in a failure message.
_TRACEBACK_CHARS = 16_000


def failed(message_id: int, error: BaseException, *, where: str = "") -> Message:
    """The reply to message `message_id` that could not be carried out.

    Args:
        where: the activity that failed, for example "load" or "step 17, layer 3".
    """
    if isinstance(error, errors.EPRuntimeError):
        kind, text = type(error).__name__, str(error)
    else:
        # torch adds pages of C++ frames, which are in the traceback
        first = next(iter(str(error).strip().splitlines()), "")
        kind, text = "EngineDeadError", f"{type(error).__name__}: {first}"
    message: Message = {
        "type": "failed",
        "id": message_id,
        "kind": kind,
        "message": text,
        "where": where,
        "traceback": "".join(traceback.format_exception(error))[-_TRACEBACK_CHARS:],
    }
    if isinstance(error, errors.RankLostError):
        message["lost"] = {"slot": error.slot, "host": error.host, "detail": error.detail}
    return message


def error_of(message: Message, *, slot: int, host: str) -> errors.EPRuntimeError:
    """The exception that a `failed` message of rank `slot` tells of; its traceback there is attached as a note.

    A kind that `epruntime.errors` has not becomes EngineDeadError.
    """
    text, where = str(message.get("message", "")), str(message.get("where", ""))
    place = f"rank {slot} on host {host}" + (f", {where}" if where else "")
    kind: Any = getattr(errors, str(message.get("kind")), None)
    lost = message.get("lost")
    error: errors.EPRuntimeError
    if kind is errors.RankLostError and isinstance(lost, dict):
        error = errors.RankLostError(
            slot=int(lost["slot"]), host=str(lost["host"]), detail=f"{lost['detail']} (reported by {place})"
        )
    elif kind is errors.RankLostError or not (isinstance(kind, type) and issubclass(kind, errors.EPRuntimeError)):
        error = errors.EngineDeadError(f"{place}: {text}")
    else:
        error = kind(f"{place}: {text}")
    trace = message.get("traceback")
    if trace:
        error.add_note(f"Traceback on rank {slot}:\n{trace}")
    return error
