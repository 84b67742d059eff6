"""The edge: a prompt and SamplingParams, checked once, become an EngineRequest."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from epruntime.engine.tokenizer import Tokenizer
from epruntime.errors import InvalidRequestError
from epruntime.plan import SamplingSpec
from epruntime.sampling_params import SamplingParams

#: a string, {"prompt": str}, {"prompt_token_ids": [...]} or {"messages": [...]}
Prompt = str | dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class EngineRequest:
    """A checked request, as the engine core takes it.

    Attributes:
        rid: the engine's integer handle; request_id: the caller's name for it.
        prompt: the prompt's text where there is one.
        params: as sent; spec: what a rank needs, every default applied.
        arrival_time: seconds, monotonic clock.
    """

    rid: int
    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    spec: SamplingSpec
    arrival_time: float


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What the loaded model and the KV cache allow. `max_model_len` counts prompt plus output."""

    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]


class InputProcessor:
    """Turns prompts into EngineRequests, or refuses them with field, value and remedy."""

    def __init__(self, tokenizer: Tokenizer | None, limits: Limits) -> None:
        self.tokenizer = tokenizer
        self.limits = limits

    def process(
        self, prompt: Prompt, params: SamplingParams, *, rid: int, request_id: str, arrival_time: float
    ) -> EngineRequest:
        """Raises InvalidRequestError for whatever cannot be served."""
        if not isinstance(params, SamplingParams):
            raise InvalidRequestError("must be a SamplingParams", field="sampling_params", value=params)
        text, ids = self._tokens(prompt)
        self._check(ids, params)
        room = self.limits.max_model_len - len(ids)
        seed = secrets.randbits(63) if params.seed is None else params.seed
        eos = () if params.ignore_eos else self.limits.eos_token_ids
        spec = SamplingSpec(
            temperature=float(params.temperature),
            top_k=max(params.top_k, 0),
            top_p=float(params.top_p),
            seed=seed,
            stop_ids=tuple(dict.fromkeys((*eos, *params.stop_token_ids))),
            max_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
            logprobs=-1 if params.logprobs is None else params.logprobs,
        )
        return EngineRequest(
            rid=rid,
            request_id=request_id,
            prompt=text,
            prompt_token_ids=ids,
            params=params,
            spec=spec,
            arrival_time=arrival_time,
        )

    def _tokens(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        if isinstance(prompt, dict):
            known = {"prompt", "prompt_token_ids", "messages"} & prompt.keys()
            if len(known) != 1 or len(prompt) != 1:
                raise InvalidRequestError(
                    "a prompt dict has exactly one key: 'prompt', 'prompt_token_ids' or 'messages'",
                    field="prompt",
                    value=sorted(map(str, prompt)),
                )
            if "prompt_token_ids" in prompt:
                return None, _token_list(prompt["prompt_token_ids"])
            if "messages" in prompt:
                return self._need_tokenizer("messages").encode_chat(prompt["messages"])
            prompt = prompt["prompt"]
        if not isinstance(prompt, str):
            raise InvalidRequestError(
                "must be a string, or a dict with 'prompt_token_ids' or 'messages'", field="prompt", value=prompt
            )
        return prompt, self._need_tokenizer("prompt").encode(prompt)

    def _need_tokenizer(self, field: str) -> Tokenizer:
        if self.tokenizer is None:
            raise InvalidRequestError(
                "this model was loaded without a tokenizer; send prompt_token_ids instead of text", field=field
            )
        return self.tokenizer

    def _check(self, ids: Sequence[int], params: SamplingParams) -> None:
        limits = self.limits
        if not ids:
            raise InvalidRequestError("has no tokens; send at least one", field="prompt")
        for name, tokens in (("prompt_token_ids", ids), ("stop_token_ids", params.stop_token_ids)):
            if tokens and max(tokens) >= limits.vocab_size:
                raise InvalidRequestError(
                    f"is outside the vocabulary of {limits.vocab_size} tokens", field=name, value=max(tokens)
                )
        if len(ids) >= limits.max_model_len:
            raise InvalidRequestError(
                f"the prompt has {len(ids)} tokens and max_model_len is {limits.max_model_len}, which leaves no room "
                "for output: shorten the prompt or raise max_model_len (and the KV budget)",
                field="prompt",
                value=f"{len(ids)} tokens",
            )
        if params.stop and self.tokenizer is None:
            raise InvalidRequestError("stop strings need a tokenizer; use stop_token_ids", field="stop")


def _token_list(value: Any) -> list[int]:
    if not isinstance(value, (list, tuple)):
        raise InvalidRequestError("must be a list of integers", field="prompt_token_ids", value=value)
    for token in value:
        if not isinstance(token, int) or isinstance(token, bool) or token < 0:
            raise InvalidRequestError("token ids are non-negative integers", field="prompt_token_ids", value=token)
    return list(value)
