"""A request body, read within bounds of size and time, parsed and checked."""

from __future__ import annotations

import asyncio
from typing import Any, TypeVar

import pydantic
from starlette.requests import Request

from epruntime.errors import InvalidRequestError
from epruntime.serve.openai import json
from epruntime.serve.openai.errors import HttpError
from epruntime.serve.openai.fields import check_sizes

M = TypeVar("M", bound=pydantic.BaseModel)

#: Seconds in which a body must have arrived.
BODY_S = 60.0
#: What is read and thrown away of a body that is too large, in multiples of the limit and in seconds: most clients
#: read no answer before they have sent all, and would see a reset connection instead of the reason.
_DISCARD, _DISCARD_S = 4, 10.0
#: Fields of several types, in words; pydantic would name only the first type.
_FORMS = {
    "prompt": "must be a string, a list of strings, token ids, or a list of lists of token ids",
    "stop": "must be a string or a list of strings",
}


async def read(request: Request, kind: type[M], limit: int) -> M:
    """The request's body as a `kind`.

    Args:
        limit: bytes.

    Raises:
        HttpError: 408 too slow, 413 too large, 415 not said to be JSON, or compressed.
        InvalidRequestError: not JSON, or not a `kind`; names the field.
        starlette.requests.ClientDisconnect: the client has gone.
    """
    media = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media != "application/json" and not media.endswith("+json"):
        raise HttpError(415, "the body must be JSON: send the header 'Content-Type: application/json'")
    coding = request.headers.get("content-encoding", "identity").strip().lower()
    if coding not in ("", "identity"):
        raise HttpError(
            415, f"the body must be sent as it is: leave out 'Content-Encoding: {coding}'",
            headers={"Accept-Encoding": "identity"},
        )  # fmt: skip
    value = json.decode(await _read(request, limit))
    if not isinstance(value, dict):
        raise InvalidRequestError("the body must be a JSON object")
    check_sizes(value)
    try:
        return kind.model_validate(value)
    except pydantic.ValidationError as error:
        raise _refusal(error) from error


async def _read(request: Request, limit: int) -> bytes:
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(BODY_S) as deadline:
            async for part in request.stream():
                size += len(part)
                if size <= limit:
                    parts.append(part)
                    continue
                if parts:
                    parts.clear()
                    deadline.reschedule(min(asyncio.get_running_loop().time() + _DISCARD_S, deadline.when() or 0.0))
                if size > _DISCARD * limit:
                    break
    except TimeoutError as error:
        if size <= limit:
            raise HttpError(
                408, f"the body did not arrive within {BODY_S:g} s", headers={"Connection": "close"}
            ) from error
    if size > limit:
        raise HttpError(
            413, f"the body is larger than {limit} bytes (--max-message-mb)", headers={"Connection": "close"}
        )
    return b"".join(parts)


def _refusal(error: pydantic.ValidationError) -> InvalidRequestError:
    """The first thing that is wrong, in our words."""
    first: Any = error.errors(include_url=False, include_context=False)[0]
    if first["type"] != "missing" and first["loc"][0] in _FORMS:
        return InvalidRequestError(_FORMS[first["loc"][0]], field=first["loc"][0])
    where = ".".join(str(part) for part in first["loc"])
    message = first["msg"][:1].lower() + first["msg"][1:]
    value = first["input"]
    if first["type"] == "missing" or isinstance(value, (dict, list)):
        return InvalidRequestError(message, field=where)
    return InvalidRequestError(message, field=where, value=value)
