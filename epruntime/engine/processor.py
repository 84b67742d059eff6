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

#: a string, token ids, {"prompt": str}, {"prompt_token_ids": [...]} or {"messages": [...]}
Prompt = str | Sequence[int] | dict[str, Any]


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
        self._check_length(prompt)
        text, ids = self.tokens(prompt)
        self._check(ids, params)
        room = self.limits.max_model_len - len(ids)
        seed = secrets.randbits(63) if params.seed is None else params.seed
        if params.min_tokens > room:
            raise InvalidRequestError(
                f"the prompt has {len(ids)} tokens and max_model_len is {self.limits.max_model_len}, which leaves room "
                f"for {room} output tokens: lower it, or shorten the prompt",
                field="min_tokens",
                value=params.min_tokens,
            )
        # a configuration may name end-of-sequence ids that the model has no logits for: they never come
        eos = [] if params.ignore_eos else [t for t in self.limits.eos_token_ids if 0 <= t < self.limits.vocab_size]
        spec = SamplingSpec(
            temperature=float(params.temperature),
            top_k=max(params.top_k, 0),
            top_p=float(params.top_p),
            min_p=float(params.min_p),
            repetition_penalty=float(params.repetition_penalty),
            presence_penalty=float(params.presence_penalty),
            frequency_penalty=float(params.frequency_penalty),
            logit_bias=tuple(sorted(params.logit_bias.items())),
            seed=seed,
            stop_ids=tuple(dict.fromkeys((*eos, *params.stop_token_ids))),
            max_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
            min_tokens=params.min_tokens,
            logprobs=-1 if params.logprobs is None else params.logprobs,
            prompt_logprobs=-1 if params.prompt_logprobs is None else params.prompt_logprobs,
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

    def text(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """The text of token ids. Raises InvalidRequestError: no tokenizer, or ids outside the vocabulary."""
        tokenizer = self._need_tokenizer("token_ids")
        ids = _token_list(token_ids)
        self._check_vocabulary("token_ids", ids)
        try:
            return tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        except Exception as error:  # models may have ids that their tokenizer has not, and each kind raises its own
            raise InvalidRequestError(f"the tokenizer cannot read them: {error}", field="token_ids") from error

    def tokens(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        """The text of a prompt, where it has one, and its ids.

        Raises:
            InvalidRequestError: it cannot be read, or is text and there is no tokenizer.
        """
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
        if isinstance(prompt, (list, tuple)):
            return None, _token_list(prompt)
        if not isinstance(prompt, str):
            raise InvalidRequestError(
                "must be a string, a list of token ids, or a dict with 'prompt_token_ids' or 'messages'",
                field="prompt",
                value=prompt,
            )
        return prompt, self._need_tokenizer("prompt").encode(prompt)

    def _need_tokenizer(self, field: str) -> Tokenizer:
        if self.tokenizer is None:
            raise InvalidRequestError(
                "this model was loaded without a tokenizer; send prompt_token_ids instead of text", field=field
            )
        return self.tokenizer

    def _check_length(self, prompt: Prompt) -> None:
        """Refuses a text that is too long whatever its tokens, before the time is spent on tokenising it."""
        text = prompt.get("prompt") if isinstance(prompt, dict) else prompt
        if self.tokenizer is None or not isinstance(text, str):
            return
        num = self.tokenizer.tokens_at_least(text)
        if num >= self.limits.max_model_len:
            raise self._too_long(f"at least {num} tokens")

    def _too_long(self, tokens: str) -> InvalidRequestError:
        return InvalidRequestError(
            f"the prompt has {tokens} and max_model_len is {self.limits.max_model_len}, which leaves no room for "
            "output: shorten the prompt or raise max_model_len (and the KV budget)",
            field="prompt",
            value=tokens,
        )

    def _check_vocabulary(self, field: str, tokens: Sequence[int]) -> None:
        size = self.limits.vocab_size
        if tokens and max(tokens) >= size:
            raise InvalidRequestError(
                f"is outside the vocabulary: ids go from 0 to {size - 1}", field=field, value=max(tokens)
            )

    def _check(self, ids: Sequence[int], params: SamplingParams) -> None:
        limits = self.limits
        if not ids:
            raise InvalidRequestError("has no tokens; send at least one", field="prompt")
        for name, tokens in (
            ("prompt_token_ids", ids),
            ("stop_token_ids", params.stop_token_ids),
            ("logit_bias", tuple(params.logit_bias)),
        ):
            self._check_vocabulary(name, tokens)
        if len(ids) >= limits.max_model_len:
            raise self._too_long(f"{len(ids)} tokens")
        if params.stop and self.tokenizer is None:
            raise InvalidRequestError("stop strings need a tokenizer; use stop_token_ids", field="stop")


def _token_list(value: Any) -> list[int]:
    if not isinstance(value, (list, tuple)):
        raise InvalidRequestError("must be a list of integers", field="prompt_token_ids", value=value)
    for token in value:
        if not isinstance(token, int) or isinstance(token, bool) or token < 0:
            raise InvalidRequestError("token ids are non-negative integers", field="prompt_token_ids", value=token)
    return list(value)
