"""Step 3.7: experts are of the interface's form, and their forward does not go through it. They clamp gate and up."""

from __future__ import annotations

from typing import Any

from epruntime.models.families.experts import InterfaceExperts, modules_of
from epruntime.models.families.layout import Layout


def adapt(model: Any, config: Any) -> Layout:
    if "sparse" not in config.mlp_layer_types:
        return Layout()  # a model with experts in no layer is refused where those of all families are
    for name, old in modules_of(model, "Step3p7Experts"):
        new = InterfaceExperts(old.gate_up_proj, old.down_proj, old.act_fn)
        object.__setattr__(new, "_apply_gate", old._apply_gate)
        model.set_submodule(name, new)
    return Layout()
