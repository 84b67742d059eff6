"""SamplingParams: how the next token of a request is chosen, and when the request ends."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from typing import Any

from epruntime.errors import InvalidRequestError

MAX_SEED = 2**63 - 1
#: Of tokens, and the largest token id: what the wire forms hold.
MAX_COUNT = 2**31 - 1
MAX_LOGPROBS = 20
MAX_N = 128
MAX_STOP_STRINGS, MAX_STOP_TOKEN_IDS, MAX_LOGIT_BIASES = 64, 1024, 1024
_MASK64 = 2**64 - 1
_MOST = sys.float_info.max


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """Sampling and stopping of one request. Checked at construction; immutable afterwards.

    The defaults are these for every model. Where a caller leaves a parameter out, the front ends and `LLM` take what
    the checkpoint's generation_config.json says before these defaults (`AsyncLLM.sampling_params`).

    From logits to a token: repetition penalty, presence and frequency penalty, logit bias, min_tokens, temperature,
    top_k, top_p, min_p, draw.

    Attributes:
        n: sequences to generate from the prompt; sequence i is that of a request with n=1 and the i-th seed derived
            from this one's (docs/sampling.md).
        temperature: 0 is greedy (argmax, lowest id first on ties); else logits are divided by it.
        top_k: keep the k most likely tokens; 0 or -1 keeps all.
        top_p: nucleus: keep the least set of tokens whose probability reaches top_p (Holtzman et
            al. 2019, arXiv:1904.09751). 1.0 keeps all.
        min_p: keep the tokens whose probability is at least min_p times that of the most likely one
            (Nguyen et al. 2024, arXiv:2407.01082). 0 keeps all.
        repetition_penalty: logits of tokens in the prompt or the output so far are divided by it where positive and
            multiplied by it where negative (Keskar et al. 2019, arXiv:1909.05858). 1 changes nothing.
        presence_penalty: subtracted from the logits of tokens that occur in the output so far, in [-2, 2].
        frequency_penalty: subtracted once per occurrence in the output so far, in [-2, 2].
        logit_bias: token id -> number in [-100, 100] added to its logit.
        seed: key of the counter-based generator, in [0, 2**63); where none is given, one is drawn when the
            request enters.
        max_tokens: output tokens at most, and in any case no more than the model's context has room for.
        min_tokens: output tokens before which nothing ends the output: neither end-of-sequence and stop ids, which are
            not chosen, nor stop strings.
        stop: stop strings; never part of the returned text.
        stop_token_ids: token ids that end the output, beside the model's end-of-sequence ids.
        ignore_eos: go on past the model's own end-of-sequence ids.
        logprobs: the number (0..20) of most likely tokens whose log-probability is returned at each position beside
            that of the chosen token; where none is given, nothing is returned. Natural logarithm of the softmax of the
            unmodified logits (before temperature and filters).
        prompt_logprobs: the same at each position of the prompt, beside that of the prompt's own token.
        skip_special_tokens: leave special tokens out of the text.

    Raises:
        InvalidRequestError: with field, value and remedy.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = field(default=True)

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", _tuple("stop", self.stop, MAX_STOP_STRINGS))
        object.__setattr__(self, "stop_token_ids", _tuple("stop_token_ids", self.stop_token_ids, MAX_STOP_TOKEN_IDS))
        object.__setattr__(self, "logit_bias", _biases(self.logit_bias))
        _integer("n", self.n, 1, MAX_N, f"must be in 1..{MAX_N}")
        _number("temperature", self.temperature, 0.0, math.inf, "use 0 for greedy, or a positive number")
        _number("top_p", self.top_p, 0.0, 1.0, "must be in (0, 1]")
        if self.top_p <= 0.0:
            raise InvalidRequestError("must be in (0, 1]; use 1 to keep all tokens", field="top_p", value=self.top_p)
        _integer("top_k", self.top_k, -1, MAX_COUNT, f"use 0 to keep all tokens, or a number in 1..{MAX_COUNT}")
        _number("min_p", self.min_p, 0.0, 1.0, "must be in [0, 1]; use 0 to keep all tokens")
        _number("repetition_penalty", self.repetition_penalty, 0.0, math.inf, "must be positive; use 1 for none")
        if self.repetition_penalty <= 0.0:
            raise InvalidRequestError(
                "must be positive; use 1 for none", field="repetition_penalty", value=self.repetition_penalty
            )
        for name in ("presence_penalty", "frequency_penalty"):
            _number(name, getattr(self, name), -2.0, 2.0, "must be in [-2, 2]; use 0 for none")
        if self.seed is not None:
            _integer("seed", self.seed, 0, MAX_SEED, "must be in [0, 2**63)")
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1, MAX_COUNT, f"must be in 1..{MAX_COUNT}")
        _integer("min_tokens", self.min_tokens, 0, MAX_COUNT, f"must be in 0..{MAX_COUNT}")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError(
                f"must be at most max_tokens={self.max_tokens}", field="min_tokens", value=self.min_tokens
            )
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _integer(name, getattr(self, name), 0, MAX_LOGPROBS, f"must be in 0..{MAX_LOGPROBS}")
        for name in ("ignore_eos", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidRequestError("must be true or false", field=name, value=getattr(self, name))
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise InvalidRequestError("stop strings must be non-empty strings", field="stop", value=text)
        for token in self.stop_token_ids:
            _integer("stop_token_ids", token, 0, MAX_COUNT, f"token ids are integers in 0..{MAX_COUNT}")

    def to_wire(self) -> dict[str, Any]:
        """A msgpack-ready dict of all fields."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @classmethod
    def from_wire(cls, wire: dict[str, Any]) -> SamplingParams:
        return cls(**wire)


_FIELDS = tuple(f.name for f in fields(SamplingParams))


def not_a_field(name: str) -> str:
    """What to say of a name that no parameter has, and which one is like it; "" of a parameter's."""
    if name in _FIELDS:
        return ""
    near = get_close_matches(name, _FIELDS, n=1)
    return "is not a sampling parameter" + (f"; did you mean {near[0]}?" if near else "")


def derive_seed(seed: int, index: int) -> int:
    """Seed of sequence `index` of a request with n > 1, in [0, 2**63); the request's own for index 0.

    SplitMix64 (Steele, Lea, Flood 2014, doi:10.1145/2714064.2660195): its output function at seed + index * gamma.
    """
    if index == 0:
        return seed
    z = (seed + index * 0x9E3779B97F4A7C15) & _MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
    return (z ^ (z >> 31)) & MAX_SEED


def _tuple(name: str, value: Any, limit: int) -> tuple[Any, ...]:
    if isinstance(value, str):
        return (value,)
    try:
        items = tuple(value or ())
    except TypeError as error:
        raise InvalidRequestError("must be a list", field=name, value=value) from error
    if len(items) > limit:
        raise InvalidRequestError(f"at most {limit} are taken", field=name, value=f"{len(items)} of them")
    return items


def _biases(value: Any) -> dict[int, float]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise InvalidRequestError("must be a mapping of token ids to numbers", field="logit_bias", value=value)
    if len(value) > MAX_LOGIT_BIASES:
        raise InvalidRequestError(
            f"at most {MAX_LOGIT_BIASES} are taken", field="logit_bias", value=f"{len(value)} of them"
        )
    for token, bias in value.items():
        _integer("logit_bias", token, 0, MAX_COUNT, f"token ids are integers in 0..{MAX_COUNT}")
        _number("logit_bias", bias, -100.0, 100.0, f"the bias of token {token} must be in [-100, 100]")
    return {token: float(bias) for token, bias in value.items()}


def _number(name: str, value: Any, low: float, high: float, remedy: str) -> None:
    ok = isinstance(value, (int, float)) and not isinstance(value, bool)
    # NaN fails every comparison, and an integer may be larger than any float
    if not ok or not low <= value <= high or not -_MOST <= value <= _MOST:
        raise InvalidRequestError(remedy, field=name, value=value)


def _integer(name: str, value: Any, low: int, high: int, remedy: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise InvalidRequestError(remedy, field=name, value=value)
