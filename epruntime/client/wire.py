"""Requests and answers between our types and their wire form; shared by Client and AsyncClient."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from epruntime.client.types import Chunk, GenerateResult, Timing, Usage
from epruntime.errors import EPRuntimeError, InvalidRequestError
from epruntime.message_text import text_of, valid_text
from epruntime.outputs import CompletionOutput, Logprob
from epruntime.prompts import params_list
from epruntime.proto import inference_pb2 as pb
from epruntime.sampling_params import SamplingParams, not_a_field

#: text, token ids, {"prompt": text}, {"prompt_token_ids": ids} or {"messages": [{"role", "content"}, ...]}
Prompt = str | Sequence[int] | Mapping[str, Any]

#: max_tokens on the wire where it is None here.
UNLIMITED_TOKENS = -1
#: Fields of GenerateRequest that a prompt has under another name here.
FIELD_NAMES = {"token_ids": "prompt_token_ids"}
_FINISH_REASONS = {
    pb.FINISH_REASON_UNSPECIFIED: None,
    pb.FINISH_REASON_STOP: "stop",
    pb.FINISH_REASON_LENGTH: "length",
    pb.FINISH_REASON_ABORT: "abort",
}


def split_params(params: Any, overrides: dict[str, Any], count: int) -> list[dict[str, Any]]:
    """Sampling fields to send for each of `count` prompts: of one SamplingParams, or one each, or keywords.

    Raises:
        InvalidRequestError: a value makes no sense, or the numbers differ.
        TypeError: an unknown keyword, or parameters given both ways.
    """
    if overrides:
        if params is not None:
            raise TypeError("give sampling parameters as a SamplingParams or as keywords, not as both")
        for name in overrides:
            if told := not_a_field(name):
                raise TypeError(f"{name} {told}")
        # refuses values before anything is sent; the server's own max_tokens is not known here
        SamplingParams(**{"max_tokens": None, **overrides})
        return [overrides] * count
    if params is None:
        return [{}] * count
    return [one.to_wire() for one in params_list(params, count)]


def request(
    prompt: Prompt, sampling: Mapping[str, Any], request_id: str | None = None, *, return_prompt_token_ids: bool = False
) -> pb.GenerateRequest:
    """The message for one prompt; draws a request id where none is given, so that it can be aborted by it.

    Raises:
        InvalidRequestError: it cannot be put into a message.
    """
    message = pb.GenerateRequest(
        request_id=request_id or uuid.uuid4().hex, return_prompt_token_ids=return_prompt_token_ids
    )
    try:
        _set_prompt(message, prompt)
        _set_sampling(message.sampling, sampling)
    except (ValueError, TypeError) as error:
        if isinstance(error, EPRuntimeError):
            raise
        raise InvalidRequestError(f"the request cannot be put into a message: {error}") from error
    return message


def _set_prompt(message: pb.GenerateRequest, prompt: Prompt) -> None:
    if isinstance(prompt, Mapping):
        if len(prompt) != 1 or not prompt.keys() <= {"prompt", "prompt_token_ids", "messages"}:
            raise InvalidRequestError(
                "a prompt dict has exactly one key: 'prompt', 'prompt_token_ids' or 'messages'",
                field="prompt",
                value=sorted(map(str, prompt)),
            )
        if "messages" in prompt:
            set_chat(message, prompt["messages"])
            return
        prompt = prompt["prompt"] if "prompt" in prompt else prompt["prompt_token_ids"]
    if isinstance(prompt, str):
        set_text(message, prompt)
    else:
        message.token_ids.SetInParent()
        try:
            message.token_ids.ids.extend(prompt)
        except (ValueError, TypeError) as error:
            raise InvalidRequestError(
                f"must be text or a list of token ids: {error}", field="prompt", value=type(prompt).__name__
            ) from error


def set_text(message: pb.GenerateRequest | pb.TokenizeRequest, text: str) -> None:
    try:
        message.text = text
    except ValueError as error:  # UnicodeEncodeError among them: half of a surrogate pair
        raise InvalidRequestError(f"is not valid Unicode: {error}", field="prompt") from error


def set_chat(message: pb.GenerateRequest | pb.TokenizeRequest, messages: Sequence[Any]) -> None:
    if not isinstance(messages, (list, tuple)):
        raise InvalidRequestError("must be a list of dicts with 'role' and 'content'", field="messages", value=messages)
    message.chat.SetInParent()
    for number, entry in enumerate(messages):
        message.chat.messages.append(_chat_message(entry, f"messages.{number}"))


def _chat_message(entry: Any, where: str) -> pb.ChatMessage:
    if not isinstance(entry, Mapping) or entry.keys() != {"role", "content"}:
        raise InvalidRequestError(
            "must be a dict with 'role', which is text, and 'content', which is text or a list of parts of type text",
            field=where,
            value=entry,
        )
    role = entry["role"]
    if not isinstance(role, str):
        raise InvalidRequestError("must be a string", field=f"{where}.role", value=role)
    return pb.ChatMessage(role=valid_text(role, f"{where}.role"), content=text_of(entry["content"], f"{where}.content"))


def _set_sampling(message: pb.SamplingParams, sampling: Mapping[str, Any]) -> None:
    for name, value in sampling.items():
        if name == "max_tokens" and value is None:
            value = UNLIMITED_TOKENS
        if value is None:
            continue
        if name == "stop":
            message.stop.extend((value,) if isinstance(value, str) else value)
        elif name == "stop_token_ids":
            message.stop_token_ids.extend(value)
        elif name == "logit_bias":
            message.logit_bias.update(value)
        else:
            setattr(message, name, value)


def chunk(message: pb.GenerateResponse, request_id: str) -> Chunk:
    """One piece of output."""
    stop = message.WhichOneof("stop_reason")
    return Chunk(
        request_id=request_id,
        index=message.index,
        text=message.text,
        token_ids=tuple(message.token_ids),
        logprobs=tuple(_logprobs(p) for p in message.logprobs) if message.logprobs else None,
        finish_reason=_FINISH_REASONS.get(message.finish_reason, "unknown"),
        stop_reason=None if stop is None else getattr(message, stop),
        final=message.final,
        usage=_usage(message) if message.final else None,
        seed=message.seed if message.HasField("seed") else None,
        timing=_timing(message.timing) if message.final else None,
        prompt_token_ids=tuple(message.prompt_token_ids),
        prompt_logprobs=tuple(_logprobs(p) if p.HasField("chosen") else None for p in message.prompt_logprobs),
    )


def _logprobs(position: pb.PositionLogprobs) -> dict[int, Logprob]:
    return {t.token_id: Logprob(t.logprob, t.token) for t in (position.chosen, *position.others)}


def _usage(message: pb.GenerateResponse) -> Usage:
    return Usage(
        prompt_tokens=message.usage.prompt_tokens,
        output_tokens=message.usage.output_tokens,
        cached_tokens=message.usage.cached_tokens,
    )


def _timing(message: pb.Timing) -> Timing:
    def value(name: str) -> float | None:
        return getattr(message, name) if message.HasField(name) else None

    return Timing(
        queue_s=value("queue_s"),
        ttft_s=value("ttft_s"),
        e2e_s=value("e2e_s"),
        num_preemptions=message.num_preemptions,
    )


class Collector:
    """Chunks of one request, added up."""

    def __init__(self) -> None:
        self._outputs: dict[int, CompletionOutput] = {}
        self._texts: dict[int, list[str]] = {}
        self._prompt_token_ids: list[int] = []
        self._prompt_logprobs: list[dict[int, Logprob] | None] = []
        self._last: Chunk | None = None

    def add(self, new: Chunk) -> None:
        self._prompt_token_ids.extend(new.prompt_token_ids)
        self._prompt_logprobs.extend(new.prompt_logprobs)
        output = self._outputs.setdefault(new.index, CompletionOutput(index=new.index))
        self._texts.setdefault(new.index, []).append(new.text)
        output.token_ids.extend(new.token_ids)
        if new.logprobs is not None:
            if output.logprobs is None:
                output.logprobs = []
            output.logprobs.extend(new.logprobs)
        if new.finish_reason is not None:
            output.finish_reason, output.stop_reason = new.finish_reason, new.stop_reason
        self._last = new

    def result(self) -> GenerateResult:
        """The whole request.

        Raises:
            EPRuntimeError: the stream ended without its final message.
        """
        last = self._last
        if last is None or not last.final or last.usage is None or last.timing is None:
            raise EPRuntimeError("the server ended the stream without a final message")
        for index, output in self._outputs.items():
            output.text = "".join(self._texts[index])
        return GenerateResult(
            request_id=last.request_id,
            outputs=[self._outputs[index] for index in sorted(self._outputs)],
            usage=last.usage,
            seed=last.seed,
            timing=last.timing,
            prompt_token_ids=self._prompt_token_ids or None,
            prompt_logprobs=self._prompt_logprobs or None,
        )
