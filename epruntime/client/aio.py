"""AsyncClient: the asyncio client, with the methods of Client."""

# ruff: noqa: ASYNC109  `timeout` is the deadline that gRPC sends along

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Literal, cast, overload

import grpc
import grpc.aio

from epruntime.client import channel, facts, wire
from epruntime.client.failure import to_error
from epruntime.client.retry import DEFAULT_RETRIES, Attempts
from epruntime.client.types import Chunk, GenerateResult, ModelInfo, ServerInfo, TokenizeResult
from epruntime.errors import RequestAbortedError, renamed
from epruntime.prompts import prompt_list
from epruntime.proto import inference_pb2 as pb
from epruntime.proto.inference_pb2_grpc import InferenceStub
from epruntime.sampling_params import SamplingParams

Messages = Sequence[Mapping[str, str]]
#: Calls in flight at once when a list of prompts is generated.
MAX_CONCURRENCY = 512


class AsyncStream(AsyncIterator[Chunk]):
    """Chunks of one running request. Leaving it early (close, `async with`, garbage collection) ends the request.

    A request that fails before its first chunk, for a reason that may pass, is sent again (see Client, retries).

    Attributes:
        request_id: to abort it by.
    """

    def __init__(self, start: Callable[[float | None], Any], request_id: str, address: str, attempts: Attempts) -> None:
        self.request_id = request_id
        self._start, self._address, self._attempts = start, address, attempts
        self._began = False
        self._closed = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._call = start(attempts.timeout())

    def __del__(self) -> None:
        # a stream that was dropped half-read: gRPC's own call lives on in its tasks, and so would the request
        if not self._loop.is_closed() and not self._call.done():
            self._call.cancel()

    async def __anext__(self) -> Chunk:
        """Raises the error that ended the request."""
        while True:
            try:
                message = await self._call.read()
            except grpc.aio.AioRpcError as error:
                await self._again(error)
                continue
            except asyncio.CancelledError:
                if self._closed.is_set():  # by close(), which cancels the call and not the task that reads it
                    raise RequestAbortedError("the stream was closed") from None
                raise
            if message is grpc.aio.EOF:
                raise StopAsyncIteration
            self._began = True
            return wire.chunk(message, self.request_id)

    async def _again(self, cause: grpc.aio.AioRpcError) -> None:
        """Sends the request once more, after a while; or raises the error that ended it."""
        error = renamed(to_error(cause, self._address), wire.FIELD_NAMES)
        wait_s = None if self._began else self._attempts.wait_s(error)
        if wait_s is None:
            raise error from cause
        with suppress(TimeoutError):
            await asyncio.wait_for(self._closed.wait(), wait_s)
            raise RequestAbortedError("the stream was closed") from cause
        self._call = self._start(self._attempts.timeout())

    async def result(self) -> GenerateResult:
        """Waits for the end and returns what came, whole (without the chunks that were already taken)."""
        collector = wire.Collector()
        async for chunk in self:
            collector.add(chunk)
        return collector.result()

    def close(self) -> None:
        """Ends the request, if it still runs. Safe to call again."""
        self._closed.set()
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

    def __init__(
        self,
        address: str = channel.DEFAULT_ADDRESS,
        *,
        api_key: str | None = None,
        tls: channel.Tls | bool | None = None,
        timeout: float | None = None,
        retries: int = DEFAULT_RETRIES,
    ) -> None:
        self._endpoint = channel.endpoint(address, api_key=api_key, tls=tls)
        self.address, self.timeout, self.retries = address, timeout, retries
        self._channel = self._endpoint.aio_channel()
        self._stub = InferenceStub(self._channel)
        self._health = self._channel.unary_unary(channel.HEALTH_CHECK, channel.health_request, channel.health_status)

    @overload
    async def generate(
        self,
        prompts: str | Sequence[int] | Mapping[str, Any],
        sampling_params: SamplingParams | None = None,
        *,
        timeout: float | None = None,
        return_prompt_token_ids: bool = False,
        **sampling: Any,
    ) -> GenerateResult: ...

    @overload
    async def generate(
        self,
        prompts: Sequence[wire.Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        timeout: float | None = None,
        return_prompt_token_ids: bool = False,
        **sampling: Any,
    ) -> list[GenerateResult]: ...

    async def generate(
        self,
        prompts: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        timeout: float | None = None,
        return_prompt_token_ids: bool = False,
        **sampling: Any,
    ) -> GenerateResult | list[GenerateResult]:
        """Generates for one prompt, or for a list of prompts at once; see Client.generate."""
        items, single = prompt_list(prompts)
        params = wire.split_params(sampling_params, sampling, len(items))
        requests = [
            wire.request(prompt, given, return_prompt_token_ids=return_prompt_token_ids)
            for prompt, given in zip(items, params, strict=True)
        ]
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
        return_prompt_token_ids: bool = False,
        **sampling: Any,
    ) -> AsyncStream:
        """Generates for one prompt and gives the output out as it comes."""
        (params,) = wire.split_params(sampling_params, sampling, 1)
        request = wire.request(prompt, params, request_id, return_prompt_token_ids=return_prompt_token_ids)
        return self._start(request, timeout)

    @overload
    async def chat(
        self,
        messages: Messages,
        sampling_params: SamplingParams | None = None,
        *,
        stream: Literal[False] = False,
        request_id: str | None = None,
        timeout: float | None = None,
        return_prompt_token_ids: bool = False,
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
        return_prompt_token_ids: bool = False,
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
        return_prompt_token_ids: bool = False,
        **sampling: Any,
    ) -> GenerateResult | AsyncStream:
        """Answers a conversation; see Client.chat."""
        started = self.stream(
            {"messages": messages},
            sampling_params,
            request_id=request_id,
            timeout=timeout,
            return_prompt_token_ids=return_prompt_token_ids,
            **sampling,
        )
        return started if stream else await started.result()

    async def abort(self, request_id: str, *, timeout: float | None = None) -> None:
        """Ends a running request; see Client.abort."""
        await self._unary(self._stub.Abort, pb.AbortRequest(request_id=request_id), timeout, retries=0)

    async def info(self, *, timeout: float | None = None) -> ServerInfo:
        """What is served, by which ranks, and how loaded the experts are."""
        return facts.server_info(await self._unary(self._stub.GetServerInfo, pb.GetServerInfoRequest(), timeout))

    async def model_info(self, *, timeout: float | None = None) -> ModelInfo:
        """Facts of the served model; see Client.model_info."""
        return facts.model_info(await self._unary(self._stub.GetModelInfo, pb.GetModelInfoRequest(), timeout))

    async def tokenize(self, prompt: str | Messages, *, timeout: float | None = None) -> TokenizeResult:
        """The token ids that the model would get; see Client.tokenize."""
        request = facts.tokenize_request(prompt)
        return facts.tokenize_result(await self._unary(self._stub.Tokenize, request, timeout), request)

    async def detokenize(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool = False, timeout: float | None = None
    ) -> str:
        """The text of token ids."""
        request = facts.detokenize_request(token_ids, skip_special_tokens)
        return cast(str, (await self._unary(self._stub.Detokenize, request, timeout)).text)

    async def health(self, *, timeout: float | None = None) -> str:
        """ "serving" or "not serving"; see Client.health."""
        return cast(str, await self._unary(self._health, None, timeout, retries=0))

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
        stub, metadata = self._stub, self._endpoint.metadata

        def start(timeout: float | None) -> Any:
            return stub.Generate(request, timeout=timeout, metadata=metadata)

        return AsyncStream(start, request.request_id, self.address, self._attempts(timeout, self.retries))

    def _attempts(self, timeout: float | None, retries: int) -> Attempts:
        return Attempts(retries, self.timeout if timeout is None else timeout)

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

    async def _unary(self, method: Any, request: Any, timeout: float | None, *, retries: int | None = None) -> Any:
        attempts = self._attempts(timeout, self.retries if retries is None else retries)
        while True:
            try:
                return await method(request, timeout=attempts.timeout(), metadata=self._endpoint.metadata)
            except grpc.aio.AioRpcError as cause:
                error = to_error(cause, self.address)
                wait_s = attempts.wait_s(error)
                if wait_s is None:
                    raise error from cause
            await asyncio.sleep(wait_s)
