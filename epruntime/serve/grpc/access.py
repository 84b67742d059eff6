"""Access tokens of gRPC calls: an interceptor before every method, known or not, unary or streaming."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import grpc.aio

from epruntime.errors import UnauthenticatedError
from epruntime.proto import keys
from epruntime.serve.access import AccessCheck
from epruntime.serve.grpc import status
from epruntime.serve.grpc.health import OPEN_METHODS

logger = logging.getLogger("epruntime.serve.grpc.access")


class AccessInterceptor(grpc.aio.ServerInterceptor):
    """Ends calls that bring no valid token with UNAUTHENTICATED, before their message is read. Health is open."""

    def __init__(self, check: AccessCheck) -> None:
        self._check = check

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        method = handler_call_details.method
        if method.startswith(OPEN_METHODS):
            return await continuation(handler_call_details)
        brought = [value for key, value in handler_call_details.invocation_metadata if key == keys.AUTHORIZATION]
        # two of them are none: which one counts would depend on who reads
        header = brought[0] if len(brought) == 1 and isinstance(brought[0], str) else None
        if self._check.allows(header):
            return await continuation(handler_call_details)
        logger.info("refused a call of %s: %s", method, "wrong access token" if brought else "no access token")
        return _REFUSE_WRONG if brought else _REFUSE_MISSING


def _refusal(text: str) -> Any:
    """A handler that fits every kind of method, as it reads nothing and writes nothing."""

    async def refuse(_: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> None:
        await status.abort(context, UnauthenticatedError(text))

    return grpc.stream_stream_rpc_method_handler(refuse)


_REFUSE_MISSING = _refusal(
    "this server wants an access token: send metadata 'authorization: Bearer TOKEN' "
    "(epruntime's clients: api_key, --api-key or EPRUNTIME_API_KEY)"
)
_REFUSE_WRONG = _refusal("the access token is not one of this server's: check api_key, --api-key or EPRUNTIME_API_KEY")
