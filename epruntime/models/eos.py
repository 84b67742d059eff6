"""End-of-sequence ids of a checkpoint: those that its files name, and where none does, those of transformers.

generation_config.json | config.json: its outermost part that names some | `generate`'s own for a part -> joined
none -> the default of transformers' configuration class

A class's default counts only there: a language model's class has one that need not be the multimodal checkpoint's.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from epruntime.errors import CheckpointError
from epruntime.models import text_part
from epruntime.models.adapter import as_ids

_FIELD = "eos_token_id"


def eos_token_ids(config: Any, raw: Mapping[str, Any], of_generation: Sequence[int]) -> tuple[int, ...]:
    """The ids, ascending.

    Args:
        config: of the checkpoint, as transformers reads it.
        raw: config.json as it is written.
        of_generation: what generation_config.json names.

    Raises:
        CheckpointError: config.json names what is no token id.
    """
    parts = list(_parts(config, raw))
    named = next((as_ids(getattr(part, _FIELD)) for part, written in parts if written.get(_FIELD) is not None), [])
    if not all(type(token) is int for token in named):
        raise CheckpointError(f"config.json: {_FIELD} is {named!r}, not a token id or a list of them")
    found = {*named, *of_generation, *_of_generate(config)}
    if not found:
        defaults = (getattr(part, _FIELD, None) for part, _ in parts)
        found = set(as_ids(next((default for default in defaults if default is not None), None)))
    return tuple(sorted(found))


def _parts(config: Any, raw: Mapping[str, Any]) -> Iterator[tuple[Any, Mapping[str, Any]]]:
    """A configuration and those within it that lead to the language model's, each with what is written of it."""
    yield config, raw
    if not text_part.is_multimodal(config):
        return
    field = text_part.language_field(type(config))
    # the name that some published files have for it
    inner = [raw[name] for name in (field, "language_config") if isinstance(raw.get(name), Mapping)]
    yield from _parts(getattr(config, field), inner[0] if inner else {})


def _of_generate(config: Any) -> list[int]:
    """Ids that stand in no file: the default of the whole model's `generate`, by the name of the part that writes."""
    if text_part.writing_config(config) is config:
        return []
    part = text_part.language_field(type(config)).removesuffix("_config")
    argument = inspect.signature(text_part.whole_class(config).generate).parameters.get(f"{part}_{_FIELD}")
    named = as_ids(argument.default) if argument is not None else []
    vocab_size = text_part.language_config(config).vocab_size
    return [token for token in named if type(token) is int and token < vocab_size]
