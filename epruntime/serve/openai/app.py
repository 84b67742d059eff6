"""The ASGI application: which path goes where.

request -> CORS -> Envelope (id, errors) -> Access (token) -> FastAPI (routes) -> Endpoints
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import FastAPI, Request
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp

from epruntime.config import ServeConfig
from epruntime.serve.access import AccessCheck
from epruntime.serve.gate import Gate
from epruntime.serve.openai.endpoints import Endpoints
from epruntime.serve.openai.envelope import REQUEST_ID, Access, Envelope
from epruntime.serve.openai.errors import HttpError, http_error
from epruntime.serve.openai.fields import ChatFields, CompletionFields, DetokenizeFields, TokenizeFields
from epruntime.version import __version__

Handler = Callable[[Request], Awaitable[Response]]
#: Accept header -> (body, content type) of /metrics
Metrics = Callable[[str], Awaitable[tuple[bytes, str]]]


def make_app(config: ServeConfig, gate: Gate, metrics: Metrics | None = None) -> ASGIApp:
    """The application. Its OpenAPI description is at /openapi.json; there is no page that loads scripts."""
    to = Endpoints(gate, config.max_message_mb * 2**20)
    api = FastAPI(
        title="epruntime", version=__version__, docs_url=None, redoc_url=None, redirect_slashes=False,
        description="OpenAI-compatible HTTP API of a Mixture-of-Experts model.",
        exception_handlers={HTTPException: _no_route},
    )  # fmt: skip
    _post(api, "/v1/completions", to.completions, CompletionFields)
    _post(api, "/v1/chat/completions", to.chat, ChatFields)
    _post(api, "/tokenize", to.tokenize, TokenizeFields)
    _post(api, "/detokenize", to.detokenize, DetokenizeFields)
    _get(api, "/v1/models", to.models)
    _get(api, "/v1/models/{name:path}", to.model)
    _get(api, "/health", to.health)
    _get(api, "/ping", to.health)
    _get(api, "/version", to.version)
    if metrics is not None:
        read = metrics

        async def exposition(request: Request) -> Response:
            body, content_type = await read(request.headers.get("accept", ""))
            return Response(body, headers={"Content-Type": content_type})

        _get(api, "/metrics", exposition)
    app: ASGIApp = Envelope(Access(api, AccessCheck.of(config)))
    if config.allowed_origins:
        app = CORSMiddleware(
            app, allow_origins=config.allowed_origins, allow_methods=["*"], allow_headers=["*"],
            expose_headers=[REQUEST_ID, "Retry-After"],
        )  # fmt: skip
    return app


def _get(api: FastAPI, path: str, handler: Handler) -> None:
    answer = _answered(handler)
    api.add_api_route(path, answer, methods=["GET"], response_model=None)
    api.add_api_route(path, answer, methods=["HEAD"], response_model=None, include_in_schema=False)


def _post(api: FastAPI, path: str, handler: Handler, fields: type[BaseModel]) -> None:
    """The body is read by the handler, within bounds; FastAPI only describes it."""
    schema = {"required": True, "content": {"application/json": {"schema": _flat(fields.model_json_schema())}}}
    api.add_api_route(
        path, _answered(handler), methods=["POST"], response_model=None, openapi_extra={"requestBody": schema}
    )


def _answered(handler: Handler) -> Handler:
    """Whatever the handler raises becomes an answer here, before a framework has its own idea of it."""

    async def answer(request: Request) -> Response:
        try:
            return await handler(request)
        except ClientDisconnect:
            return Response(status_code=499)  # to nobody
        except Exception as error:  # noqa: BLE001  every failure must reach the client as a status
            return http_error(error, request.state.request_id).response()

    answer.__name__ = handler.__name__
    answer.__doc__ = handler.__doc__
    return answer


async def _no_route(request: Request, error: Exception) -> Response:
    """The router's own refusals."""
    assert isinstance(error, HTTPException)
    words = {404: "there is no such path here", 405: "this path does not take this method"}
    return HttpError(error.status_code, words.get(error.status_code, error.detail), headers=error.headers).response()


def _flat(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema without definitions to refer to: each is put where it is used."""
    known = schema.pop("$defs", {})

    def put(value: Any) -> Any:
        if isinstance(value, list):
            return [put(item) for item in value]
        if not isinstance(value, dict):
            return value
        if "$ref" in value:
            return put(known[value["$ref"].rpartition("/")[2]])
        return {key: put(item) for key, item in value.items()}

    flat: dict[str, Any] = put(schema)
    return flat
