"""Families whose experts do not go through transformers' experts interface, or not all of them: small adapters put them
on it, or leave out what is not called.

module tree on the meta device -> adapt: experts modules replaced by ones of the interface's form -> probe, weights, ...

Everything after that (probe, weight plan, hooks) treats them as any other model. Routers, attention and shared
experts stay transformers' own code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from epruntime.models.families import dbrx, ernie4_5_vl_moe, llama4, longcat_flash, step3p5
from epruntime.models.families.layout import Layout

#: model_type of a language model -> what replaces modules of it, in place, by its configuration, and says how its
#: checkpoint's tensors are laid out.
_ADAPTERS: dict[str, Callable[[Any, Any], Layout]] = {
    "dbrx": dbrx.adapt,
    "ernie4_5_vl_moe_text": ernie4_5_vl_moe.adapt,
    "llama4_text": llama4.adapt,
    "longcat_flash": longcat_flash.adapt,
    "step3p5": step3p5.adapt,
}
_LAYOUT = "_epruntime_layout"


def adapt(model: Any, config: Any) -> None:
    """Puts the model's experts on the experts interface, if its family needs that.

    Args:
        config: of the language model.
    """
    adapter = _ADAPTERS.get(config.model_type)
    if adapter is not None:
        object.__setattr__(model, _LAYOUT, adapter(model, config))


def is_adapted(model_type: str) -> bool:
    """Does a family of this type have an adapter here?"""
    return model_type in _ADAPTERS


def layout_of(model: Any) -> Layout:
    """How the tensors of the model's checkpoint differ from its modules' parameters; an empty one if not at all."""
    found: Layout = getattr(model, _LAYOUT, Layout())
    return found
