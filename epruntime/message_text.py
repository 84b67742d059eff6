"""Text of a chat message: its content is a string, or a list of parts of type text, as OpenAI's API has it."""

from __future__ import annotations

from typing import Any

from epruntime.errors import InvalidRequestError

#: Parts of one content.
MAX_PARTS = 2**14


def text_of(content: Any, where: str) -> str:
    """The content itself, or its parts joined by line ends.

    Args:
        where: the content's place in the request, for an error.

    Raises:
        InvalidRequestError: it is anything else; names the part.
    """
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequestError("must be a string, or a list of parts of type text", field=where, value=content)
    if len(content) > MAX_PARTS:
        raise InvalidRequestError(f"at most {MAX_PARTS} parts are taken", field=where, value=f"{len(content)} of them")
    return "\n".join(_text_of_part(part, f"{where}.{number}") for number, part in enumerate(content))


def _text_of_part(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    if kind is None:
        raise InvalidRequestError("must be a part, as {'type': 'text', 'text': ...}", field=where, value=part)
    if kind != "text":
        raise InvalidRequestError(
            "must be text, as {'type': 'text', 'text': ...}; nothing else is taken", field=where, value=kind
        )
    if not isinstance(part.get("text"), str):
        raise InvalidRequestError("a part of type text has a 'text', which is a string", field=where, value=part)
    return str(part["text"])
