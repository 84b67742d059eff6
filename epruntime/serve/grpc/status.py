"""An exception becomes a gRPC status with details in trailing metadata (keys: proto/keys.py)."""

from __future__ import annotations

import logging
from typing import NoReturn

import grpc
import grpc.aio

from epruntime.errors import EPRuntimeError, InvalidRequestError, RankLostError, status_of
from epruntime.proto import keys

logger = logging.getLogger("epruntime.serve.grpc.status")

#: Clients refuse headers above 8 KiB by default, and gRPC sends each byte that is not printable ASCII as three.
MAX_TEXT_BYTES = 4096
_MAX_VALUE_BYTES = 256

Metadata = tuple[tuple[str, str], ...]


async def abort(context: grpc.aio.ServicerContext, error: Exception, request_id: str = "") -> NoReturn:
    """Ends the call with the status of `error`; a foreign exception becomes INTERNAL and is logged in full."""
    code, _ = status_of(error)
    text = str(error)
    if not isinstance(error, EPRuntimeError):
        logger.error("internal error in request %r", request_id, exc_info=error)
        text = f"internal error of the server ({type(error).__name__}: {error}); its log has more"
    await context.abort(grpc.StatusCode[code], clip(text), metadata_of(error, request_id))
    raise AssertionError("abort returned")


def metadata_of(error: Exception, request_id: str = "") -> Metadata:
    """Trailing metadata of `error`: who, where, and when a retry makes sense."""
    pairs: list[tuple[str, str]] = []
    if isinstance(error, EPRuntimeError):
        pairs.append((keys.ERROR, type(error).__name__))
    if isinstance(error, InvalidRequestError) and error.field:
        pairs.append((keys.FIELD, error.field))
    retry_after_s = getattr(error, "retry_after_s", None)
    if retry_after_s is not None:
        pairs.append((keys.RETRY_AFTER_MS, str(round(retry_after_s * 1000))))
    if isinstance(error, RankLostError):
        pairs += [(keys.RANK, str(error.slot)), (keys.HOST, error.host)]
    if request_id:
        pairs.append((keys.REQUEST_ID, request_id))
    return tuple((key, _ascii(value)) for key, value in pairs)


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
