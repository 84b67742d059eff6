"""Sampling fields of a request become SamplingParams; what is left out is the model's default."""

from __future__ import annotations

from typing import Any

from epruntime.errors import InvalidRequestError, renamed
from epruntime.sampling_params import SamplingParams
from epruntime.serve.engine import Engine
from epruntime.serve.openai.fields import ChatFields, CompletionFields, Fields

#: Fields that have the same name and meaning here and there.
_SAME = (
    "n", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "seed", "max_tokens", "min_tokens", "stop", "stop_token_ids", "ignore_eos", "skip_special_tokens",
    "prompt_logprobs",
)  # fmt: skip


def completion_params(engine: Engine, body: CompletionFields) -> SamplingParams:
    """As `body` says; `max_tokens` is 16 where nothing else says how many.

    Echoed logprobs are those of the prompt. `max_tokens=0` with `echo` computes one token, which nobody gets to see.

    Raises:
        InvalidRequestError: with the request's name of the field.
    """
    given = _given(body)
    if body.logprobs is not None:
        given["logprobs"] = body.logprobs
        if body.echo:
            given["prompt_logprobs"] = max(body.logprobs, body.prompt_logprobs or 0)
    if body.echo and body.max_tokens == 0:
        given["max_tokens"] = 1
        if given.get("min_tokens"):
            raise InvalidRequestError("must be at most max_tokens=0", field="min_tokens", value=body.min_tokens)
    return engine.sampling_params(**given)


def chat_params(engine: Engine, body: ChatFields) -> SamplingParams:
    """As `body` says; without a limit the answer may fill the model's context.

    Raises:
        InvalidRequestError: with the request's name of the field.
    """
    given, names = _given(body), {}
    if body.max_completion_tokens is not None:
        given["max_tokens"], names["max_tokens"] = body.max_completion_tokens, "max_completion_tokens"
    elif body.max_tokens is None and "max_tokens" not in engine.model_info["default_sampling"]:
        given["max_tokens"] = None
    if body.logprobs:
        given["logprobs"], names["logprobs"] = body.top_logprobs or 0, "top_logprobs"
    try:
        return engine.sampling_params(**given)
    except InvalidRequestError as error:
        raise renamed(error, names) from error


def _given(body: Fields) -> dict[str, Any]:
    given = {name: value for name in _SAME if (value := getattr(body, name)) is not None}
    if body.logit_bias is not None:
        given["logit_bias"] = biases = {_token(text): bias for text, bias in body.logit_bias.items()}
        if len(biases) < len(body.logit_bias):
            raise InvalidRequestError("names a token twice, such as 1 and 01", field="logit_bias")
    return given


def _token(text: str) -> int:
    """JSON has only strings as keys."""
    if not (text.isascii() and text.isdigit() and len(text) <= 10):
        raise InvalidRequestError("its keys are token ids", field="logit_bias", value=text)
    return int(text)
