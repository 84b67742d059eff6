"""The bodies of requests: which fields are taken, ignored, or refused by name. See docs/openai.md.

A field that is null counts as absent. Types are strict: "2" is no number and 1.0 no count.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from epruntime.engine.processor import MAX_MESSAGES
from epruntime.engine.template_kwargs import MAX_KEYWORDS
from epruntime.errors import InvalidRequestError
from epruntime.sampling_params import MAX_LOGIT_BIASES, MAX_STOP_STRINGS, MAX_STOP_TOKEN_IDS
from epruntime.serve.openai.prompts import MAX_PROMPTS

T = TypeVar("T")
#: The first wrong item is told; without that, megabytes of wrong ones would each become an error with words.
List = Annotated[list[T], Field(fail_fast=True)]

#: Entries of a body and of its fields, so that what is refused anyway is not read item by item.
MAX_FIELDS = 256
_MAX_ENTRIES = {
    "chat_template_kwargs": MAX_KEYWORDS,
    "logit_bias": MAX_LOGIT_BIASES,
    "messages": MAX_MESSAGES,
    "stop": MAX_STOP_STRINGS,
    "stop_token_ids": MAX_STOP_TOKEN_IDS,
}

#: Fields of OpenAI's API that say nothing about the answer, or only how the provider should run.
IGNORED = frozenset({
    "metadata", "moderation", "parallel_tool_calls", "prediction", "prompt_cache_key", "prompt_cache_options",
    "prompt_cache_retention", "safety_identifier", "service_tier", "store", "user",
})  # fmt: skip
#: Fields that are taken only with the values that ask for what happens anyway; others are refused, with this reason.
FIXED: dict[str, tuple[tuple[Any, ...], str]] = {
    "add_generation_prompt": ((True,), "the chat template always opens the assistant's turn"),
    "add_special_tokens": ((True,), "special tokens are added as the tokenizer says"),
    "audio": ((), "there is no audio output"),
    "continue_final_message": ((False,), "the last message is not continued"),
    "function_call": (("none",), "functions are not called"),
    "functions": (([],), "functions are not called"),
    "include_stop_str_in_output": ((False,), "stop strings are never part of the text"),
    "length_penalty": ((1, 1.0), "there is no beam search"),
    "modalities": ((["text"],), "output is text only"),
    "reasoning_effort": (("none",), "how much it reasons is up to the model"),
    "response_format": (({"type": "text"},), "output is free text; ask for the form you need in the prompt"),
    "spaces_between_special_tokens": ((True,), "text is as the tokenizer decodes it"),
    "suffix": (("",), "text is only continued, not filled in"),
    "tool_choice": (("none", "auto"), "tools are not called"),
    "tools": (([],), "tools are not called"),
    "use_beam_search": ((False,), "there is no beam search"),
    "verbosity": (("medium",), "how much it says is up to the model"),
    "web_search_options": ((), "nothing is searched"),
}


class StreamOptions(BaseModel):
    """`include_usage`: a last chunk with the usage; `continuous_usage_stats`: usage in every chunk."""

    model_config = ConfigDict(strict=True, extra="forbid")

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class Fields(BaseModel):
    """What completions and chat completions share: OpenAI's fields, and those that vLLM adds."""

    model_config = ConfigDict(strict=True, extra="allow")

    model: str | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    max_tokens: int | None = None
    stop: str | List[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    stop_token_ids: List[int] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: int | None = None

    def check(self) -> None:
        """Raises InvalidRequestError for what this server does not do, by the field's name."""
        check_extra(self)
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError("is for streams only: set stream to true, too", field="stream_options")
        if self.stream and self.prompt_logprobs is not None:
            raise InvalidRequestError("is not for streams: leave stream out", field="prompt_logprobs")


class CompletionFields(Fields):
    """POST /v1/completions."""

    prompt: str | List[str] | List[int] | List[List[int]]
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None

    def check(self) -> None:
        super().check()
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise InvalidRequestError(
                "the best of several is not chosen here: leave it out, and compare n answers yourself",
                field="best_of",
                value=self.best_of,
            )


class ChatFields(Fields):
    """POST /v1/chat/completions."""

    messages: List[dict[str, Any]]
    chat_template_kwargs: dict[str, Any] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    max_completion_tokens: int | None = None

    def check(self) -> None:
        super().check()
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequestError("needs logprobs to be true", field="top_logprobs", value=self.top_logprobs)


class TokenizeFields(BaseModel):
    """POST /tokenize: text or a chat."""

    model_config = ConfigDict(strict=True, extra="allow")

    model: str | None = None
    prompt: str | None = None
    messages: List[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeFields(BaseModel):
    """POST /detokenize."""

    model_config = ConfigDict(strict=True, extra="allow")

    model: str | None = None
    tokens: List[int]


def check_sizes(value: Mapping[str, Any]) -> None:
    """Raises InvalidRequestError for a body that has more of something than is ever taken."""
    if len(value) > MAX_FIELDS:
        raise InvalidRequestError(f"the body has {len(value)} fields; at most {MAX_FIELDS} are taken")
    for name, limit in _MAX_ENTRIES.items():
        given = value.get(name)
        if isinstance(given, (list, dict)) and len(given) > limit:
            raise InvalidRequestError(f"at most {limit} are taken", field=name, value=f"{len(given)} of them")
    prompts = value.get("prompt")
    if isinstance(prompts, list) and len(prompts) > MAX_PROMPTS and isinstance(prompts[0], (str, list)):
        raise InvalidRequestError(
            f"has {len(prompts)} prompts, and one request takes {MAX_PROMPTS}: send several", field="prompt"
        )


def check_extra(body: BaseModel) -> None:
    """Raises InvalidRequestError for a field that nobody here knows, or with a value that asks for too much."""
    for name, value in (body.model_extra or {}).items():
        if value is None or name in IGNORED:
            continue
        if name not in FIXED:
            raise InvalidRequestError("is not a field that this server takes: leave it out", field=name)
        allowed, why = FIXED[name]
        if not any(type(value) is type(one) and value == one for one in allowed):
            raise InvalidRequestError(f"{why}: leave it out", field=name)
