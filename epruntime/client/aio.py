"""AsyncClient: the asyncio client, with the methods of Client."""

# ruff: noqa: ASYNC109  `timeout` is the deadline that gRPC sends along

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, cast, overload

import grpc
import grpc.aio

from epruntime.client import channel, wire
from epruntime.client.failure import to_error
from epruntime.client.types import Chunk, GenerateResult, ServerInfo
from epruntime.errors import RequestAbortedError
from epruntime.proto import inference_pb2 as pb
from epruntime.proto.inference_pb2_grpc import InferenceStub
from epruntime.sampling_params import SamplingParams

Messages = Sequence[Mapping[str, str]]
#: Calls in flight at once when a list of prompts is generated.
MAX_CONCURRENCY = 512


class AsyncStream(AsyncIterator[Chunk]):
    """Chunks of one running request. Leaving it early (close, `async with`, garbage collection) ends the request.

    Attributes:
        request_id: to abort it by.
    """

    def __init__(self, call: Any, request_id: str, address: str) -> None:
        self.request_id = request_id
        self._call, self._address = call, address
        self._closed = False
        self._loop = asyncio.get_running_loop()

    def __del__(self) -> None:
        # a stream that was dropped half-read: gRPC's own call lives on in its tasks, and so would the request
        if not self._loop.is_closed() and not self._call.done():
            self._call.cancel()

    async def __anext__(self) -> Chunk:
        """Raises the error that ended the request."""
        try:
            message = await self._call.read()
        except grpc.aio.AioRpcError as error:
            raise to_error(error, self._address) from error
        except asyncio.CancelledError:
            if self._closed:  # by close(), which cancels the call and not the task that reads it
                raise RequestAbortedError("the stream was closed") from None
            raise
        if message is grpc.aio.EOF:
            raise StopAsyncIteration
        return wire.chunk(message, self.request_id)

    async def result(self) -> GenerateResult:
        """Waits for the end and returns what came, whole (without the chunks that were already taken)."""
        collector = wire.Collector()
        async for chunk in self:
            collector.add(chunk)
        return collector.result()

    def close(self) -> None:
        """Ends the request, if it still runs. Safe to call again."""
        self._closed = True
        self._call.cancel()

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AsyncClient:
    """Talks to one epruntime server from the event loop that it is used on.

        async with AsyncClient("127.0.0.1:50051") as client:
            async for chunk in client.stream("Hello", temperature=0, max_tokens=32):
                print(chunk.text, end="", flush=True)

    Arguments and errors are those of Client.
    """

    def __init__(self, address: str = channel.DEFAULT_ADDRESS, *, timeout: float | None = None) -> None:
        self.address = channel.check_address(address)
        self.timeout = timeout
        self._channel = grpc.aio.insecure_channel(self.address, options=channel.options(self.address))
        self._stub = InferenceStub(self._channel)
        self._health = self._channel.unary_unary(channel.HEALTH_CHECK, channel.health_request, channel.health_status)

    @overload
    async def generate(
        self,
        prompts: str | Sequence[int] | Mapping[str, Any],
        sampling_params: SamplingParams | None = None,
        *,
        timeout: float | None = None,
        **sampling: Any,
    ) -> GenerateResult: ...

    @overload
    async def generate(
        self,
        prompts: Sequence[wire.Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        timeout: float | None = None,
        **sampling: Any,
    ) -> list[GenerateResult]: ...

    async def generate(
        self,
        prompts: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        timeout: float | None = None,
        **sampling: Any,
    ) -> GenerateResult | list[GenerateResult]:
        """Generates for one prompt, or for a list of prompts at once; see Client.generate."""
        items, single = wire.split_prompts(prompts)
        params = wire.split_params(sampling_params, sampling, len(items))
        requests = [wire.request(*pair) for pair in zip(items, params, strict=True)]
        if single:
            return await self._one(requests[0], timeout)
        return await self._many(requests, timeout)

    def stream(
        self,
        prompt: wire.Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        timeout: float | None = None,
        **sampling: Any,
    ) -> AsyncStream:
        """Generates for one prompt and gives the output out as it comes."""
        (params,) = wire.split_params(sampling_params, sampling, 1)
        return self._start(wire.request(prompt, params, request_id), timeout)

    @overload
    async def chat(
        self,
        messages: Messages,
        sampling_params: SamplingParams | None = None,
        *,
        stream: Literal[False] = False,
        request_id: str | None = None,
        timeout: float | None = None,
        **sampling: Any,
    ) -> GenerateResult: ...

    @overload
    async def chat(
        self,
        messages: Messages,
        sampling_params: SamplingParams | None = None,
        *,
        stream: Literal[True],
        request_id: str | None = None,
        timeout: float | None = None,
        **sampling: Any,
    ) -> AsyncStream: ...

    async def chat(
        self,
        messages: Messages,
        sampling_params: SamplingParams | None = None,
        *,
        stream: bool = False,
        request_id: str | None = None,
        timeout: float | None = None,
        **sampling: Any,
    ) -> GenerateResult | AsyncStream:
        """Answers a conversation; see Client.chat."""
        started = self.stream(
            {"messages": messages}, sampling_params, request_id=request_id, timeout=timeout, **sampling
        )
        return started if stream else await started.result()

    async def abort(self, request_id: str, *, timeout: float | None = None) -> None:
        """Ends a running request; see Client.abort."""
        await self._unary(self._stub.Abort, pb.AbortRequest(request_id=request_id), timeout)

    async def info(self, *, timeout: float | None = None) -> ServerInfo:
        """What is served, by which ranks, and how loaded the experts are."""
        return wire.server_info(await self._unary(self._stub.GetServerInfo, pb.GetServerInfoRequest(), timeout))

    async def health(self, *, timeout: float | None = None) -> str:
        """ "serving" or "not serving" (loading, draining, dead). Raises UnavailableError if nothing answers."""
        return cast(str, await self._unary(self._health, None, timeout))

    async def close(self) -> None:
        """Ends what runs and closes the connection."""
        await self._channel.close()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def _start(self, request: pb.GenerateRequest, timeout: float | None) -> AsyncStream:
        call = self._stub.Generate(request, timeout=self.timeout if timeout is None else timeout)
        return AsyncStream(call, request.request_id, self.address)

    async def _one(self, request: pb.GenerateRequest, timeout: float | None) -> GenerateResult:
        async with self._start(request, timeout) as stream:
            return await stream.result()

    async def _many(self, requests: list[pb.GenerateRequest], timeout: float | None) -> list[GenerateResult]:
        """All results in order; the first failure ends the other requests."""
        room = asyncio.Semaphore(MAX_CONCURRENCY)

        async def one(request: pb.GenerateRequest) -> GenerateResult:
            async with room:
                return await self._one(request, timeout)

        tasks = [asyncio.ensure_future(one(request)) for request in requests]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _unary(self, method: Any, request: Any, timeout: float | None) -> Any:
        try:
            return await method(request, timeout=self.timeout if timeout is None else timeout)
        except grpc.aio.AioRpcError as error:
            raise to_error(error, self.address) from error
