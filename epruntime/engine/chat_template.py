"""Chat templates: programs that came with a model and make a prompt of messages.

where one lies -> check (is it one, does it end) -> template_form.read (how it wants messages) -> render

Templates skip messages whose role or place they do not know, without a word. Here none is lost: a second rendering, of
marks in the place of texts, tells what is shown (template_marks.py), and what is not is refused.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from epruntime.engine import template_marks
from epruntime.engine.template_form import Form
from epruntime.engine.time_limit import Overdue, time_limit
from epruntime.errors import CheckpointError, ConfigError, InvalidRequestError

logger = logging.getLogger("epruntime.engine.tokenizer")

#: Seconds that a template gets; thousands of messages take some hundredths.
TEMPLATE_S = 3.0
#: Where processors of multimodal models kept theirs before templates had a file of their own.
PROCESSOR_FILE = "chat_template.json"


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


def render(hf: Any, messages: Sequence[dict[str, Any]], keywords: dict[str, Any], *, form: Form) -> str:
    """The prompt that the template makes of messages whose contents are strings.

    Args:
        form: how it wants them.

    Raises:
        InvalidRequestError: it refuses the messages, does not end with them, or shows nothing of one that is not blank.
    """

    def prompt(given: list[dict[str, Any]]) -> str:
        text: str = hf.apply_chat_template(given, tokenize=False, add_generation_prompt=True, **keywords)
        return text

    text, marked, shown = None, form.given(template_marks.marked(messages)), None
    try:
        with time_limit(TEMPLATE_S):
            text = prompt(form.given(messages))
            if not form.alters_texts:
                shown = template_marks.shown(prompt(marked), marked)
    except Overdue:
        if text is None:
            raise InvalidRequestError(
                f"the chat template did not end with these messages within {TEMPLATE_S:g} s: it loops, or they are far "
                "too many",
                field="messages",
            ) from None
        logger.warning("a chat was taken unchecked: no time was left to see whether all messages are in its prompt")
    except Exception as error:  # the template is a program that came with the model, and raises what it likes
        if text is None:
            raise InvalidRequestError(f"the chat template refuses these messages: {error}", field="messages") from error
        logger.debug("the chat template refuses marks, so what it shows is not known", exc_info=True)
    if shown is not None:
        _check_all_shown(messages, shown, form)
    return text


def _check_all_shown(messages: Sequence[dict[str, Any]], shown: set[int], form: Form) -> None:
    for number, message in enumerate(messages):
        if number in shown or not message["content"].strip():
            continue
        role = message["role"]
        known = "" if form.role(role) == role else f" (it is given to it as {form.role(role)!r})"
        raise InvalidRequestError(
            f"the model's chat template shows nothing of a message with this role in this place{known}: leave it out, "
            "or send its text in another role or place",
            field=f"messages.{number}.role",
            value=role,
        )
