"""Fields of published config.json files that some supported versions of transformers leave unread.

They then compute something else than the model was made with, without a word. What was read tells, in any version.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import transformers

from epruntime.errors import UnsupportedModelError

#: (model_type, field) -> the value of the field by which the configuration that transformers read computes.
_COMPUTED_BY: dict[tuple[str, str], Callable[[Any], float]] = {
    ("gpt_oss", "swiglu_alpha"): lambda config: _declared(config, "swiglu_alpha", 1.702),
    ("gpt_oss", "swiglu_limit"): lambda config: _declared(config, "swiglu_limit", 7.0),
    ("mimo_v2_flash", "sliding_window_size"): lambda config: (config.sliding_window or 0) - 1,
    ("minimax_m2", "rotary_dim"): lambda config: config.head_dim * _rotary_share(config),
}


def check_all_read(path: Path, config: Any, raw: Mapping[str, Any]) -> None:
    """Refuses a checkpoint of which the installed transformers leaves a field unread.

    Args:
        config: of the checkpoint, as transformers reads it.
        raw: config.json as it is written.

    Raises:
        UnsupportedModelError: names the field, its value, and the one that would count.
    """
    for (model_type, field), computed_by in _COMPUTED_BY.items():
        if config.model_type != model_type or raw.get(field) is None:
            continue
        counts = computed_by(config)
        if raw[field] != counts:
            raise UnsupportedModelError(
                f"{path}: config.json says {field}={raw[field]!r}, and transformers {transformers.__version__} "
                f"computes by {counts:g}: it does not read this field of a {model_type}, or another field contradicts "
                "it. A newer version may read it"
            )


def _rotary_share(config: Any) -> float:
    parameters = getattr(config, "rope_parameters", None) or {}
    return float(parameters.get("partial_rotary_factor", 1.0))


def _declared(config: Any, field: str, otherwise: float) -> float:
    """A configuration keeps as attributes also what its class does not know."""
    return float(getattr(config, field)) if hasattr(type(config), field) else otherwise
