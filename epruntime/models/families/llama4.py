"""Llama 4: the router's weight scales the input of an expert rather than its output; queries have a temperature.

transformers (models/llama4) computes every expert on every token, most of them on zeros. Here the same weights select:
y = sum over k of expert_k(sigmoid(logit_k) x). Layers without rotary embedding scale queries by the place of a token
in the batch; served, it must be the place in its sequence, so the attention layer does it (`temperatures`).
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch

from epruntime.models.families.experts import InterfaceExperts, modules_of
from epruntime.models.families.layout import Layout
from epruntime.models.rope import longest_sequence

#: Attribute of an attention module: fp32 [N], the factor on the queries by floor((position + 1) / floor_scale).
TEMPERATURES, FLOOR_SCALE = "_epruntime_temperatures", "floor_scale"


def _moe_forward(block: Any, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x_TH = hidden_states.reshape(-1, block.hidden_dim)
    scores_TE, logits_TE = block.router(x_TH)
    ids_TK = torch.topk(logits_TE, block.top_k, dim=1)[1]  # the call by which the router made its scores
    scores_TK = scores_TE.gather(1, ids_TK)
    out_TH = block.shared_expert(x_TH)
    one_T1 = torch.ones_like(scores_TK[:, :1], dtype=torch.float32)
    routed_TH: torch.Tensor | None = None
    for k in range(block.top_k):
        y_TH = block.experts(x_TH * scores_TK[:, k : k + 1], ids_TK[:, k : k + 1], one_T1)
        routed_TH = y_TH if routed_TH is None else routed_TH + y_TH
    return out_TH.add_(routed_TH), logits_TE


def adapt(model: Any, config: Any) -> Layout:
    if not config.moe_layers:
        return Layout()  # a model with experts in no layer is refused where those of all families are
    for name, old in modules_of(model, "Llama4TextExperts"):
        model.set_submodule(name, InterfaceExperts(old.gate_up_proj, old.down_proj, old.act_fn, transposed=True))
    for _, block in modules_of(model, "Llama4TextMoe"):
        block.forward = MethodType(_moe_forward, block)
        block.experts.calls_per_forward = int(block.top_k)
    for _, attention in modules_of(model, "Llama4TextAttention"):
        if attention.attn_temperature_tuning and not attention.use_rope:
            attention.attn_temperature_tuning = False
            object.__setattr__(attention, TEMPERATURES, temperatures(attention, config))
    return Layout()


def temperatures(attention: Any, config: Any) -> torch.Tensor:
    """log1p(n) * attn_scale + 1 for every n that a position can have.

    Computed once: the same position has the same factor, to the bit, in whatever batch it is.
    """
    most = int(longest_sequence(config) // attention.floor_scale) + 2
    with torch.device("cpu"):
        return torch.log1p(torch.arange(most, dtype=torch.float32)) * attention.attn_scale + 1.0
