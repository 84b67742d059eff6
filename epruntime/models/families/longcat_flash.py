"""LongCat-Flash: some experts are the identity. Those are computed where the token is, and never dispatched.

Its router knows E routed experts and Z that return their input (transformers, models/longcat_flash). Ids from E on are
marked "not routed" for the exchange, and their share of the token is added here.
"""

from __future__ import annotations

import re
from typing import Any

import torch

from epruntime.models.families.experts import InterfaceExperts, modules_of, parameter
from epruntime.models.families.layout import Layout

_EXPERT = re.compile(r"\.mlp\.experts\.(\d+)\.")


class _WithIdentities(InterfaceExperts):
    def forward(self, x: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
        routed_TK = ids_TK < self.num_experts
        y = super().forward(x, ids_TK.masked_fill(~routed_TK, -1), weights_TK)
        share_T = torch.zeros_like(weights_TK[:, 0], dtype=torch.float32)
        for k in range(weights_TK.shape[1]):  # in k order, so that the bits do not depend on how many rows there are
            share_T = share_T + weights_TK[:, k].float().masked_fill(routed_TK[:, k], 0.0)
        return y + (x.float() * share_T.view(*x.shape[:-1], 1)).to(x.dtype)


def adapt(model: Any, config: Any) -> Layout:
    """transformers keeps a gate and up projection for identity experts, too, which nothing reads: it is left out.

    Published checkpoints hold a tensor per expert; the library's own layout holds those of all in one (`padded`).
    """
    num_experts = int(config.n_routed_experts)
    rows = num_experts + int(config.zero_expert_num or 0)
    for name, old in modules_of(model, "LongcatFlashExperts"):
        gate_up = parameter(old.gate_up_proj, num_experts, *old.gate_up_proj.shape[1:])
        model.set_submodule(name, _WithIdentities(gate_up, old.down_proj, old.act_fn))

    def unused(key: str) -> bool:
        match = _EXPERT.search(key)
        return match is not None and int(match[1]) >= num_experts

    return Layout(unused=unused, padded={".mlp.experts.gate_up_proj": (rows, num_experts)})
