"""DBRX: the weights of all experts of a layer are three matrices, one expert's rows after another's.

transformers (models/dbrx): expert e owns the rows e*I to (e+1)*I of w1 (gate), v1 (up) and w2 (down, transposed). The
checkpoint's matrices are split into one tensor per expert, so that a rank reads its own experts' rows alone.
"""

from __future__ import annotations

from typing import Any

from epruntime.models.families.experts import InterfaceExperts, modules_of, parameter
from epruntime.models.families.layout import Layout


def adapt(model: Any, _: Any) -> Layout:
    num_experts = 0
    for name, old in modules_of(model, "DbrxExperts"):
        num_experts = int(old.num_experts)
        size = (int(old.ffn_hidden_size), int(old.hidden_size))
        gate_up = parameter(old.mlp.w1, num_experts, 2 * size[0], size[1])
        down = parameter(old.mlp.w2, num_experts, *size)
        model.set_submodule(name, InterfaceExperts(gate_up, down, old.mlp.activation_fn, down_transposed=True))
    return Layout(
        stacked={
            "experts.gate_up_proj": ("experts.mlp.*.w1", "experts.mlp.*.v1"),
            "experts.down_proj": ("experts.mlp.*.w2",),
        },
        split={f"experts.mlp.{matrix}": f"experts.mlp.*.{matrix}" for matrix in ("w1", "v1", "w2")},
        num_experts=num_experts,
    )
