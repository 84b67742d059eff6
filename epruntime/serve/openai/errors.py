"""An exception becomes an HTTP status and a body in OpenAI's form: {"error": {message, type, param, code}}."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

from epruntime.errors import EPRuntimeError, InvalidRequestError, status_of
from epruntime.serve.client_text import client_text
from epruntime.serve.openai.json import encode

logger = logging.getLogger("epruntime.serve.openai.errors")

#: Error texts may quote the request; this bounds them. The remedy is at the end, so the middle is cut.
MAX_TEXT = 4000
#: Said with a 503 whose error does not know better, seconds.
RETRY_S = 5.0
_KINDS = {429: "rate_limit_error"}
_CODES: dict[int, str] = {
    401: "invalid_api_key",
    404: "not_found",
    405: "method_not_allowed",
    408: "request_timeout",
    413: "request_too_large",
    415: "unsupported_media_type",
    429: "rate_limit_exceeded",
    499: "aborted",
    500: "internal_error",
    503: "service_unavailable",
    504: "timeout",
}


class HttpError(Exception):
    """An answer other than success, for what has no type of its own in epruntime.errors.

    Args:
        param: the request field at fault. code: OpenAI's word for the kind of error; default: by status.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.status, self.param, self.code = status, param, code or _CODES.get(status)
        self.headers = dict(headers or {})
        super().__init__(message)

    @property
    def body(self) -> dict[str, Any]:
        kind = _KINDS.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": clip(str(self)), "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        return Response(encode(self.body), self.status, self.headers, media_type="application/json")


def http_error(error: Exception, request_id: str = "") -> HttpError:
    """What a client is told of `error`; a foreign exception becomes a 500 and is logged in full."""
    if isinstance(error, HttpError):
        return error
    _, status = status_of(error)
    message = client_text(error)
    if not isinstance(error, EPRuntimeError):
        logger.error("internal error in request %r", request_id, exc_info=error)
        message = f"internal error of the server ({type(error).__name__}: {error}); its log has more"
    headers = {}
    retry_after_s = getattr(error, "retry_after_s", None)
    if retry_after_s is None and status == 503:
        retry_after_s = RETRY_S
    if retry_after_s is not None:
        headers["Retry-After"] = str(max(math.ceil(retry_after_s), 1))  # whole seconds (RFC 9110, 10.2.3)
    param = error.field or None if isinstance(error, InvalidRequestError) else None
    return HttpError(status, message, param=param, headers=headers)


def clip(text: str, limit: int = MAX_TEXT) -> str:
    if len(text) <= limit:
        return text
    half = limit // 2 - 4
    return f"{text[:half]} [...] {text[-half:]}"
