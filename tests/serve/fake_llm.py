"""FakeLLM: AsyncLLM's interface without a model. It echoes the prompt: one character is one token."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field, replace

from epruntime.errors import EngineDeadError, InvalidRequestError, QueueFullError, RequestNotFoundError
from epruntime.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from epruntime.sampling_params import SamplingParams

INFO = {
    "version": "0",
    "model": {"name": "echo", "architecture": "Echo"},
    "engine": {"expert_parallel_size": 2},
    "ranks": [
        {
            "slot": 0, "incarnation": 1, "host": "a", "local_rank": 0, "pid": 10,
            "moe": {"layers": {"3": {"expert_tokens": [1, 2, 3]}, "11": {"expert_tokens": [0, 0, 9]}}},
        },
        {
            "slot": 1, "incarnation": 2, "host": "b", "local_rank": 0, "pid": 11,
            "moe": {"layers": {"3": {"expert_tokens": [10, 20, 30]}, "11": {"expert_tokens": [1, 0, 0]}}},
        },
    ],
}  # fmt: skip


@dataclass
class _Live:
    output: CompletionOutput
    metrics: RequestMetrics
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    error: BaseException | None = None


class FakeLLM:
    """Echoes text (characters), token ids (as characters), or the last chat message, again and again.

    Attributes:
        delay_s: between tokens. live, ended: request ids. yields: outputs taken per request id.
        params, prompts: as they arrived, per request id. errors: raised for a prompt's text.
    """

    def __init__(self, delay_s: float = 0.0, queue: int = 10_000) -> None:
        self.delay_s, self.queue = delay_s, queue
        self.live: dict[str, _Live] = {}
        self.ended: list[str] = []
        self.yields: dict[str, int] = {}
        self.params: dict[str, SamplingParams] = {}
        self.prompts: dict[str, object] = {}
        self.errors: dict[str, BaseException] = {}
        self.dead_error: EngineDeadError | None = None
        self.is_shut_down = False

    @property
    def errored(self) -> bool:
        return self.dead_error is not None

    async def generate(
        self, prompt: object, sampling_params: SamplingParams | None = None, request_id: str | None = None
    ) -> AsyncGenerator[RequestOutput, None]:
        assert request_id is not None
        params = sampling_params or SamplingParams()
        text, ids = self._read(prompt)
        if len(self.live) >= self.queue:
            raise QueueFullError("the queue is full", retry_after_s=2.5)
        self.params[request_id], self.prompts[request_id] = params, prompt
        live = _Live(CompletionOutput(logprobs=None if params.logprobs is None else []), RequestMetrics())
        live.metrics = RequestMetrics(arrival_time=time.monotonic())
        self.live[request_id] = live
        self.yields[request_id] = 0
        producer = asyncio.create_task(self._produce(live, text, params))
        try:
            while True:
                await live.changed.wait()
                live.changed.clear()
                if live.error is not None:
                    raise live.error
                self.yields[request_id] += 1
                finished = live.output.finish_reason is not None
                seed = 7 if params.seed is None else params.seed
                snapshot = replace(live.output, token_ids=list(live.output.token_ids))
                yield RequestOutput(request_id, text, ids, [snapshot], finished, seed, live.metrics)
                if finished:
                    return
        finally:
            producer.cancel()
            del self.live[request_id]
            self.ended.append(request_id)

    async def abort(self, request_id: str) -> None:
        if request_id not in self.live:
            raise RequestNotFoundError(f"no live request has the id {request_id!r}")
        self.live[request_id].output.finish_reason = "abort"
        self.live[request_id].changed.set()

    async def info(self) -> dict:
        return INFO

    async def drain(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while self.live and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        return not self.live

    async def shutdown(self) -> None:
        self.is_shut_down = True

    def die(self, error: EngineDeadError) -> None:
        self.dead_error = error
        for live in self.live.values():
            live.error = error
            live.changed.set()

    def _read(self, prompt: object) -> tuple[str, list[int]]:
        if isinstance(prompt, dict) and "prompt_token_ids" in prompt:
            ids = prompt["prompt_token_ids"]
            if min(ids) < 0:
                raise InvalidRequestError("must not be negative", field="prompt_token_ids", value=min(ids))
            return "".join(map(chr, ids)), ids
        text = prompt["messages"][-1]["content"] if isinstance(prompt, dict) else prompt
        if text in self.errors:
            raise self.errors[text]
        if not text:
            raise InvalidRequestError("has no tokens; send at least one", field="prompt")
        return text, [ord(c) for c in text]

    async def _produce(self, live: _Live, text: str, params: SamplingParams) -> None:
        count = params.max_tokens or len(text)
        for number in range(count):
            await asyncio.sleep(self.delay_s)
            character = text[number % len(text)]
            if live.output.finish_reason is not None:
                return
            live.output.token_ids.append(ord(character))
            live.output.text += character
            if live.output.logprobs is not None:
                entries = {ord(character): Logprob(-0.5, character)}
                entries.update({i: Logprob(-1.0 - i, str(i)) for i in range(params.logprobs or 0)})
                live.output.logprobs.append(entries)
            if live.metrics.first_token_time is None:
                live.metrics = replace(live.metrics, first_token_time=time.monotonic())
            if number == count - 1:
                live.output.finish_reason = "length"
                live.metrics = replace(live.metrics, finished_time=time.monotonic())
            elif character in params.stop:
                live.output.text = live.output.text[:-1]
                live.output.finish_reason, live.output.stop_reason = "stop", character
            live.changed.set()
            if live.output.finish_reason is not None:
                return
