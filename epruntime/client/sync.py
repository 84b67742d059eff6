"""Client: the blocking client."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from types import TracebackType
from typing import Any, Literal, cast, overload

import grpc

from epruntime.client import channel, wire
from epruntime.client.failure import to_error
from epruntime.client.types import Chunk, GenerateResult, ServerInfo
from epruntime.proto import inference_pb2 as pb
from epruntime.proto.inference_pb2_grpc import InferenceStub
from epruntime.sampling_params import SamplingParams

Messages = Sequence[Mapping[str, str]]
#: Calls in flight at once when a list of prompts is generated.
MAX_CONCURRENCY = 128


class Stream(Iterator[Chunk]):
    """Chunks of one running request. Leaving it early (close, `with`, garbage collection) ends the request.

    Attributes:
        request_id: to abort it by.
    """

    def __init__(self, call: Any, request_id: str, address: str) -> None:
        self.request_id = request_id
        self._call, self._address = call, address

    def __next__(self) -> Chunk:
        """Raises the error that ended the request."""
        try:
            return wire.chunk(next(self._call), self.request_id)
        except grpc.RpcError as error:
            raise to_error(error, self._address) from error

    def result(self) -> GenerateResult:
        """Waits for the end and returns what came, whole (without the chunks that were already taken)."""
        collector = wire.Collector()
        for chunk in self:
            collector.add(chunk)
        return collector.result()

    def close(self) -> None:
        """Ends the request, if it still runs. Safe to call from another thread, and again."""
        self._call.cancel()

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Client:
    """Talks to one epruntime server; safe to share between threads.

        with Client("127.0.0.1:50051") as client:
            print(client.generate("Hello", temperature=0, max_tokens=32).text)

    Args:
        address: HOST:PORT. Nothing is sent before the first call.
        timeout: seconds that each call may take, unless it says otherwise; None: no limit.

    Every method raises the errors of epruntime.errors: InvalidRequestError (with field), QueueFullError (with
    retry_after_s), UnavailableError (nothing answers, loading, draining), RequestTimeoutError, EngineDeadError, ...
    """

    def __init__(self, address: str = channel.DEFAULT_ADDRESS, *, timeout: float | None = None) -> None:
        self.address = channel.check_address(address)
        self.timeout = timeout
        self._channel = grpc.insecure_channel(self.address, options=channel.options(self.address))
        self._stub = InferenceStub(self._channel)
        self._health = self._channel.unary_unary(channel.HEALTH_CHECK, channel.health_request, channel.health_status)

    @overload
    def generate(
        self,
        prompts: str | Sequence[int] | Mapping[str, Any],
        sampling_params: SamplingParams | None = None,
        *,
        timeout: float | None = None,
        **sampling: Any,
    ) -> GenerateResult: ...

    @overload
    def generate(
        self,
        prompts: Sequence[wire.Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        timeout: float | None = None,
        **sampling: Any,
    ) -> list[GenerateResult]: ...

    def generate(
        self,
        prompts: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        timeout: float | None = None,
        **sampling: Any,
    ) -> GenerateResult | list[GenerateResult]:
        """Generates for one prompt, or for a list of prompts at once.

        Args:
            prompts: text, a list of token ids, {"prompt_token_ids": [...]}, {"messages": [...]}, or a list of those.
            sampling_params: one for all, or one per prompt; or the same fields as keywords (`temperature=0`).
            timeout: seconds for each request.

        Returns:
            A GenerateResult for one prompt, a list in order for a list.
        """
        items, single = wire.split_prompts(prompts)
        params = wire.split_params(sampling_params, sampling, len(items))
        requests = [wire.request(*pair) for pair in zip(items, params, strict=True)]
        if single:
            return self._start(requests[0], timeout).result()
        return self._many(requests, timeout)

    def stream(
        self,
        prompt: wire.Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        timeout: float | None = None,
        **sampling: Any,
    ) -> Stream:
        """Generates for one prompt and gives the output out as it comes."""
        (params,) = wire.split_params(sampling_params, sampling, 1)
        return self._start(wire.request(prompt, params, request_id), timeout)

    @overload
    def chat(
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
    def chat(
        self,
        messages: Messages,
        sampling_params: SamplingParams | None = None,
        *,
        stream: Literal[True],
        request_id: str | None = None,
        timeout: float | None = None,
        **sampling: Any,
    ) -> Stream: ...

    def chat(
        self,
        messages: Messages,
        sampling_params: SamplingParams | None = None,
        *,
        stream: bool = False,
        request_id: str | None = None,
        timeout: float | None = None,
        **sampling: Any,
    ) -> GenerateResult | Stream:
        """Answers a conversation: a list of {"role": ..., "content": ...}, rendered by the model's chat template."""
        started = self.stream(
            {"messages": messages}, sampling_params, request_id=request_id, timeout=timeout, **sampling
        )
        return started if stream else started.result()

    def abort(self, request_id: str, *, timeout: float | None = None) -> None:
        """Ends a running request, also one of another client; its stream ends with finish_reason "abort".

        Raises:
            RequestNotFoundError: no live request has this id; it may just have ended.
        """
        self._unary(self._stub.Abort, pb.AbortRequest(request_id=request_id), timeout)

    def info(self, *, timeout: float | None = None) -> ServerInfo:
        """What is served, by which ranks, and how loaded the experts are."""
        return wire.server_info(self._unary(self._stub.GetServerInfo, pb.GetServerInfoRequest(), timeout))

    def health(self, *, timeout: float | None = None) -> str:
        """ "serving" or "not serving" (loading, draining, dead). Raises UnavailableError if nothing answers."""
        return cast(str, self._unary(self._health, None, timeout))

    def close(self) -> None:
        """Ends what runs and closes the connection."""
        self._channel.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start(self, request: pb.GenerateRequest, timeout: float | None) -> Stream:
        call = self._stub.Generate(request, timeout=self.timeout if timeout is None else timeout)
        return Stream(call, request.request_id, self.address)

    def _many(self, requests: list[pb.GenerateRequest], timeout: float | None) -> list[GenerateResult]:
        """All results in order; the first failure ends the other requests."""
        if not requests:
            return []
        started: list[Stream] = []
        given_up = threading.Event()

        def one(request: pb.GenerateRequest) -> GenerateResult:
            stream = self._start(request, timeout)
            started.append(stream)
            if given_up.is_set():
                stream.close()
            return stream.result()

        with ThreadPoolExecutor(min(len(requests), MAX_CONCURRENCY), "epruntime-client") as pool:
            futures = [pool.submit(one, request) for request in requests]
            try:
                done, _ = wait(futures, return_when=FIRST_EXCEPTION)
                for future in futures:
                    if future in done:
                        future.result()
                return [future.result() for future in futures]
            except BaseException:
                given_up.set()
                pool.shutdown(wait=False, cancel_futures=True)
                for stream in list(started):
                    stream.close()
                raise

    def _unary(self, method: Any, request: Any, timeout: float | None) -> Any:
        try:
            return method(request, timeout=self.timeout if timeout is None else timeout)
        except grpc.RpcError as error:
            raise to_error(error, self.address) from error
