"""Chat templates: programs that came with a model and make a prompt of messages.

where one lies -> check (is it one, does it end) -> read_in_parts (in which form it wants whose text) -> render

Contents are plain text here. Most templates want them as strings; those of some multimodal models go over a list of
parts, of all messages or of some roles', and would drop a string without a word. Small conversations tell.
"""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from epruntime.engine.time_limit import Overdue, time_limit
from epruntime.errors import CheckpointError, ConfigError, InvalidRequestError

logger = logging.getLogger("epruntime.engine.tokenizer")

#: Seconds that a template gets; thousands of messages take some hundredths.
TEMPLATE_S = 3.0
#: Where processors of multimodal models kept theirs before templates had a file of their own.
PROCESSOR_FILE = "chat_template.json"
#: Roles of the conversations that a template is tried with; a template may refuse some of these.
_ROLES = ("system", "user", "assistant")
_CONVERSATIONS = (("user",), ("system", "user"), ("user", "assistant", "user"), ("system", "user", "assistant", "user"))
#: Whose form the others have.
_LIKE = {"developer": "system", "tool": "user"}
#: How a list of parts comes out where it is printed like a string.
_PRINTED = ("'type': 'text'", '"type": "text"')


def of_processor(path: Path) -> str | None:
    """The template in the file of a multimodal model's processor; None if there is no such file.

    Raises:
        CheckpointError: there is none in it.
    """
    file = path / PROCESSOR_FILE
    if not file.is_file():
        return None
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    found = content.get("chat_template") if isinstance(content, dict) else None
    if not isinstance(found, str):
        raise CheckpointError(f"{file} holds no chat_template that is text")
    return found


def check(hf: Any) -> None:
    """Refuses what is no template, and one that does not end with a single message.

    Raises:
        ConfigError: so.
    """
    # jinja2 is what transformers renders templates with
    from jinja2.exceptions import TemplateSyntaxError

    try:
        with time_limit(TEMPLATE_S):
            hf.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False)
    except Overdue:
        raise ConfigError(
            f"chat_template: it does not end within {TEMPLATE_S:g} s with a single user message: it loops"
        ) from None
    except TemplateSyntaxError as error:
        raise ConfigError(f"chat_template: line {error.lineno}: {error.message}") from error
    except Exception as error:  # noqa: BLE001  a program that may want other messages than this one
        logger.info("the chat template refuses a single user message: %s: %s", type(error).__name__, error)


def read_in_parts(hf: Any) -> frozenset[str]:
    """Roles whose text the template reads as a list of parts of type text, and not as a string.

    Of all ways to give the roles' texts, the one by which most of them change the prompt; strings first.
    """
    choices = [frozenset(roles) for count in (0, 3, 1, 2) for roles in itertools.combinations(_ROLES, count)]
    best, most = frozenset[str](), 0
    try:
        with time_limit(TEMPLATE_S):
            for choice in choices:
                shown = sum(_shown(hf, roles, choice) for roles in _CONVERSATIONS)
                if shown > most:
                    best, most = choice, shown
                if most == sum(map(len, _CONVERSATIONS)):
                    break
    except Overdue:
        logger.warning("the chat template takes long for small conversations: it may not end for some")
    if most == 0:
        logger.warning("the chat template shows no text of small conversations, in whatever form it is given")
    return best


def render(hf: Any, messages: Sequence[dict[str, Any]], keywords: dict[str, Any], *, in_parts: Collection[str]) -> str:
    """The prompt that the template makes of messages whose contents are strings.

    Args:
        in_parts: roles whose contents it reads as lists of parts.

    Raises:
        InvalidRequestError: it refuses the messages, or does not end with them.
    """
    given = _in_form(messages, in_parts)
    try:
        with time_limit(TEMPLATE_S):
            text: str = hf.apply_chat_template(given, tokenize=False, add_generation_prompt=True, **keywords)
    except Overdue:
        raise InvalidRequestError(
            f"the chat template did not end with these messages within {TEMPLATE_S:g} s: it loops, or they are far "
            "too many",
            field="messages",
        ) from None
    except Exception as error:  # the template is a program that came with the model, and raises what it likes
        raise InvalidRequestError(f"the chat template refuses these messages: {error}", field="messages") from error
    return text


def _in_form(messages: Sequence[dict[str, Any]], in_parts: Collection[str]) -> list[dict[str, Any]]:
    return [
        {**one, "content": [{"type": "text", "text": one["content"]}]}
        if _LIKE.get(one["role"], one["role"]) in in_parts
        else one
        for one in messages
    ]


def _shown(hf: Any, roles: Sequence[str], in_parts: Collection[str]) -> int:
    """How many texts of a conversation change the prompt; none if the template refuses it, or prints a list."""

    def prompt(changed: int) -> Any:
        words = ["simple" if number == changed else "sample" for number in range(len(roles))]  # of the same length
        chat = [
            {"role": role, "content": f"{word} {n}"} for n, (role, word) in enumerate(zip(roles, words, strict=True))
        ]
        return hf.apply_chat_template(_in_form(chat, in_parts), tokenize=False)

    try:
        plain = prompt(-1)
        if in_parts and any(printed in plain for printed in _PRINTED):
            return 0
        return sum(prompt(number) != plain for number in range(len(roles)))
    except Exception as error:  # noqa: BLE001  a program that may want other messages than these
        logger.debug("the chat template refuses %s: %s: %s", roles, type(error).__name__, error)
        return 0
