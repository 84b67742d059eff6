"""End-of-sequence ids of a checkpoint: those that its files name, and where none does, those of transformers.

generation_config.json | config.json: its outermost part that names some | `generate`'s own for a part -> joined
none -> the default of transformers' configuration class
-> those that the model has logits for, and words about the others

A class's default counts only there: a language model's class has one that need not be the multimodal checkpoint's.
transformers generates on past an id without logits, as epruntime does: no checkpoint is refused for one.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from epruntime.errors import CheckpointError
from epruntime.models import generation_config, text_part
from epruntime.models.adapter import as_ids

_FIELD = "eos_token_id"


@dataclass(frozen=True, kw_only=True)
class EndIds:
    """What ends an output.

    Attributes:
        ids: token ids of the vocabulary, ascending.
        warning: which others are named, and where, for the log; "" if none are.
    """

    ids: tuple[int, ...]
    warning: str


def end_ids(config: Any, raw: Mapping[str, Any], of_generation: Sequence[int]) -> EndIds:
    """The ids that a checkpoint's outputs end at.

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
    found = {
        "config.json": named,
        generation_config.FILE: of_generation,
        "transformers' generate": _of_generate(config),
    }
    if not any(found.values()):
        defaults = (getattr(part, _FIELD, None) for part, _ in parts)
        default = as_ids(next((default for default in defaults if default is not None), None))
        found = {f"transformers' {type(config).__name__}, by default,": default}
    vocab_size = int(text_part.language_config(config).vocab_size)
    ids = sorted({token for tokens in found.values() for token in tokens if 0 <= token < vocab_size})
    return EndIds(ids=tuple(ids), warning=_words(found, ids, vocab_size))


def _words(found: Mapping[str, Sequence[int]], ids: Sequence[int], vocab_size: int) -> str:
    beyond = {where: [token for token in tokens if not 0 <= token < vocab_size] for where, tokens in found.items()}
    named = "; ".join(
        f"{where} names {_FIELD} {', '.join(map(str, beyond[where]))}" for where in found if beyond[where]
    )
    if not named:
        return ""
    never = f"{named}, but vocab_size={vocab_size}: ids go from 0 to {vocab_size - 1}, and others can never be sampled"
    if ids:
        return f"{never}; outputs end at {', '.join(map(str, ids))}"
    return (
        f"no output ends by itself, since no end-of-sequence id is within the model's vocabulary: {never}. Outputs go "
        "on to max_tokens, or as long as there is room, unless a request has stop or stop_token_ids: put the "
        f"{_FIELD} of this vocabulary into {generation_config.FILE}"
    )


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
    """Ids that stand in no file: the default of the whole model's `generate`, by the name of the part that writes.

    Nobody chose them for a smaller vocabulary: ids beyond it are left out without a word.
    """
    if text_part.writing_config(config) is config:
        return []
    part = text_part.language_field(type(config)).removesuffix("_config")
    argument = inspect.signature(text_part.whole_class(config).generate).parameters.get(f"{part}_{_FIELD}")
    named = as_ids(argument.default) if argument is not None else []
    vocab_size = text_part.language_config(config).vocab_size
    return [token for token in named if type(token) is int and token < vocab_size]
