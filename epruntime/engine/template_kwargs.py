"""Keywords that a request gives the chat template (`enable_thinking` and the like): which ones, and how much."""

from __future__ import annotations

import inspect
import json
from typing import Any

from epruntime.errors import InvalidRequestError

FIELD = "chat_template_kwargs"
MAX_KEYWORDS = 64
#: characters of all of them, as JSON
MAX_CHARACTERS = 2**16
#: what transformers and Jinja name themselves on the way to the template
_ON_THE_WAY = ("self", "conversations", "messages")


def checked(given: Any, hf: Any) -> dict[str, Any]:
    """The keywords; {} where none are given.

    Args:
        hf: the transformers tokenizer that renders.

    Raises:
        InvalidRequestError: no object of JSON, too large, or a keyword that is not the client's; names it.
    """
    if given is None:
        return {}
    if not isinstance(given, dict) or not all(isinstance(name, str) for name in given):
        raise InvalidRequestError("must be an object, from keywords to values", field=FIELD, value=given)
    if len(given) > MAX_KEYWORDS:
        raise InvalidRequestError(f"at most {MAX_KEYWORDS} are taken", field=FIELD, value=f"{len(given)} of them")
    for name in sorted(given.keys() & reserved(hf)):
        raise InvalidRequestError("is set by this server: leave it out", field=f"{FIELD}.{name}")
    try:
        size = len(json.dumps(given, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequestError(f"holds what JSON has not: {error}", field=FIELD) from error
    if size > MAX_CHARACTERS:
        raise InvalidRequestError(
            f"at most {MAX_CHARACTERS} characters of JSON are taken", field=FIELD, value=f"{size} characters"
        )
    return given


def reserved(hf: Any) -> set[str]:
    """Arguments of `apply_chat_template` itself, which this server sets or leaves alone, and the special tokens."""
    own = inspect.signature(hf.apply_chat_template).parameters.values()
    return {*_ON_THE_WAY, *hf.special_tokens_map, *(p.name for p in own if p.kind is not p.VAR_KEYWORD)}
