"""Fields of published config.json files that some supported versions of transformers leave unread.

They then compute something else than the model was made with, without a word. What was read tells, in any version.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import transformers

from epruntime.errors import UnsupportedModelError

#: (model_type, field) -> the value of the field by which the configuration that transformers read computes.
_COMPUTED_BY: dict[tuple[str, str], Callable[[Any], Any]] = {
    ("gpt_oss", "swiglu_alpha"): lambda config: _declared(config, "swiglu_alpha", 1.702),
    ("gpt_oss", "swiglu_limit"): lambda config: _declared(config, "swiglu_limit", 7.0),
    ("mimo_v2_flash", "add_full_attention_sink_bias"): lambda config: False,
    ("mimo_v2_flash", "add_swa_attention_sink_bias"): lambda config: True,
    ("mimo_v2_flash", "hybrid_layer_pattern"): lambda config: _marks(config.layer_types, "sliding_attention"),
    ("mimo_v2_flash", "layernorm_epsilon"): lambda config: config.rms_norm_eps,
    ("mimo_v2_flash", "moe_layer_freq"): lambda config: _marks(config.mlp_layer_types, "sparse"),
    ("mimo_v2_flash", "partial_rotary_factor"): lambda config: _rope(config, "full", "partial_rotary_factor"),
    ("mimo_v2_flash", "rope_theta"): lambda config: _rope(config, "full", "rope_theta"),
    ("mimo_v2_flash", "sliding_window_size"): lambda config: (config.sliding_window or 0) - 1,
    ("mimo_v2_flash", "swa_rope_theta"): lambda config: _rope(config, "sliding", "rope_theta"),
    ("minimax_m2", "rotary_dim"): lambda config: int(config.head_dim * _rotary_share(config)),
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
                f"computes by {counts}: it does not read this field of a {model_type}, or another field contradicts "
                "it. A newer version may read it"
            )


def _rotary_share(config: Any) -> float:
    parameters = getattr(config, "rope_parameters", None) or {}
    return float(parameters.get("partial_rotary_factor", 1.0))


def _rope(config: Any, kind: str, field: str) -> float:
    return float(config.rope_parameters[f"{kind}_attention"][field])


def _marks(types: Sequence[str], marked: str) -> list[int]:
    return [int(kind == marked) for kind in types]


def _declared(config: Any, field: str, otherwise: float) -> float:
    """A configuration keeps as attributes also what its class does not know."""
    return float(getattr(config, field)) if hasattr(type(config), field) else otherwise
