"""Client: the blocking client."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from types import TracebackType
from typing import Any, Literal, cast, overload

import grpc

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
MAX_CONCURRENCY = 128


class Stream(Iterator[Chunk]):
    """Chunks of one running request. Leaving it early (close, `with`, garbage collection) ends the request.

    A request that fails before its first chunk, for a reason that may pass, is sent again (see Client, retries).

    Attributes:
        request_id: to abort it by.
    """

    def __init__(self, start: Callable[[float | None], Any], request_id: str, address: str, attempts: Attempts) -> None:
        self.request_id = request_id
        self._start, self._address, self._attempts = start, address, attempts
        self._began = False
        self._closed = threading.Event()
        self._call = start(attempts.timeout())

    def __next__(self) -> Chunk:
        """Raises the error that ended the request."""
        while True:
            try:
                message = next(self._call)
            except grpc.RpcError as error:
                self._again(error)
            else:
                self._began = True
                return wire.chunk(message, self.request_id)

    def _again(self, cause: grpc.RpcError) -> None:
        """Sends the request once more, after a while; or raises the error that ended it."""
        error = renamed(to_error(cause, self._address), wire.FIELD_NAMES)
        wait_s = None if self._began else self._attempts.wait_s(error)
        if wait_s is None:
            raise error from cause
        if self._closed.wait(wait_s):
            raise RequestAbortedError("the stream was closed") from cause
        self._call = self._start(self._attempts.timeout())
        if self._closed.is_set():  # in this very moment, by another thread
            self._call.cancel()

    def result(self) -> GenerateResult:
        """Waits for the end and returns what came, whole (without the chunks that were already taken)."""
        collector = wire.Collector()
        for chunk in self:
            collector.add(chunk)
        return collector.result()

    def close(self) -> None:
        """Ends the request, if it still runs. Safe to call from another thread, and again."""
        self._closed.set()
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
        api_key: access token; None: that of the environment variable EPRUNTIME_API_KEY, if it is set; "": none. Without
            `tls` it crosses the network readable.
        tls: Tls(ca=...) or True (authorities that gRPC knows) for TLS; None for plain text.
        timeout: seconds that each call may take, retries included, unless it says otherwise; None: no limit.
        retries: how often a call is sent again that failed before its first chunk because nothing answered, the server
            loads or restarts, or its queue is full. Waits get longer; a hint of the server's is followed.

    Every method raises the errors of epruntime.errors: InvalidRequestError (with field), QueueFullError (with
    retry_after_s), UnavailableError (nothing answers, loading, draining), UnauthenticatedError, RequestTimeoutError,
    EngineDeadError, ...; ConfigError where address, TLS or token cannot work at all.
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
        self._channel = self._endpoint.channel()
        self._stub = InferenceStub(self._channel)
        self._health = self._channel.unary_unary(channel.HEALTH_CHECK, channel.health_request, channel.health_status)

    @overload
    def generate(
        self,
        prompts: str | Sequence[int] | Mapping[str, Any],
        sampling_params: SamplingParams | None = None,
        *,
        timeout: float | None = None,
        return_prompt_token_ids: bool = False,
        **sampling: Any,
    ) -> GenerateResult: ...

    @overload
    def generate(
        self,
        prompts: Sequence[wire.Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        timeout: float | None = None,
        return_prompt_token_ids: bool = False,
        **sampling: Any,
    ) -> list[GenerateResult]: ...

    def generate(
        self,
        prompts: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        timeout: float | None = None,
        return_prompt_token_ids: bool = False,
        **sampling: Any,
    ) -> GenerateResult | list[GenerateResult]:
        """Generates for one prompt, or for a list of prompts at once.

        Args:
            prompts: text, a list of token ids, {"prompt_token_ids": [...]}, {"messages": [...]}, or a list of those.
            sampling_params: one for all, or one per prompt; or the same fields as keywords (`temperature=0`).
            timeout: seconds for each request.
            return_prompt_token_ids: tell the ids of the prompt's tokens, in GenerateResult.prompt_token_ids.

        Returns:
            A GenerateResult for one prompt, a list in order for a list.
        """
        items, single = prompt_list(prompts)
        params = wire.split_params(sampling_params, sampling, len(items))
        requests = [
            wire.request(prompt, given, return_prompt_token_ids=return_prompt_token_ids)
            for prompt, given in zip(items, params, strict=True)
        ]
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
        return_prompt_token_ids: bool = False,
        **sampling: Any,
    ) -> Stream:
        """Generates for one prompt and gives the output out as it comes."""
        (params,) = wire.split_params(sampling_params, sampling, 1)
        request = wire.request(prompt, params, request_id, return_prompt_token_ids=return_prompt_token_ids)
        return self._start(request, timeout)

    @overload
    def chat(
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
    def chat(
        self,
        messages: Messages,
        sampling_params: SamplingParams | None = None,
        *,
        stream: Literal[True],
        request_id: str | None = None,
        timeout: float | None = None,
        return_prompt_token_ids: bool = False,
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
        return_prompt_token_ids: bool = False,
        **sampling: Any,
    ) -> GenerateResult | Stream:
        """Answers a conversation: a list of {"role": ..., "content": ...}, rendered by the model's chat template."""
        started = self.stream(
            {"messages": messages},
            sampling_params,
            request_id=request_id,
            timeout=timeout,
            return_prompt_token_ids=return_prompt_token_ids,
            **sampling,
        )
        return started if stream else started.result()

    def abort(self, request_id: str, *, timeout: float | None = None) -> None:
        """Ends a running request, also one of another client; its stream ends with finish_reason "abort".

        Raises:
            RequestNotFoundError: no live request has this id; it may just have ended.
        """
        self._unary(self._stub.Abort, pb.AbortRequest(request_id=request_id), timeout, retries=0)

    def info(self, *, timeout: float | None = None) -> ServerInfo:
        """What is served, by which ranks, and how loaded the experts are."""
        return facts.server_info(self._unary(self._stub.GetServerInfo, pb.GetServerInfoRequest(), timeout))

    def model_info(self, *, timeout: float | None = None) -> ModelInfo:
        """Facts of the served model that never change, the sampling defaults of its checkpoint among them."""
        return facts.model_info(self._unary(self._stub.GetModelInfo, pb.GetModelInfoRequest(), timeout))

    def tokenize(self, prompt: str | Messages, *, timeout: float | None = None) -> TokenizeResult:
        """The token ids that the model would get for a text or a conversation, special tokens included."""
        request = facts.tokenize_request(prompt)
        return facts.tokenize_result(self._unary(self._stub.Tokenize, request, timeout), request)

    def detokenize(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool = False, timeout: float | None = None
    ) -> str:
        """The text of token ids."""
        request = facts.detokenize_request(token_ids, skip_special_tokens)
        return cast(str, self._unary(self._stub.Detokenize, request, timeout).text)

    def health(self, *, timeout: float | None = None) -> str:
        """ "serving" or "not serving" (loading, stalled, restarting, draining, dead); needs no token, and tries once.

        Raises:
            UnavailableError: nothing answers.
        """
        return cast(str, self._unary(self._health, None, timeout, retries=0))

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
        stub, metadata = self._stub, self._endpoint.metadata

        def start(timeout: float | None) -> Any:
            return stub.Generate(request, timeout=timeout, metadata=metadata)

        return Stream(start, request.request_id, self.address, self._attempts(timeout, self.retries))

    def _attempts(self, timeout: float | None, retries: int) -> Attempts:
        return Attempts(retries, self.timeout if timeout is None else timeout)

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

    def _unary(self, method: Any, request: Any, timeout: float | None, *, retries: int | None = None) -> Any:
        attempts = self._attempts(timeout, self.retries if retries is None else retries)
        while True:
            try:
                return method(request, timeout=attempts.timeout(), metadata=self._endpoint.metadata)
            except grpc.RpcError as cause:
                error = to_error(cause, self.address)
                wait_s = attempts.wait_s(error)
                if wait_s is None:
                    raise error from cause
            time.sleep(wait_s)
