"""The form in which a chat template reads messages: whose text as a list of parts, and under which role.

small conversations, marked -> each choice of roles in parts -> the one that shows most -> other roles -> developer

Most templates want contents as strings; those of some multimodal models go over a list of parts, of all messages or of
some roles', and would drop a string without a word.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from epruntime.engine import template_marks
from epruntime.engine.time_limit import Overdue, time_limit

logger = logging.getLogger("epruntime.engine.tokenizer")

#: Roles of the conversations that a template is tried with; a template may refuse some of these.
_ROLES = ("system", "user", "assistant")
_CONVERSATIONS = (("user",), ("system", "user"), ("user", "assistant", "user"), ("system", "user", "assistant", "user"))
_DEVELOPER = "developer"
#: stands for every role that has no name here
_OTHER = "other"
#: Where further roles are tried. Templates may refuse them, or show nothing of them.
_FURTHER = {
    _DEVELOPER: ((_DEVELOPER, "user"), ("system", _DEVELOPER, "user")),
    "tool": (("user", "assistant", "tool"), ("system", "user", "assistant", "tool")),
    _OTHER: ((_OTHER, "user"), ("user", "assistant", _OTHER)),
}


@dataclass(frozen=True, kw_only=True)
class Form:
    """How a template is given messages.

    Attributes:
        in_parts: roles whose text is a list of one part of type text, and not a string.
        developer: the role of the developer's messages.
        alters_texts: no mark comes out, and texts do count: marks cannot tell what this template shows.
    """

    in_parts: frozenset[str] = frozenset()
    developer: str = _DEVELOPER
    alters_texts: bool = False

    def given(self, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """The messages, whose contents are strings, as the template gets them."""
        return [self._given(message) for message in messages]

    def role(self, role: str) -> str:
        return self.developer if role == _DEVELOPER else role

    def _given(self, message: dict[str, Any]) -> dict[str, Any]:
        role, content = self.role(message["role"]), message["content"]
        known = role if role in _ROLES or role in _FURTHER else _OTHER
        if known in self.in_parts:
            content = [{"type": "text", "text": content}]
        return {**message, "role": role, "content": content}


def read(hf: Any, limit_s: float) -> Form:
    """The form by which most texts of small conversations are in the prompt; strings first.

    Args:
        limit_s: after that many seconds it is what has been found.
    """
    form, most = Form(), 0
    choices = (frozenset(roles) for count in (0, 3, 1, 2) for roles in itertools.combinations(_ROLES, count))
    try:
        with time_limit(limit_s):
            for choice in (Form(in_parts=roles) for roles in choices):
                num = sum(len(_shown(hf, choice, roles)) for roles in _CONVERSATIONS)
                if num > most:
                    form, most = choice, num
                if most == sum(map(len, _CONVERSATIONS)):
                    break
            for role in _FURTHER:
                form = _with_further(hf, form, role)
            if most == 0 and _alters_texts(hf):
                logger.warning("the chat template alters texts: what it shows of a message is not looked at")
                return dataclasses.replace(form, alters_texts=True)
    except Overdue:
        logger.warning("the chat template takes long for small conversations: it may not end for some")
    if most == 0:
        logger.warning("the chat template shows no text of small conversations, in whatever form it is given")
    return form


def _with_further(hf: Any, form: Form, role: str) -> Form:
    """The form with what is found of one more role. The developer may be the system, as in OpenAI's interface."""
    in_parts = dataclasses.replace(form, in_parts=form.in_parts | {role})
    as_string, as_parts = _times_shown(hf, form, role), _times_shown(hf, in_parts, role)
    if as_string or as_parts:
        return in_parts if as_parts > as_string else form
    if role == _DEVELOPER and 0 in _shown(hf, form, ("system", "user")):
        logger.info("the chat template does not know the role 'developer': it is given such messages as 'system'")
        return dataclasses.replace(form, developer="system")
    return in_parts if form.in_parts.issuperset(_ROLES) else form


def _times_shown(hf: Any, form: Form, role: str) -> int:
    return sum(roles.index(role) in _shown(hf, form, roles) for roles in _FURTHER[role])


def _shown(hf: Any, form: Form, roles: Sequence[str]) -> set[int]:
    """Numbers of the messages whose text the template shows; none if it refuses the conversation."""
    given = form.given(template_marks.marked([{"role": role, "content": "text"} for role in roles]))
    try:
        return template_marks.shown(hf.apply_chat_template(given, tokenize=False), given)
    except Exception as error:  # noqa: BLE001  a program that may want other messages than these
        logger.debug("the chat template refuses %s: %s: %s", roles, type(error).__name__, error)
        return set()


def _alters_texts(hf: Any) -> bool:
    """Whether a prompt changes with a user's text, and with nothing else."""
    chats = [[{"role": "user", "content": text}] for text in ("simple", "sample", "simple")]
    try:
        one, other, again = (hf.apply_chat_template(chat, tokenize=False) for chat in chats)
    except Exception as error:  # noqa: BLE001  a program that may want other messages than these
        logger.debug("the chat template refuses a user's text: %s: %s", type(error).__name__, error)
        return False
    return bool(one == again != other)
