"""Words for numbers, for messages to people."""

from __future__ import annotations


def counted(number: int, noun: str, plural: str = "") -> str:
    """`1 token`, `2 tokens`; `plural` where it is not the noun with an s."""
    return f"{number} {noun if number == 1 else plural or noun + 's'}"
