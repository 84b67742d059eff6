"""What each path answers."""

from __future__ import annotations

import uuid
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from epruntime.errors import InvalidRequestError, renamed
from epruntime.serve.engine import Engine
from epruntime.serve.gate import LOADING_RETRY_S, Gate
from epruntime.serve.openai import body
from epruntime.serve.openai.chat import ChatAnswers
from epruntime.serve.openai.choices import Head, fingerprint
from epruntime.serve.openai.completions import CompletionAnswers
from epruntime.serve.openai.errors import HttpError
from epruntime.serve.openai.fields import (
    ChatFields,
    CompletionFields,
    DetokenizeFields,
    Fields,
    TokenizeFields,
    check_extra,
)
from epruntime.serve.openai.generation import Job, deltas, opened
from epruntime.serve.openai.json import encode
from epruntime.serve.openai.prompts import chat_of, prompts_of
from epruntime.serve.openai.sampling import chat_params, completion_params
from epruntime.serve.openai.stream import EventStream, unless_gone
from epruntime.version import __version__

F = TypeVar("F", bound=Fields)


class Endpoints:
    """Handlers, each from a request to a response; errors are raised.

    Args:
        limit: bytes of a body.
    """

    def __init__(self, gate: Gate, limit: int) -> None:
        self._gate, self._limit = gate, limit

    async def completions(self, request: Request) -> Response:
        sent = await self._read(request, CompletionFields)
        engine = self._gate.admit()
        self._check_model(engine, sent.model)
        if sent.echo and not engine.model_info["has_tokenizer"]:
            raise InvalidRequestError("needs text, and this model has no tokenizer", field="echo")
        params = completion_params(engine, sent)
        job = Job(request_id=_name("cmpl", request), prompts=prompts_of(sent.prompt), params=params)
        _check_queue(engine, job)
        head = _head(engine, job, "text_completion")
        return await self._answer(
            request, sent, job, CompletionAnswers(engine=engine, body=sent, head=head, n=params.n)
        )

    async def chat(self, request: Request) -> Response:
        sent = await self._read(request, ChatFields)
        engine = self._gate.admit()
        self._check_model(engine, sent.model)
        params = chat_params(engine, sent)
        prompt = chat_of(sent.messages, sent.chat_template_kwargs)
        job = Job(request_id=_name("chatcmpl", request), prompts=[prompt], params=params)
        head = _head(engine, job, "chat.completion.chunk" if sent.stream else "chat.completion")
        return await self._answer(request, sent, job, ChatAnswers(body=sent, head=head, n=params.n))

    async def models(self, request: Request) -> Response:
        return _json({"object": "list", "data": [self._card(self._gate.reach())]})

    async def model(self, request: Request) -> Response:
        engine = self._gate.reach()
        self._check_model(engine, request.path_params["name"])
        return _json(self._card(engine))

    async def health(self, request: Request) -> Response:
        """200 while requests are taken and every rank steps."""
        if not self._gate.serving:
            headers = {"Retry-After": str(round(LOADING_RETRY_S))}
            raise HttpError(503, self._gate.reason or self._gate.state.value, headers=headers)
        return _json({"status": "ok"})

    async def version(self, request: Request) -> Response:
        return _json({"version": __version__})

    async def tokenize(self, request: Request) -> Response:
        sent = await body.read(request, TokenizeFields, self._limit)
        check_extra(sent)
        engine = self._gate.reach()
        self._check_model(engine, sent.model)
        if (sent.prompt is None) == (sent.messages is None):
            raise InvalidRequestError("send either prompt or messages", field="prompt")
        if sent.messages is None and sent.chat_template_kwargs is not None:
            raise InvalidRequestError("is for messages: leave it out", field="chat_template_kwargs")
        prompt = sent.prompt if sent.messages is None else chat_of(sent.messages, sent.chat_template_kwargs)
        _, ids = await unless_gone(engine.tokenize(prompt), request)
        texts = None
        if sent.return_token_strs:
            known = await unless_gone(_texts(engine, set(ids)), request)
            texts = [known[token] for token in ids]
        limit = engine.model_info["max_model_len"]
        return _json({"count": len(ids), "max_model_len": limit, "tokens": ids, "token_strs": texts})

    async def detokenize(self, request: Request) -> Response:
        sent = await body.read(request, DetokenizeFields, self._limit)
        check_extra(sent)
        engine = self._gate.reach()
        self._check_model(engine, sent.model)
        try:
            return _json({"prompt": await unless_gone(engine.detokenize(sent.tokens), request)})
        except InvalidRequestError as error:
            raise renamed(error, {"token_ids": "tokens"}) from error

    async def _read(self, request: Request, kind: type[F]) -> F:
        sent = await body.read(request, kind, self._limit)
        sent.check()
        return sent

    async def _answer(
        self, request: Request, sent: Fields, job: Job, answers: CompletionAnswers | ChatAnswers
    ) -> Response:
        stream = deltas(self._gate, job)
        if not sent.stream:
            return _json(await unless_gone(answers.whole(stream), request))
        begun = await unless_gone(opened(stream, len(job.prompts)), request)
        return EventStream(answers.chunks(begun), job.request_id)

    def _check_model(self, engine: Engine, name: str | None) -> None:
        served = engine.model_info["name"]
        if name is not None and name != served:
            raise HttpError(
                404,
                f"The model {name!r} does not exist here: this server has {served!r}",
                param="model",
                code="model_not_found",
            )

    def _card(self, engine: Engine) -> dict[str, Any]:
        info = engine.model_info
        return {
            "id": info["name"],
            "object": "model",
            "created": int(info["created"]),
            "owned_by": "epruntime",
            "root": info["name"],
            "parent": None,
            "max_model_len": info["max_model_len"],
        }


def _check_queue(engine: Engine, job: Job) -> None:
    """More than there will ever be room for is no matter of trying again."""
    wanted, most = len(job.prompts) * job.params.n, engine.max_sequences
    if len(job.prompts) > 1 and wanted > most:
        raise InvalidRequestError(
            f"asks for {wanted} sequences ({len(job.prompts)} prompts, n={job.params.n}) and the engine takes at most "
            f"{most} at once (max_queued_requests): send several requests",
            field="prompt",
        )


async def _texts(engine: Engine, tokens: set[int]) -> dict[int, str]:
    return {token: await engine.detokenize([token]) for token in tokens}


def _head(engine: Engine, job: Job, kind: str) -> Head:
    name = engine.model_info["name"]
    return Head(id=job.request_id, object=kind, model=name, system_fingerprint=fingerprint(engine))


def _name(kind: str, request: Request) -> str:
    """A new id; it holds the caller's X-Request-Id, which need not be unique."""
    given: str = request.state.given_id
    return f"{kind}-{given}-{uuid.uuid4().hex[:8]}" if given else f"{kind}-{uuid.uuid4().hex}"


def _json(value: Any) -> Response:
    return Response(encode(value), media_type="application/json")
