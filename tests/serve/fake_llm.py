"""FakeLLM: the Engine protocol without a model. It echoes the prompt: one character is one token."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from epruntime.engine.observer import EngineObserver
from epruntime.engine.stats import EngineStats
from epruntime.engine.status import EngineState, EngineStatus
from epruntime.errors import (
    EngineDeadError,
    InvalidRequestError,
    QueueFullError,
    RequestNotFoundError,
    UnavailableError,
)
from epruntime.outputs import CompletionDelta, Logprob, RequestDelta, RequestMetrics
from epruntime.sampling_params import SamplingParams

INFO = {
    "version": "0",
    "model": {"name": "echo", "architecture": "Echo"},
    "engine": {"expert_parallel_size": 2, "expert_placement": "round_robin", "num_redundant_experts": 2},
    "ranks": [
        {
            "slot": 0, "incarnation": 1, "host": "a", "local_rank": 0, "pid": 10,
            "load": {"local_experts": 3},
            "moe": {"layers": {"3": {"expert_tokens": [1, 2, 3], "pairs_received": 33, "replica_pairs": 5},
                               "11": {"expert_tokens": [0, 0, 9], "pairs_received": 1, "replica_pairs": 0}}},
        },
        {
            "slot": 1, "incarnation": 2, "host": "b", "local_rank": 0, "pid": 11,
            "load": {"local_experts": 2},
            "moe": {"layers": {"3": {"expert_tokens": [10, 20, 30], "pairs_received": 33, "replica_pairs": 3},
                               "11": {"expert_tokens": [1, 0, 0], "pairs_received": 9, "replica_pairs": 4}}},
        },
    ],
}  # fmt: skip
MODEL_INFO: dict[str, Any] = {
    "name": "echo",
    "architecture": "EchoForCausalLM",
    "model_type": "echo",
    "dtype": "float32",
    "max_model_len": 65536,
    "vocab_size": 0x110000,
    "hidden_size": 64,
    "num_layers": 4,
    "num_experts": 3,
    "top_k": 2,
    "moe_layers": [3, 11],
    "eos_token_ids": [0],
    "num_parameters": 12345,
    "checkpoint_bytes": 49380,
    "has_tokenizer": True,
    "has_chat_template": True,
    "default_sampling": {},
    "created": 1_700_000_000,
}
STATS = EngineStats(
    time=0.0,
    counters_age_s=None,
    generation=0,
    restarts=0,
    steps=0,
    prefill_tokens=0,
    decode_tokens=0,
    ranks=(),
    layers=(),
    cache_facts={},
    parallel_facts={},
)
#: Seed that the fake "draws", and the prompt tokens that it says were cached.
DRAWN_SEED, CACHED_TOKENS = 7, 2


@dataclass
class _Live:
    """One request. `generated`: tokens so far, per index. `pending`: what has not been fetched, per index."""

    generated: list[int]
    metrics: RequestMetrics
    pending: dict[int, CompletionDelta] = field(default_factory=dict)
    ended: set[int] = field(default_factory=set)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    error: BaseException | None = None
    texts: dict[int, list[str]] = field(default_factory=dict)

    def delta(self, index: int) -> CompletionDelta:
        return self.pending.setdefault(index, CompletionDelta(index=index))

    def write(self, index: int, text: str) -> None:
        self.texts.setdefault(index, []).append(text)

    def fetch(self) -> list[CompletionDelta]:
        """What is pending, by index; it is not pending any more."""
        pending, texts = self.pending, self.texts
        self.pending, self.texts = {}, {}
        for index, delta in pending.items():
            delta.text = "".join(texts.get(index, ()))
        return [pending[index] for index in sorted(pending)]

    def end(self, index: int, reason: str, stop: int | str | None = None) -> None:
        if index not in self.ended:
            self.ended.add(index)
            delta = self.delta(index)
            delta.finish_reason, delta.stop_reason = reason, stop
            self.changed.set()


class FakeLLM:
    """Echoes text (characters), token ids (as characters), or the last chat message, again and again.

    Sequence i of a request with n > 1 starts at character i. A chat is "rendered" as its last message.

    Attributes:
        delay_s: between tokens. queue: most live requests; retry_after_s: the hint to those above it.
        live, ended: request ids. num_refused: by a full queue. yields: deltas taken per request id.
        params, prompts: as they arrived, per request id. errors: raised for a prompt's text.
        model_info: may be changed: default_sampling, has_tokenizer.
        stats: what stats_snapshot returns. observers: added and not taken back; the fake tells them nothing.
        poll_interval_s: as asked for last.
    """

    def __init__(self, delay_s: float = 0.0, queue: int = 10_000) -> None:
        self.delay_s, self.queue, self.retry_after_s = delay_s, queue, 2.5
        self.live: dict[str, _Live] = {}
        self.ended: list[str] = []
        self.num_refused = 0
        self.yields: dict[str, int] = {}
        self.params: dict[str, SamplingParams] = {}
        self.prompts: dict[str, object] = {}
        self.errors: dict[str, BaseException] = {}
        self.model_info = dict(MODEL_INFO)
        self.dead_error: EngineDeadError | None = None
        self.is_shut_down = False
        self.stats = STATS
        self.observers: list[EngineObserver] = []
        self.poll_interval_s: float | None = None
        self._status = EngineStatus()
        self._watchers: list[Callable[[EngineStatus], None]] = []

    @property
    def errored(self) -> bool:
        return self.dead_error is not None

    @property
    def status(self) -> EngineStatus:
        return self._status

    def on_status(self, callback: Callable[[EngineStatus], None]) -> Callable[[], None]:
        self._watchers.append(callback)
        return lambda: self._watchers.remove(callback)

    def become(self, state: EngineState, reason: str = "") -> None:
        """Changes the status, and tells. Call it on the loop."""
        self._status = EngineStatus(state=state, reason=reason)
        for callback in list(self._watchers):
            callback(self._status)

    @property
    def max_sequences(self) -> int:
        return self.queue

    def sampling_params(self, **given: Any) -> SamplingParams:
        unknown = given.keys() - {f.name for f in fields(SamplingParams)}
        if unknown:
            raise InvalidRequestError("is not a sampling parameter", field=min(unknown))
        return SamplingParams(**{**self.model_info["default_sampling"], **given})

    async def stream(
        self, prompt: object, sampling_params: SamplingParams | None = None, request_id: str | None = None
    ) -> AsyncGenerator[RequestDelta, None]:
        assert request_id is not None
        params = self.sampling_params() if sampling_params is None else sampling_params
        if self.dead_error is not None:
            raise self.dead_error
        if self._status.state is EngineState.RESTARTING:
            raise UnavailableError(self._status.reason, retry_after_s=3.0)
        text, ids = self._read(prompt)
        if len(self.live) >= self.queue:
            self.num_refused += 1
            raise QueueFullError("the queue is full", retry_after_s=self.retry_after_s)
        self.params[request_id], self.prompts[request_id] = params, prompt
        live = _Live([0] * params.n, RequestMetrics(arrival_time=time.monotonic()))
        self.live[request_id] = live
        self.yields[request_id] = 0
        seed = DRAWN_SEED if params.seed is None else params.seed

        def delta(outputs: list[CompletionDelta]) -> RequestDelta:
            self.yields[request_id] += 1
            return RequestDelta(
                request_id, text, ids, outputs, len(live.ended) == params.n and not live.pending, seed, live.metrics,
                num_cached_tokens=CACHED_TOKENS, num_output_tokens=sum(live.generated),
            )  # fmt: skip

        producers = [asyncio.create_task(self._produce(live, i, text, params)) for i in range(params.n)]
        try:
            yield delta([])
            first = True
            while True:
                await live.changed.wait()
                live.changed.clear()
                if live.error is not None:
                    raise live.error
                new = delta(live.fetch())
                if first and params.prompt_logprobs is not None:
                    new.prompt_logprobs = [
                        _entry(token, params.prompt_logprobs) if position else None
                        for position, token in enumerate(ids)
                    ]
                first = False
                yield new
                if new.finished:
                    return
        finally:
            for producer in producers:
                producer.cancel()
            del self.live[request_id]
            self.ended.append(request_id)

    async def tokenize(self, prompt: object) -> tuple[str | None, list[int]]:
        text, ids = self._read(prompt)
        return (None if _given_ids(prompt) else text), ids

    async def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        _check_vocabulary(token_ids, "token_ids")
        return "".join(chr(token) for token in token_ids if token or not skip_special_tokens)

    async def abort(self, request_id: str) -> None:
        if request_id not in self.live:
            raise RequestNotFoundError(f"no live request has the id {request_id!r}")
        live = self.live[request_id]
        for index in range(len(live.generated)):
            live.end(index, "abort")

    def add_observer(self, observer: EngineObserver) -> Callable[[], None]:
        self.observers.append(observer)
        return lambda: self.observers.remove(observer)

    def stats_snapshot(self) -> EngineStats:
        return self.stats

    def poll_stats(self, interval_s: float) -> None:
        self.poll_interval_s = interval_s

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
        self.fail_all(error)
        self.become(EngineState.DEAD, str(error))

    def fail_all(self, error: BaseException) -> None:
        """Ends every live request with `error`, as a lost rank does."""
        for live in self.live.values():
            live.error = error
            live.changed.set()

    def _read(self, prompt: object) -> tuple[str, list[int]]:
        for name, ids in _given_ids(prompt).items():
            _check_vocabulary(ids, name)
            return "".join(map(chr, ids)), ids
        if not self.model_info["has_tokenizer"]:
            raise InvalidRequestError("text needs a tokenizer, which this model lacks", field="prompt")
        text = prompt["messages"][-1]["content"] if isinstance(prompt, dict) else prompt
        if text in self.errors:
            raise self.errors[text]
        if not text:
            raise InvalidRequestError("has no tokens; send at least one", field="prompt")
        return text, [ord(c) for c in text]

    async def _produce(self, live: _Live, index: int, text: str, params: SamplingParams) -> None:
        count = params.max_tokens or len(text)
        held = ""  # generated, but it may yet become a stop string
        for number in range(count):
            await asyncio.sleep(self.delay_s)
            if index in live.ended:
                return
            character = text[(index + number) % len(text)]
            held += character
            live.generated[index] += 1
            delta = live.delta(index)
            delta.token_ids.append(ord(character))
            if params.logprobs is not None:
                if delta.logprobs is None:
                    delta.logprobs = []
                delta.logprobs.append(_entry(ord(character), params.logprobs))
            now = time.monotonic()
            if live.metrics.first_token_time is None:
                live.metrics = replace(live.metrics, first_token_time=now)
            if number + 1 >= params.min_tokens:
                for stop in params.stop:
                    if held.endswith(stop):
                        live.write(index, held[: -len(stop)])
                        live.end(index, "stop", stop)
                        return
                if ord(character) in params.stop_token_ids:
                    live.write(index, held)
                    live.end(index, "stop", ord(character))
                    return
            keep = 0 if number == count - 1 else _may_stop(held, params.stop)
            live.write(index, held[: len(held) - keep])
            held = held[len(held) - keep :]
            if number == count - 1:
                live.metrics = replace(live.metrics, finished_time=now)
                live.end(index, "length")
                return
            live.changed.set()


def _given_ids(prompt: object) -> dict[str, list[int]]:
    """The ids of a prompt that has some, by the name that the engine has for them."""
    if isinstance(prompt, dict):
        return {name: ids for name, ids in prompt.items() if name == "prompt_token_ids"}
    return {"prompt": prompt} if isinstance(prompt, list) else {}


def _check_vocabulary(ids: Sequence[int], field: str) -> None:
    """Tokens are characters, and half of a surrogate pair is none."""
    for token in ids:
        if not 0 <= token < 0x110000 or 0xD800 <= token < 0xE000:
            raise InvalidRequestError("is outside the vocabulary", field=field, value=token)


def _entry(token: int, others: int) -> dict[int, Logprob]:
    entry = {token: Logprob(-0.5, chr(token))}
    entry.update({i: Logprob(-1.0 - i, str(i)) for i in range(others)})
    return entry


def _may_stop(text: str, stops: Sequence[str]) -> int:
    """Length of the longest end of `text` that begins a stop string."""
    longest = max(map(len, stops), default=1) - 1
    for size in range(min(longest, len(text)), 0, -1):
        if any(stop.startswith(text[-size:]) for stop in stops):
            return size
    return 0
