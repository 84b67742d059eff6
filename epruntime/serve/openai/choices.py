"""What the answers of both endpoints have in common: ids, usage, choices put together from deltas."""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass, field, replace
from typing import Any

from epruntime.outputs import CompletionDelta, Logprob, RequestDelta
from epruntime.sampling_params import derive_seed
from epruntime.serve.engine import Engine
from epruntime.version import __version__


@dataclass(frozen=True, kw_only=True)
class Head:
    """The fields that open every answer and every chunk of one request."""

    id: str
    object: str
    model: str
    system_fingerprint: str
    created: int = field(default_factory=lambda: int(time.time()))

    def json(self, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": self.object,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.system_fingerprint,
            "choices": choices,
            **more,
        }


def fingerprint(engine: Engine) -> str:
    """Changes when another version, or another model, answers under the same name."""
    info = engine.model_info
    facts = (__version__, *(info[key] for key in ("architecture", "dtype", "num_parameters", "max_model_len")))
    return "fp_" + hashlib.sha256(repr(facts).encode()).hexdigest()[:12]


class UsageCount:
    """Tokens of a request with one or more prompts."""

    def __init__(self) -> None:
        self._prompt: dict[int, int] = {}
        self._cached: dict[int, int] = {}
        self._output: dict[int, int] = {}

    def add(self, number: int, delta: RequestDelta) -> None:
        self._prompt[number] = len(delta.prompt_token_ids)
        self._cached[number] = delta.num_cached_tokens
        self._output[number] = delta.num_output_tokens

    def json(self) -> dict[str, Any]:
        prompt, output = sum(self._prompt.values()), sum(self._output.values())
        return {
            "prompt_tokens": prompt,
            "completion_tokens": output,
            "total_tokens": prompt + output,
            "prompt_tokens_details": {"cached_tokens": sum(self._cached.values())},
        }


@dataclass(slots=True)
class Sequence:
    """One generated sequence, put together from its deltas."""

    seed: int
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def add(self, delta: CompletionDelta) -> None:
        self.texts.append(delta.text)
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs or ()
        self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason


class HeldBack:
    """Tokens of a stream that bring no text yet, as the first of those that make one character: they wait for the
    text, or the end, so that clients get no empty chunks."""

    def __init__(self) -> None:
        self._held: dict[object, CompletionDelta] = {}

    def ready(self, key: object, new: CompletionDelta) -> CompletionDelta | None:
        """What is to be sent of the sequence `key` now: `new` with all that was held back; None: nothing yet."""
        held = self._held.pop(key, None)
        if held is not None:
            new = replace(
                new,
                token_ids=held.token_ids + new.token_ids,
                logprobs=None if new.logprobs is None else (held.logprobs or []) + new.logprobs,
            )
        if new.text or new.finish_reason is not None:
            return new
        self._held[key] = new
        return None


class Answer:
    """Everything that came for one prompt.

    Attributes:
        first: the delta of the admission. sequences: by index.
    """

    def __init__(self, first: RequestDelta, n: int) -> None:
        self.first = first
        self.prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        self.sequences = [Sequence(derive_seed(first.seed, index)) for index in range(n)]

    def add(self, delta: RequestDelta) -> None:
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = delta.prompt_logprobs
        for output in delta.outputs:
            self.sequences[output.index].add(output)
