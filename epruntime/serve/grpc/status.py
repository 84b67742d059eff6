"""An exception becomes a gRPC status with details in trailing metadata (keys: proto/keys.py)."""

from __future__ import annotations

import logging
from typing import NoReturn

import grpc
import grpc.aio
from google.protobuf import any_pb2, duration_pb2  # type: ignore[import-untyped]

from epruntime.errors import EPRuntimeError, InvalidRequestError, RankLostError, renamed, status_of
from epruntime.proto import keys
from epruntime.serve.client_text import client_text

logger = logging.getLogger("epruntime.serve.grpc.status")

#: Clients refuse headers above 8 KiB by default, and gRPC sends each byte that is not printable ASCII as three.
MAX_TEXT_BYTES = 4096
_MAX_VALUE_BYTES = 256

#: Texts above this are not repeated in the status details, for the same limit on headers.
_MAX_DETAILS_TEXT_BYTES = 1024

#: The engine's names of fields that have another in inference.proto.
_NAMES = {"prompt_token_ids": "token_ids"}

Metadata = tuple[tuple[str, str | bytes], ...]


async def abort(context: grpc.aio.ServicerContext, error: Exception, request_id: str = "") -> NoReturn:
    """Ends the call with the status of `error`; a foreign exception becomes INTERNAL and is logged in full."""
    code, _ = status_of(error)
    error = renamed(error, _NAMES)
    text = client_text(error)
    if not isinstance(error, EPRuntimeError):
        logger.error("internal error in request %r", request_id, exc_info=error)
        text = f"internal error of the server ({type(error).__name__}: {error}); its log has more"
    status, text = grpc.StatusCode[code], clip(text)
    await context.abort(status, text, metadata_of(error, request_id) + retry_metadata(error, status, text))
    raise AssertionError("abort returned")


def metadata_of(error: Exception, request_id: str = "") -> Metadata:
    """Trailing metadata of `error`: what, who and where."""
    pairs: list[tuple[str, str]] = []
    if isinstance(error, EPRuntimeError):
        pairs.append((keys.ERROR, type(error).__name__))
    if isinstance(error, InvalidRequestError) and error.field:
        pairs.append((keys.FIELD, error.field))
    if isinstance(error, RankLostError):
        pairs += [(keys.RANK, str(error.slot)), (keys.HOST, error.host)]
    if request_id:
        pairs.append((keys.REQUEST_ID, request_id))
    return tuple((key, _ascii(value)) for key, value in pairs)


def retry_metadata(error: Exception, status: grpc.StatusCode, text: str) -> Metadata:
    """When a retry of a call that ended with `error` makes sense: in our own words, and in gRPC's two forms."""
    retry_after_s = getattr(error, "retry_after_s", None)
    if retry_after_s is None:
        return ()
    millis = str(round(retry_after_s * 1000))
    pairs: Metadata = ((keys.RETRY_AFTER_MS, millis), (keys.RETRY_PUSHBACK_MS, millis))
    if len(text.encode()) <= _MAX_DETAILS_TEXT_BYTES:
        pairs += ((keys.STATUS_DETAILS, _status_details(int(status.value[0]), text, int(millis))),)
    return pairs


def _status_details(code: int, text: str, retry_after_ms: int) -> bytes:
    """A google.rpc.Status with one google.rpc.RetryInfo (both in googleapis, google/rpc/).

    Written out field by field, as the package that has them generated is not needed for anything else.
    """
    delay = duration_pb2.Duration()
    delay.FromMilliseconds(retry_after_ms)
    info = any_pb2.Any(  # RetryInfo{retry_delay = 1: Duration}
        type_url="type.googleapis.com/google.rpc.RetryInfo", value=_field(1, delay.SerializeToString())
    )
    # Status{code = 1: int32, message = 2: string, details = 3: repeated Any}; codes are below 128
    return bytes([0x08, code]) + _field(2, text.encode()) + _field(3, info.SerializeToString())


def _field(number: int, data: bytes) -> bytes:
    """A length-delimited field of a protobuf message."""
    size, length = len(data), bytearray()
    while size >= 0x80:
        length.append(size & 0x7F | 0x80)
        size >>= 7
    length.append(size)
    return bytes([number << 3 | 2]) + bytes(length) + data


def clip(text: str, limit: int = MAX_TEXT_BYTES) -> str:
    """Cuts `text` in the middle so that gRPC sends it in at most about `limit` bytes; the remedy is at the end."""
    sizes = [1 if " " <= c <= "~" and c != "%" else 3 * len(c.encode("utf-8", "replace")) for c in text]
    if sum(sizes) <= limit:
        return text.encode("utf-8", "replace").decode()
    half = (limit - 16) // 2
    head = _fitting(sizes, half)
    tail = _fitting(sizes[::-1], half)
    return f"{text[:head]} [...] {text[len(text) - tail :]}".encode("utf-8", "replace").decode()


def _fitting(sizes: list[int], room: int) -> int:
    """How many leading entries of `sizes` fit into `room`."""
    used = 0
    for count, size in enumerate(sizes):
        used += size
        if used > room:
            return count
    return len(sizes)


def _ascii(value: str) -> str:
    return value.encode("ascii", "backslashreplace").decode().strip()[:_MAX_VALUE_BYTES]
