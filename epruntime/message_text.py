"""Text of a chat message: its content is a string, or a list of parts of type text, as OpenAI's API has it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from epruntime.errors import InvalidRequestError

#: Parts of one content.
MAX_PARTS = 2**14
#: Keys of a part of type text that clients send along, and that change no answer.
_IDLE_KEYS = ("annotations", "cache_control")


def text_of(content: Any, where: str) -> str:
    """The content itself, or its parts joined by line ends.

    Args:
        where: the content's place in the request, for an error.

    Raises:
        InvalidRequestError: it is anything else; names the part.
    """
    if isinstance(content, str):
        return valid_text(content, where)
    if not isinstance(content, (list, tuple)):
        raise InvalidRequestError("must be a string, or a list of parts of type text", field=where, value=content)
    if not content:
        raise InvalidRequestError("has no parts: send at least one, or a string", field=where)
    if len(content) > MAX_PARTS:
        raise InvalidRequestError(f"at most {MAX_PARTS} parts are taken", field=where, value=f"{len(content)} of them")
    return "\n".join(_text_of_part(part, f"{where}.{number}") for number, part in enumerate(content))


def valid_text(text: str, where: str) -> str:
    """The text itself.

    Raises:
        InvalidRequestError: half of a surrogate pair is in it.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidRequestError(f"is not valid Unicode text: {error}", field=where) from error
    return text


def _text_of_part(part: Any, where: str) -> str:
    if isinstance(part, str):
        return valid_text(part, where)
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind is None:
        raise InvalidRequestError("must be a part, as {'type': 'text', 'text': ...}", field=where, value=part)
    if kind != "text":
        raise InvalidRequestError(
            "must be text, as {'type': 'text', 'text': ...}; nothing else is taken", field=where, value=kind
        )
    if not isinstance(part.get("text"), str):
        raise InvalidRequestError("a part of type text has a 'text', which is a string", field=where, value=part)
    for name, value in part.items():
        if value is not None and name not in ("type", "text", *_IDLE_KEYS):
            raise InvalidRequestError(
                "is not taken: a part of type text has 'type' and 'text'", field=f"{where}.{name}"
            )
    return valid_text(part["text"], f"{where}.text")
