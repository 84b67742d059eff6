"""What `generate` takes: one prompt or many, and sampling parameters for all of them or for each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from epruntime.errors import InvalidRequestError
from epruntime.sampling_params import SamplingParams


def prompt_list(prompts: Any) -> tuple[list[Any], bool]:
    """One prompt or many, as a list; and whether it was one (a list of integers is one).

    Raises:
        InvalidRequestError: it can be neither.
    """
    if isinstance(prompts, (str, Mapping)):
        return [prompts], True
    try:
        items = None if isinstance(prompts, (bytes, bytearray)) else list(prompts)
    except TypeError:
        items = None
    if items is None:
        raise InvalidRequestError(
            "must be a string, a list of token ids, a dict with 'prompt', 'prompt_token_ids' or 'messages', or a list "
            "of those",
            field="prompts",
            value=prompts,
        )
    if items and all(isinstance(item, int) for item in items):
        return [items], True
    return items, False


def params_list(params: Any, count: int) -> list[SamplingParams]:
    """Parameters of each of `count` prompts: one for all, or one per prompt.

    Raises:
        InvalidRequestError: their number differs, or something else is among them.
    """
    one_each = isinstance(params, Iterable) and not isinstance(params, (str, Mapping))
    given = list(params) if one_each else [params]
    for one in given:
        if not isinstance(one, SamplingParams):
            raise InvalidRequestError(
                "must be a SamplingParams for all prompts, or a list with one for each",
                field="sampling_params",
                value=one,
            )
    if not one_each:
        return given * count
    if len(given) != count:
        raise InvalidRequestError(
            f"{count} prompts need as many sampling parameters, or one for all",
            field="sampling_params",
            value=f"{len(given)} of them",
        )
    return given
