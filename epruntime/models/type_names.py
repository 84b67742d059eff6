"""What people call a type: by its own name in another spelling, by its class, or by a published model.

name -> letters | class -> the type that is meant; otherwise leading words | likeness -> what helps

A published model's name only hints at its type, which its config.json says: such a type is suggested, never taken.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from difflib import get_close_matches

from transformers import CONFIG_MAPPING

from epruntime.models import survey
from epruntime.models.upcycle_config import LLAMA_LIKE

_HEADS = re.compile("for(causallm|conditionalgeneration)$")
_BETWEEN_WORDS = re.compile(r"[-_.\s]+")
_LIKENESS = 0.8


def type_of(name: str, candidates: Sequence[str]) -> str | None:
    """Which of the survey's candidates a name means, whatever its capitals and hyphens; None if it means none."""
    types = {_letters(model_type): model_type for model_type in candidates}
    letters = _letters(name)
    if found := types.get(letters) or types.get(_HEADS.sub("", letters)):
        return found
    of_class = (t for t in types.values() if letters in map(_letters, survey.classes_of(t)))
    return next(of_class, None)


def help_with(name: str, candidates: Sequence[str]) -> str:
    """What to say of a name of which the survey has no verdict: the type that it may mean, or that one has no experts.

    "" where nothing is known.
    """
    if (model_type := type_of(name, candidates)) is not None:
        return f"the configuration of {model_type} counts experts, but a small model of it has none"
    types = {_letters(model_type): model_type for model_type in candidates}
    others = {_letters(model_type): model_type for model_type in CONFIG_MAPPING if model_type not in types.values()}
    words = _BETWEEN_WORDS.split(name.rpartition("/")[2].lower())
    beginnings = [_HEADS.sub("", "".join(words[:count])) for count in range(len(words), 0, -1)]
    # families name what has experts by this word, and published models often do not: Qwen3-30B-A3B is a qwen3_moe
    meant = (types.get(letters) or types.get(f"{letters}moe") for letters in beginnings)
    if suggested := next(filter(None, meant), None):
        return f"did you mean {suggested}?"
    if other := next((others[letters] for letters in beginnings if letters in others), None):
        return _without_experts(other)
    near = get_close_matches(_letters(name), types, n=1, cutoff=_LIKENESS)
    return f"did you mean {types[near[0]]}?" if near else ""


def _without_experts(model_type: str) -> str:
    if not survey.classes_of(model_type):
        return f"{model_type} is a type that transformers knows, and generates no text by itself"
    more = "; `epruntime upcycle` makes a Mixture-of-Experts model of it" if model_type in LLAMA_LIKE else ""
    return f"{model_type} is a type that transformers knows, and has no experts{more}"


def _letters(name: str) -> str:
    return _BETWEEN_WORDS.sub("", name.lower())
