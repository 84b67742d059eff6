"""Chat templates: programs that came with a model and make a prompt of messages.

where one lies -> check (is it one, does it end) -> reads_parts (in which form it wants text) -> render

Contents are plain text here. Most templates want them as strings; those of some multimodal models go over a list of
parts, and would drop a string without a word.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from epruntime.engine.time_limit import Overdue, time_limit
from epruntime.errors import CheckpointError, ConfigError, InvalidRequestError

logger = logging.getLogger("epruntime.engine.tokenizer")

#: Seconds that a template gets; thousands of messages take some hundredths.
TEMPLATE_S = 3.0
#: Where processors of multimodal models kept theirs before templates had a file of their own.
PROCESSOR_FILE = "chat_template.json"
_SAMPLE = "epruntime text 4711"


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


def reads_parts(hf: Any) -> bool:
    """Does the template read text as a list of parts of type text, and not as a string?"""
    as_string = _shows(hf, _SAMPLE)
    as_parts = None if as_string else _shows(hf, _parts(_SAMPLE))
    if as_string is False and not as_parts:
        logger.warning("the chat template leaves out the text of a single user message")
    return bool(as_parts)


def render(hf: Any, messages: Sequence[dict[str, Any]], keywords: dict[str, Any], *, parts: bool) -> str:
    """The prompt that the template makes of messages whose contents are strings.

    Args:
        parts: it reads lists of parts.

    Raises:
        InvalidRequestError: it refuses the messages, or does not end with them.
    """
    given = [{**one, "content": _parts(one["content"])} for one in messages] if parts else list(messages)
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


def _parts(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]


def _shows(hf: Any, content: Any) -> bool | None:
    """Is the sample in the prompt that is made of it? None: the template refuses a single user message."""
    try:
        with time_limit(TEMPLATE_S):
            return _SAMPLE in hf.apply_chat_template([{"role": "user", "content": content}], tokenize=False)
    except Overdue:  # each request is told so
        return None
    except Exception as error:  # noqa: BLE001  a program that may want other messages than this one
        logger.debug("the chat template refuses a single user message: %s: %s", type(error).__name__, error)
        return None
