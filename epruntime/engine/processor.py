"""The edge: a prompt and SamplingParams, checked once, become an EngineRequest."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from epruntime.engine.template_kwargs import FIELD
from epruntime.engine.tokenizer import Tokenizer
from epruntime.errors import InvalidRequestError
from epruntime.plan import SamplingSpec
from epruntime.sampling_params import SamplingParams
from epruntime.words import counted

#: a string, token ids, {"prompt": str}, {"prompt_token_ids": [...]} or {"messages": [...]}; the last may have
#: "chat_template_kwargs", too
Prompt = str | Sequence[int] | dict[str, Any]
#: Ids that are made into text at once.
MAX_DETOKENIZED = 2**20
#: Characters that are made into ids at once, and characters per token of the longest prompt, if that is more: the
#: answer to 15 MB of text would be some 60 MB of ids, of which no request takes more than max_model_len.
MAX_TOKENIZED, _CHARACTERS_PER_TOKEN = 2**20, 16
#: Messages in one chat.
MAX_MESSAGES = 2**14
#: What a chat message counts beside its content, in `size_of`: the template's work for it.
_MESSAGE_SIZE = 64


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
        text, ids = self.tokens(prompt, bounded=True)
        self._check(_field(prompt), ids, params)
        room = self.limits.max_model_len - len(ids)
        seed = secrets.randbits(63) if params.seed is None else params.seed
        if params.min_tokens > room:
            raise InvalidRequestError(
                f"the prompt has {counted(len(ids), 'token')} and max_model_len is {self.limits.max_model_len}, which "
                f"leaves room for {counted(room, 'output token')}: lower it, or shorten the prompt",
                field="min_tokens",
                value=params.min_tokens,
            )
        eos = () if params.ignore_eos else self.limits.eos_token_ids
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
        if isinstance(token_ids, (list, tuple)) and len(token_ids) > MAX_DETOKENIZED:
            raise InvalidRequestError(
                f"at most {MAX_DETOKENIZED} are taken at once", field="token_ids", value=f"{len(token_ids)} of them"
            )
        ids = _token_list("token_ids", token_ids)
        self._check_vocabulary("token_ids", ids)
        try:
            return tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        except Exception as error:  # models may have ids that their tokenizer has not, and each kind raises its own
            raise InvalidRequestError(f"the tokenizer cannot read them: {error}", field="token_ids") from error

    def tokens(self, prompt: Prompt, *, bounded: bool = False) -> tuple[str | None, list[int]]:
        """The text of a prompt, where it has one, and its ids.

        Args:
            bounded: what is certainly too long for the model is refused before time is spent on its tokens.

        Raises:
            InvalidRequestError: it cannot be read, or is text and there is no tokenizer.
        """
        check = self._check_text if bounded else _anything
        if isinstance(prompt, dict):
            known = {"prompt", "prompt_token_ids", "messages"} & prompt.keys()
            more = {FIELD} if "messages" in prompt else set()
            if len(known) != 1 or prompt.keys() - known - more:
                raise InvalidRequestError(
                    "a prompt dict has exactly one key: 'prompt', 'prompt_token_ids' or 'messages' (and "
                    f"{FIELD!r} beside the last)",
                    field="prompt",
                    value=sorted(map(str, prompt)),
                )
            if "prompt_token_ids" in prompt:
                return None, self._ids("prompt_token_ids", prompt["prompt_token_ids"], bounded=bounded)
            if "messages" in prompt:
                return self._need_tokenizer("messages").encode_chat(
                    prompt["messages"], keywords=prompt.get(FIELD), check=check
                )
            prompt = prompt["prompt"]
        if isinstance(prompt, (list, tuple)):
            return None, self._ids("prompt", prompt, bounded=bounded)
        if not isinstance(prompt, str):
            raise InvalidRequestError(
                "must be a string, a list of token ids, or a dict with 'prompt_token_ids' or 'messages'",
                field="prompt",
                value=prompt,
            )
        tokenizer = self._need_tokenizer("prompt")
        check(prompt)
        return prompt, tokenizer.encode(prompt)

    def check_tokenized(self, prompt: Prompt) -> None:
        """Refuses to make ids of a prompt that is longer than can be of use."""
        size, most = size_of(prompt), max(MAX_TOKENIZED, _CHARACTERS_PER_TOKEN * self.limits.max_model_len)
        if size > most:
            raise InvalidRequestError(
                f"at most {most} characters are tokenised at once, and a prompt has at most "
                f"{self.limits.max_model_len} tokens: send it in parts",
                field="prompt",
                value=f"{size} characters",
            )

    def _need_tokenizer(self, field: str) -> Tokenizer:
        if self.tokenizer is None:
            raise InvalidRequestError(
                "this model was loaded without a tokenizer; send token ids instead of text", field=field
            )
        return self.tokenizer

    def _ids(self, field: str, value: Any, *, bounded: bool) -> list[int]:
        if bounded and isinstance(value, (list, tuple)) and len(value) >= self.limits.max_model_len:
            raise self._too_long(counted(len(value), "token"))
        return _token_list(field, value)

    def _check_text(self, text: str) -> None:
        """Refuses a text that is too long whatever its tokens."""
        num = self._need_tokenizer("prompt").tokens_at_least(text)
        if num >= self.limits.max_model_len:
            raise self._too_long(f"at least {counted(num, 'token')}")

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

    def _check(self, field: str, ids: Sequence[int], params: SamplingParams) -> None:
        limits = self.limits
        if not ids:
            raise InvalidRequestError("has no tokens; send at least one", field="prompt")
        for name, tokens in (
            (field, ids),
            ("stop_token_ids", params.stop_token_ids),
            ("logit_bias", tuple(params.logit_bias)),
        ):
            self._check_vocabulary(name, tokens)
        if len(ids) >= limits.max_model_len:
            raise self._too_long(counted(len(ids), "token"))
        if params.stop and self.tokenizer is None:
            raise InvalidRequestError("stop strings need a tokenizer; use stop_token_ids", field="stop")


def size_of(prompt: Any) -> int:
    """About how much work it is to make ids of a prompt, in characters or ids; whatever it is."""
    if isinstance(prompt, dict):
        prompt = prompt.get("messages", next(iter(prompt.values()), None))
    if not isinstance(prompt, (str, list, tuple)):
        return 0
    size = len(prompt)
    if prompt and isinstance(prompt[0], Mapping):
        contents = [message.get("content") for message in prompt if isinstance(message, Mapping)]
        texts = [
            text for content in contents for text in (content if isinstance(content, (list, tuple)) else [content])
        ]
        texts = [text.get("text") if isinstance(text, Mapping) else text for text in texts]
        size = _MESSAGE_SIZE * size + sum(len(text) for text in texts if isinstance(text, str))
    return size


def _anything(_: str) -> None: ...


def _field(prompt: Prompt) -> str:
    """The request's name of what became the prompt's ids."""
    given = prompt if isinstance(prompt, dict) else {}
    return next((name for name in ("prompt_token_ids", "messages") if name in given), "prompt")


def _token_list(field: str, value: Any) -> list[int]:
    if not isinstance(value, (list, tuple)):
        raise InvalidRequestError("must be a list of integers", field=field, value=value)
    for token in value:
        if not isinstance(token, int) or isinstance(token, bool) or token < 0:
            raise InvalidRequestError("token ids are non-negative integers", field=field, value=token)
    return list(value)
