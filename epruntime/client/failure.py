"""A failed call becomes one of epruntime's errors, with words that help."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

import grpc

from epruntime import errors
from epruntime.errors import (
    ConfigError,
    EPRuntimeError,
    InvalidRequestError,
    QueueFullError,
    RankLostError,
    RequestAbortedError,
    RequestTimeoutError,
    UnauthenticatedError,
    UnavailableError,
)
from epruntime.proto import keys

_KINDS = {
    name: kind for name, kind in vars(errors).items() if inspect.isclass(kind) and issubclass(kind, EPRuntimeError)
}


def to_error(call: Any, address: str) -> EPRuntimeError:
    """The error behind a failed call.

    Args:
        call: a grpc.RpcError that is also a call (sync), or a grpc.aio.AioRpcError: has code(), details() and
            trailing_metadata().
        address: of the server, for the message.
    """
    code, details = call.code(), call.details() or ""
    metadata = {key: value for key, value in _pairs(call.trailing_metadata()) if isinstance(value, str)}
    name = metadata.get(keys.ERROR)
    if name is not None:
        return _rebuild(_KINDS.get(name, EPRuntimeError), details, metadata)
    return _from_grpc(code, details, address)


def _pairs(metadata: Any) -> Iterable[tuple[str, Any]]:
    return () if metadata is None else ((key, value) for key, value in metadata)


def _rebuild(kind: type[EPRuntimeError], details: str, metadata: dict[str, str]) -> EPRuntimeError:
    """An error as the server raised it: `details` is its whole text, so the constructors are passed by."""
    error = kind.__new__(kind)
    Exception.__init__(error, details)
    millis = metadata.get(keys.RETRY_AFTER_MS)
    retry_after_s = None if millis is None else int(millis) / 1000
    if isinstance(error, InvalidRequestError):
        error.field, error.value = metadata.get(keys.FIELD, ""), None
    elif isinstance(error, RankLostError):
        error.slot, error.host = int(metadata.get(keys.RANK, -1)), metadata.get(keys.HOST, "")
        error.detail = details
    elif isinstance(error, QueueFullError):
        error.retry_after_s = 1.0 if retry_after_s is None else retry_after_s
    elif isinstance(error, UnavailableError):
        error.retry_after_s = retry_after_s
    if retry_after_s is not None:
        vars(error)["retry_after_s"] = retry_after_s  # engines that come back say when, too
    return error


def _from_grpc(code: grpc.StatusCode, details: str, address: str) -> EPRuntimeError:
    """An error that gRPC itself made, on this side or on the other."""
    codes = grpc.StatusCode
    if code is codes.UNAVAILABLE:
        for signs, words in _MISMATCHES:
            if any(sign in details for sign in signs):
                return ConfigError(f"no call to {address} can succeed: {words}")
        if details.startswith("failed to connect") and "Socket closed" in details:
            return UnavailableError(
                f"{address} closed the connection before a word was said. Does the server want TLS, or a client's "
                "certificate? Give tls, with cert and key where it asks for them (--tls, --tls-cert, --tls-key)"
            )
        return UnavailableError(
            f"no epruntime server answers at {address} ({_cause(details)}). Check that `epruntime serve` runs there, "
            "is ready, and that host and port are right"
        )
    if code is codes.DEADLINE_EXCEEDED:
        return RequestTimeoutError(f"the timeout passed before {address} had answered in full; the request was ended")
    if code is codes.CANCELLED:
        return RequestAbortedError("the call was cancelled")
    if code is codes.UNAUTHENTICATED:
        return UnauthenticatedError(f"{address} refused the access token: {details or 'no reason given'}")
    if code is codes.RESOURCE_EXHAUSTED and "larger than max" in details:
        return InvalidRequestError(
            f"a message is over the size limit ({details}); send less, or raise the server's --max-message-mb"
        )
    if code is codes.UNIMPLEMENTED:
        return EPRuntimeError(f"what listens at {address} is not an epruntime server, or an older one: {details}")
    if code is codes.INTERNAL and "serializ" in details:
        return InvalidRequestError(f"the request cannot be put into a message: {details}")
    return EPRuntimeError(f"the call to {address} failed: {code.name}: {details}")


#: What gRPC (or the BoringSSL in it) says, and what it means here. None of these passes by itself.
_MISMATCHES: tuple[tuple[tuple[str, ...], str], ...] = (
    (
        ("http1.x server", "Expected SETTINGS frame", "missing selected ALPN"),
        "what listens there speaks HTTP, not gRPC. epruntime serve has gRPC on a port of its own (--grpc-port, 50051)",
    ),
    (("WRONG_VERSION_NUMBER",), "the server there does not speak TLS. Leave tls out, or use the port that does"),
    (
        ("certificate has expired", "CERTIFICATE_EXPIRED"),
        "the server's certificate has expired. The server needs a new one",
    ),
    (
        ("CERTIFICATE_VERIFY_FAILED",),
        "the server's certificate is not signed by an authority that this client trusts. Give the one that signed it: "
        "tls=Tls(ca=FILE), --tls-ca FILE on the command line",
    ),
    (
        ("Hostname Verification Check failed", "does not match the peer"),
        "the server's certificate is for another host name. Use that name, or give it: "
        "tls=Tls(server_name=NAME), --tls-server-name NAME on the command line",
    ),
)


def _cause(details: str) -> str:
    for known in ("Connection refused", "Connection reset", "No route to host", "Network is unreachable", "Timeout"):
        if known.lower() in details.lower():
            return known[0].lower() + known[1:]
    if "hostname lookup" in details or "DNS resolution failed" in details:
        return "the host name is not known"
    return details or "no reason given"
