"""Every error that epruntime raises on purpose, and what each one becomes on the wire.

A bad request and a dead engine are different types: a caller mends the first and waits out (or
reports) the second. `STATUS` is the one table that maps a type to a gRPC code and an HTTP status.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, TypeVar


class EPRuntimeError(Exception):
    """Root of the tree: `except EPRuntimeError` catches all that this package raises on purpose."""


E = TypeVar("E", bound=Exception)
_NOT_GIVEN: Any = object()
_MAX_SHOWN = 200


def _short(value: object) -> str:
    """repr, or its beginning: errors travel in headers, which have little room."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # integers of thousands of digits, lists nested in a thousand lists
        return f"<{type(value).__name__}>"
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


class InvalidRequestError(EPRuntimeError, ValueError):
    """The request makes no sense as sent.

    Args:
        message: what is wrong and what to do.
        field: the request field, for example `"temperature"`; empty if no single field is at fault.
        value: the refused value, shown in the message (shortened if long); leave it out where it says nothing.
    """

    def __init__(self, message: str, *, field: str = "", value: object = _NOT_GIVEN) -> None:
        shown = field if value is _NOT_GIVEN else f"{field}={_short(value)}"
        self.field, self.value = field, None if value is _NOT_GIVEN else value
        super().__init__(f"{shown}: {message}" if field else message)


def renamed(error: E, names: Mapping[str, str]) -> E:
    """The same error about the name under which the request had the field; any other as it is."""
    if not isinstance(error, InvalidRequestError) or error.field not in names:
        return error
    text, name = str(error), names[error.field]
    again = type(error)(text.replace(error.field, name, 1) if text.startswith(error.field) else text)
    again.field, again.value = name, error.value
    return again


class RequestNotFoundError(EPRuntimeError, KeyError):
    """No live request has this id."""

    def __str__(self) -> str:
        return str(self.args[0])


class UnauthenticatedError(EPRuntimeError):
    """The call brought no access token, or a wrong one."""


class QueueFullError(EPRuntimeError):
    """The engine holds as many requests as it accepts; try again after `retry_after_s` seconds."""

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        self.retry_after_s = retry_after_s
        super().__init__(message)


class RequestAbortedError(EPRuntimeError):
    """The request was cancelled before it ended."""


class RequestTimeoutError(EPRuntimeError, TimeoutError):
    """The caller's own deadline passed before the request ended."""


class UnavailableError(EPRuntimeError):
    """Nothing takes requests here now: not reachable, loading, or draining.

    Args:
        retry_after_s: when a retry makes sense, in seconds; None if the server did not say.
    """

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        self.retry_after_s = retry_after_s
        super().__init__(message)


class RequestFailedError(EPRuntimeError):
    """This request alone could not go on (for example its logits were not numbers); others are untouched."""


class UnsupportedModelError(EPRuntimeError):
    """This checkpoint is refused, by name and reason."""


class CheckpointError(EPRuntimeError):
    """A checkpoint is damaged or incomplete: missing, extra, misshapen or unreadable tensors."""


class ConfigError(EPRuntimeError, ValueError):
    """A setting, or a combination of settings, that cannot work."""


class LaunchError(EPRuntimeError):
    """Ranks could not be started within the deadline; says what was asked and what there is."""


class PreflightError(EPRuntimeError):
    """Preflight found what would keep ranks from working; nothing was loaded.

    Args:
        message: the findings, with their remedies. verdict: an epruntime.preflight.verdict.Verdict; None where the
            error came from another process.
    """

    def __init__(self, message: str, *, verdict: Any = None) -> None:
        self.verdict = verdict
        super().__init__(message)


class HandshakeError(EPRuntimeError):
    """A peer on the control channel failed the challenge, or runs other code (kernel signature)."""


class ProtocolError(EPRuntimeError):
    """A frame on the control channel is malformed, oversized, or of an old generation."""


class ConnectionClosedError(EPRuntimeError):
    """The peer on the control channel is gone: end of stream, or the connection was reset."""


class EngineDeadError(EPRuntimeError):
    """The engine cannot go on; every request it held has ended with this error.

    Attributes:
        retry_after_s: seconds after which a retry makes sense, where the engine is coming back by itself; else None.
    """

    retry_after_s: float | None = None


class RankLostError(EngineDeadError):
    """A rank died or stopped answering.

    Args:
        slot: the rank's slot, host: where it ran, detail: last known progress (step, layer, collective).
    """

    def __init__(self, *, slot: int, host: str, detail: str) -> None:
        self.slot, self.host, self.detail = slot, host, detail
        super().__init__(f"rank {slot} on host {host} is lost: {detail}")

    def __reduce__(self) -> tuple[Any, ...]:  # callers may carry it to another process, as Ray does
        return partial(type(self), slot=self.slot, host=self.host, detail=self.detail), (), self.__dict__


#: exception type -> (grpc.StatusCode name, HTTP status). First match in order wins.
STATUS: tuple[tuple[type[BaseException], str, int], ...] = (
    (RequestNotFoundError, "NOT_FOUND", 404),
    (InvalidRequestError, "INVALID_ARGUMENT", 400),
    (UnauthenticatedError, "UNAUTHENTICATED", 401),
    (ConfigError, "INVALID_ARGUMENT", 400),
    (QueueFullError, "RESOURCE_EXHAUSTED", 429),
    (RequestAbortedError, "CANCELLED", 499),
    (RequestTimeoutError, "DEADLINE_EXCEEDED", 504),
    (UnavailableError, "UNAVAILABLE", 503),
    (EngineDeadError, "UNAVAILABLE", 503),
    (UnsupportedModelError, "FAILED_PRECONDITION", 400),
    (EPRuntimeError, "INTERNAL", 500),
)


def status_of(error: BaseException) -> tuple[str, int]:
    """Returns `(grpc.StatusCode name, HTTP status)` of an exception; `("INTERNAL", 500)` for foreign ones."""
    for kind, code, http in STATUS:
        if isinstance(error, kind):
            return code, http
    return "INTERNAL", 500
