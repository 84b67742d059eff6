"""Marks: words in the place of texts, by which a prompt tells what of its messages a chat template shows.

messages -> marked -> the template -> shown (numbers of the messages whose mark is in the prompt)

They are digits, which come through what templates do to a text: it is stripped, changed in case, written as JSON.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

_PREFIX = "604071"
#: the first group: how a list of parts comes out where it is printed like a string
_MARK = re.compile(rf"""(text\\?['"]\s*:\s*\\?['"])?{_PREFIX}(\d{{7}})""", re.IGNORECASE)


def marked(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with a mark for each text; blank ones stay, as templates may leave them out."""
    return [
        {**one, "content": f"{_PREFIX}{number:07}"} if one["content"].strip() else one
        for number, one in enumerate(messages)
    ]


def shown(prompt: str, given: Sequence[dict[str, Any]]) -> set[int]:
    """Numbers of the marked messages whose texts are in the prompt.

    Args:
        given: the messages as the template got them. A list of parts that is printed does not show its text.
    """
    found = ((bool(printed), int(number)) for printed, number in _MARK.findall(prompt))
    return {
        number
        for printed, number in found
        if number < len(given) and not (printed and isinstance(given[number]["content"], list))
    }
