"""SamplingParams: how the next token of a request is chosen, and when the request ends."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Any

from epruntime.errors import InvalidRequestError

MAX_SEED = 2**63 - 1
MAX_LOGPROBS = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """Sampling and stopping of one request. Checked at construction; immutable afterwards.

    The defaults are these for every model: what a checkpoint's generation_config.json says of sampling is not applied.

    Attributes:
        temperature: 0 is greedy (argmax, lowest id first on ties); else logits are divided by it.
        top_k: keep the k most likely tokens; 0 or -1 keeps all.
        top_p: nucleus: keep the least set of tokens whose probability reaches `top_p` (Holtzman et
            al. 2019, arXiv:1904.09751). 1.0 keeps all.
        seed: key of the counter-based generator, in [0, 2**63). None: drawn when the request enters.
        max_tokens: output tokens at most; None: up to `max_model_len`.
        stop: stop strings; never part of the returned text.
        stop_token_ids: token ids that end the output, beside the model's end-of-sequence ids.
        ignore_eos: go on past the model's own end-of-sequence ids.
        logprobs: None, or the number (0..20) of most likely tokens whose log-probability is
            returned at each position beside that of the chosen token. Natural logarithm of the
            softmax of the unmodified logits (before temperature and filters).
        skip_special_tokens: leave special tokens out of the text.

    Raises:
        InvalidRequestError: with field, value and remedy.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    max_tokens: int | None = 16
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    skip_special_tokens: bool = field(default=True)

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", _tuple("stop", self.stop))
        object.__setattr__(self, "stop_token_ids", _tuple("stop_token_ids", self.stop_token_ids))
        _number("temperature", self.temperature, 0.0, math.inf, "use 0 for greedy, or a positive number")
        _number("top_p", self.top_p, 0.0, 1.0, "must be in (0, 1]")
        if self.top_p <= 0.0:
            raise InvalidRequestError("must be in (0, 1]; use 1 to keep all tokens", field="top_p", value=self.top_p)
        _integer("top_k", self.top_k, -1, 2**31 - 1, "use 0 to keep all tokens, or a positive number")
        if self.seed is not None:
            _integer("seed", self.seed, 0, MAX_SEED, "must be in [0, 2**63)")
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1, 2**31 - 1, "must be at least 1")
        if self.logprobs is not None:
            _integer("logprobs", self.logprobs, 0, MAX_LOGPROBS, f"must be in 0..{MAX_LOGPROBS}")
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise InvalidRequestError("stop strings must be non-empty strings", field="stop", value=text)
        for token in self.stop_token_ids:
            _integer("stop_token_ids", token, 0, 2**31 - 1, "token ids are non-negative integers")

    def to_wire(self) -> dict[str, Any]:
        """A msgpack-ready dict of all fields."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @classmethod
    def from_wire(cls, wire: dict[str, Any]) -> SamplingParams:
        return cls(**wire)


def _tuple(name: str, value: Any) -> tuple[Any, ...]:
    if isinstance(value, str):
        return (value,)
    try:
        return tuple(value or ())
    except TypeError as error:
        raise InvalidRequestError("must be a list", field=name, value=value) from error


def _number(name: str, value: Any, low: float, high: float, remedy: str) -> None:
    ok = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not ok or not math.isfinite(value) or not low <= value <= high:
        raise InvalidRequestError(remedy, field=name, value=value)


def _integer(name: str, value: Any, low: int, high: int, remedy: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise InvalidRequestError(remedy, field=name, value=value)
