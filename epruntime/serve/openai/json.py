"""JSON in and out, strict both ways: no NaN, no infinity, only UTF-8."""

from __future__ import annotations

from typing import Any

import pydantic_core

from epruntime.errors import InvalidRequestError


def encode(value: Any) -> bytes:
    return pydantic_core.to_json(value)


def decode(data: bytes) -> Any:
    """The value that a request body holds.

    Raises:
        InvalidRequestError: it is not JSON (RFC 8259), or is nested too deep; says where.
    """
    try:
        return pydantic_core.from_json(data, allow_inf_nan=False, cache_strings="none")
    except ValueError as error:
        raise InvalidRequestError(f"the body is not JSON: {error}") from error
