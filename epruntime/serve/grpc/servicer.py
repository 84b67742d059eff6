"""The Inference service on an Engine.

GenerateRequest -> convert -> Engine.stream -> Pieces -> GenerateResponse, one write at a time

Backpressure: the next message is made when the last write has been taken by gRPC's flow control. The engine merges what
a slow reader has not fetched, so such a reader gets fewer, larger messages, and holds nothing but its own request; one
that reads nothing at all loses it after a while.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import Any, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from epruntime.errors import EngineDeadError, InvalidRequestError, RequestAbortedError, RequestTimeoutError
from epruntime.outputs import RequestDelta
from epruntime.proto import inference_pb2 as pb
from epruntime.proto import keys
from epruntime.serve.gate import Gate
from epruntime.serve.grpc import convert, status
from epruntime.serve.grpc.pieces import Pieces

logger = logging.getLogger("epruntime.serve.grpc.servicer")

T = TypeVar("T")

#: Seconds after which a client that reads nothing of its stream loses its request.
UNREAD_S = 600.0


class Malformed:
    """Stands in for a message whose bytes do not parse."""

    def __init__(self, reason: str) -> None:
        self.reason = reason


class InferenceServicer:
    """The methods of the Inference service; what the unary ones raise becomes a status where they are registered."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    async def Generate(self, request: pb.GenerateRequest | Malformed, context: grpc.aio.ServicerContext) -> None:
        """Streams one request. Cancelling the call cancels this coroutine, which closes the engine's stream."""
        request_id = ""
        try:
            message: pb.GenerateRequest = _parsed(request)
            request_id = convert.request_id_of(message)
            await self._generate(message, request_id, context)
        except grpc.aio.BaseError:
            # raised by a write or a status on a call that is over: the client has gone, and nobody is left to tell
            logger.debug("the client of request %r has gone", request_id, exc_info=True)
            raise
        except RequestAbortedError as error:
            await status.abort(context, self._gate.closing or error, request_id)
        except Exception as error:  # noqa: BLE001  every failure must reach the client as a status
            await status.abort(context, error, request_id)

    async def _generate(self, request: pb.GenerateRequest, request_id: str, context: grpc.aio.ServicerContext) -> None:
        engine = self._gate.admit()
        prompt = convert.prompt_of(request)
        params = engine.sampling_params(**convert.sampling_of(request.sampling))
        pieces = Pieces(request_id, tell_prompt=request.return_prompt_token_ids)
        with self._gate.claim(request_id):
            async with aclosing(engine.stream(prompt, params, request_id=request_id)) as stream:
                admitted = False
                async for delta in stream:
                    if not admitted:
                        # not before: an answer without them is one that gRPC's own retry policies may try again
                        await context.send_initial_metadata(((keys.REQUEST_ID, request_id),))
                        admitted = True
                    if self._gate.closing is not None and _aborted(delta):
                        raise self._gate.closing
                    for piece in pieces.of(delta):
                        await _write(context, piece)

    async def Abort(self, request: pb.AbortRequest) -> pb.AbortResponse:
        if not request.request_id:
            raise InvalidRequestError("is missing; name the request to abort", field="request_id")
        await self._gate.abort(request.request_id)
        return pb.AbortResponse()

    async def GetServerInfo(self, request: pb.GetServerInfoRequest) -> pb.GetServerInfoResponse:
        engine, info = self._gate.engine, {}
        if engine is not None:
            try:
                info = await engine.info()
            except EngineDeadError:
                logger.debug("the engine died while it was asked for its facts", exc_info=True)
        return convert.server_info(self._gate, info)

    async def GetModelInfo(self, request: pb.GetModelInfoRequest) -> pb.GetModelInfoResponse:
        return convert.model_info(self._gate.reach().model_info)

    async def Tokenize(self, request: pb.TokenizeRequest) -> pb.TokenizeResponse:
        text, token_ids = await self._gate.reach().tokenize(convert.prompt_of(request))
        rendered = text or "" if request.HasField("chat") else ""
        return pb.TokenizeResponse(token_ids=token_ids, text=rendered)

    async def Detokenize(self, request: pb.DetokenizeRequest) -> pb.DetokenizeResponse:
        text = await self._gate.reach().detokenize(
            list(request.token_ids), skip_special_tokens=request.skip_special_tokens
        )
        return pb.DetokenizeResponse(text=text)


async def _write(context: grpc.aio.ServicerContext, piece: pb.GenerateResponse) -> None:
    """Returns when gRPC has taken the message; that is when the client has read most of what came before.

    Raises:
        RequestTimeoutError: the client reads nothing, and its request would hold its place for ever.
    """
    try:
        async with asyncio.timeout(UNREAD_S):
            await context.write(piece)
    except TimeoutError as error:
        raise RequestTimeoutError(
            f"the client has read nothing for {UNREAD_S:g} s, so its request was ended; read the stream as it comes"
        ) from error


def add_to_server(servicer: InferenceServicer, server: grpc.aio.Server) -> None:
    """Registers the service with parsers that leave malformed bytes to the handlers.

    (With gRPC's own, a message that does not parse ends as UNKNOWN or INTERNAL: a fault of the server.)
    """
    unary = {
        name: grpc.unary_unary_rpc_method_handler(
            _answered(getattr(servicer, name)), _parser(kind), answer.SerializeToString
        )
        for name, kind, answer in (
            ("Abort", pb.AbortRequest, pb.AbortResponse),
            ("GetServerInfo", pb.GetServerInfoRequest, pb.GetServerInfoResponse),
            ("GetModelInfo", pb.GetModelInfoRequest, pb.GetModelInfoResponse),
            ("Tokenize", pb.TokenizeRequest, pb.TokenizeResponse),
            ("Detokenize", pb.DetokenizeRequest, pb.DetokenizeResponse),
        )
    }
    generate = grpc.unary_stream_rpc_method_handler(
        servicer.Generate, _parser(pb.GenerateRequest), pb.GenerateResponse.SerializeToString
    )
    methods = {"Generate": generate, **unary}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(keys.SERVICE, methods),))


def _answered(method: Callable[[Any], Awaitable[T]]) -> Callable[[Any, grpc.aio.ServicerContext], Awaitable[T]]:
    """A handler, every failure of which is a status (see status.py)."""

    async def answer(request: Any, context: grpc.aio.ServicerContext) -> T:
        try:
            return await method(_parsed(request))
        except Exception as error:  # noqa: BLE001  every failure must reach the client as a status
            await status.abort(context, error)

    return answer


def _parser(kind: Any) -> Callable[[bytes], Any]:
    def parse(data: bytes) -> Any:
        try:
            return kind.FromString(data)
        except DecodeError as error:
            return Malformed(f"{len(data)} bytes are not a {kind.DESCRIPTOR.full_name}: {error}")

    return parse


def _parsed(request: Any) -> Any:
    if isinstance(request, Malformed):
        raise InvalidRequestError(f"{request.reason}; send what epruntime/proto/inference.proto describes")
    return request


def _aborted(delta: RequestDelta) -> bool:
    return any(output.finish_reason == "abort" for output in delta.outputs)
