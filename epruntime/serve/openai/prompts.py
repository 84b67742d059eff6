"""Prompts of a request in the form that the engine takes."""

from __future__ import annotations

from typing import Any

from epruntime.errors import InvalidRequestError
from epruntime.message_text import text_of

#: Prompts in one request; each counts as a request of its own in the queue.
MAX_PROMPTS = 1024
ROLES = ("system", "developer", "user", "assistant", "tool")
_MESSAGE_FIELDS = ("role", "content", "name")


def prompts_of(prompt: str | list[str] | list[int] | list[list[int]]) -> list[str | list[int]]:
    """One prompt, or one for each member of a list.

    Raises:
        InvalidRequestError: there is none, or one is empty.
    """
    if isinstance(prompt, str):
        return [_text(prompt)]
    if not prompt:
        raise InvalidRequestError("is empty; send text or token ids", field="prompt")
    if isinstance(prompt[0], int):
        return [_ids(prompt)]
    return [_text(one) if isinstance(one, str) else _ids(one) for one in prompt]


def chat_of(messages: list[dict[str, Any]], template_kwargs: dict[str, Any] | None) -> dict[str, Any]:
    """The chat with plain text contents, and keywords for its template; parts of type text are joined by line ends.

    Raises:
        InvalidRequestError: there is none, or a message that is not understood; names it.
    """
    if not messages:
        raise InvalidRequestError("is empty; send at least one message", field="messages")
    chat: dict[str, Any] = {"messages": [_message(one, f"messages.{number}") for number, one in enumerate(messages)]}
    return chat if template_kwargs is None else {**chat, "chat_template_kwargs": template_kwargs}


def _text(prompt: str) -> str:
    if not prompt:
        raise InvalidRequestError("is empty; send text or token ids", field="prompt")
    return prompt


def _ids(prompt: Any) -> list[int]:
    if not prompt:
        raise InvalidRequestError("has an empty list of token ids; send at least one", field="prompt")
    return list(prompt)


def _message(message: dict[str, Any], where: str) -> dict[str, Any]:
    role = message.get("role")
    if role not in ROLES:
        raise InvalidRequestError(f"must be one of {', '.join(ROLES)}", field=f"{where}.role", value=role)
    for name, value in message.items():
        # evaluation harnesses put the type of a content part at the message
        if name not in _MESSAGE_FIELDS and value not in (None, [], {}) and (name, value) != ("type", "text"):
            raise InvalidRequestError("is not taken: messages have role, content and name", field=f"{where}.{name}")
    known = {"role": role, "content": text_of(message.get("content"), f"{where}.content")}
    if message.get("name") is not None:
        if not isinstance(message["name"], str):
            raise InvalidRequestError("must be a string", field=f"{where}.name", value=message["name"])
        known["name"] = message["name"]
    return known
