"""Registry of experts backends: a file per backend, imported when it is asked for."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from epruntime.errors import ConfigError

if TYPE_CHECKING:
    from epruntime.moe.experts.base import ExpertsBackend
    from epruntime.moe.types import ExpertWeights

logger = logging.getLogger("epruntime.moe.experts")


def _native() -> type[ExpertsBackend]:
    from epruntime.moe.experts.native import NativeExperts

    return NativeExperts


def _grouped_mm() -> type[ExpertsBackend]:
    from epruntime.moe.experts.grouped_mm import GroupedMMExperts

    return GroupedMMExperts


def _reference() -> type[ExpertsBackend]:
    from epruntime.moe.experts.reference import ReferenceExperts

    return ReferenceExperts


#: name -> lazy import of the class, best first. A new backend adds one line here.
BACKENDS: dict[str, Callable[[], type[ExpertsBackend]]] = {
    "native": _native,
    "grouped_mm": _grouped_mm,
    "reference": _reference,
}


def select_backend(name: str, weights: ExpertWeights, *, strict: bool) -> ExpertsBackend:
    """Makes the backend `name`, or with "auto" the first of `BACKENDS` that supports these weights.

    Args:
        strict: a row's bits must depend on that row alone.

    Raises:
        ConfigError: an unknown name, or a named backend that does not support the weights, with its reason.
    """
    if name != "auto" and name not in BACKENDS:
        raise ConfigError(f"experts_backend={name!r}: must be auto or one of {', '.join(BACKENDS)}")
    passed_over: list[str] = []
    for candidate in BACKENDS if name == "auto" else (name,):
        kind = BACKENDS[candidate]()
        support = kind.supports(weights, strict=strict)
        if support.ok:
            logger.debug("experts backend %s%s", candidate, "".join(f"; not {reason}" for reason in passed_over))
            return kind()
        passed_over.append(f"{candidate}: {support.reason}")
    raise ConfigError(
        f"experts_backend={name!r} cannot compute this model's experts: "
        + "; ".join(passed_over)
        + '; use experts_backend="auto" or "reference"'
    )
