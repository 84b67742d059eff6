"""Small random experts of every layout, and what they compute in fp64 by the plainest loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F

from epruntime.moe.types import ExpertWeights

Activation = Callable[[torch.Tensor], torch.Tensor]


def silu_gate(h: torch.Tensor) -> torch.Tensor:
    gate, up = h.chunk(2, dim=-1)
    return F.silu(gate) * up


def gelu_gate(h: torch.Tensor) -> torch.Tensor:
    gate, up = h.chunk(2, dim=-1)
    return F.gelu(gate) * up


def gelu_tanh_gate(h: torch.Tensor) -> torch.Tensor:
    gate, up = h.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


def interleaved_gate(h: torch.Tensor) -> torch.Tensor:
    """As gpt-oss: interleaved, clamped, gate * sigmoid(1.702 gate) * (up + 1)."""
    gate, up = h[..., ::2].clamp(max=7.0), h[..., 1::2].clamp(-7.0, 7.0)
    return (up + 1) * (gate * torch.sigmoid(gate * 1.702))


def relu_squared(h: torch.Tensor) -> torch.Tensor:
    return F.relu(h).square()


def tanh_exp(h: torch.Tensor) -> torch.Tensor:
    return torch.tanh(h) * torch.exp(-h.abs())


#: name -> (function, up columns / I)
ACTIVATIONS: dict[str, tuple[Activation, int]] = {
    "silu": (silu_gate, 2),
    "gelu": (gelu_gate, 2),
    "gelu_tanh": (gelu_tanh_gate, 2),
    "interleaved": (interleaved_gate, 2),
    "relu2": (relu_squared, 1),
    "tanh_exp": (tanh_exp, 1),
    "gelu_no_gate": (F.gelu, 1),
}


def rms_norm(y: torch.Tensor) -> torch.Tensor:
    return (y.float() * torch.rsqrt(y.float().pow(2).mean(-1, keepdim=True) + 1e-6)).to(y.dtype)


def random_experts(
    num_experts: int,
    hidden: int,
    inner: int,
    *,
    activation: str = "silu",
    dtype: torch.dtype = torch.float32,
    transposed: bool = False,
    bias: bool = False,
    post: bool = False,
    seed: int = 0,
) -> ExpertWeights:
    """Experts whose outputs are of order one for inputs of order one."""
    generator = torch.Generator().manual_seed(seed)
    function, fan = ACTIVATIONS[activation]

    def normal(*shape: int, scale: float) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * scale).to(dtype)

    up = normal(num_experts, fan * inner, hidden, scale=hidden**-0.5)
    down = normal(num_experts, hidden, inner, scale=inner**-0.5)
    if transposed:
        up, down = up.transpose(1, 2).contiguous(), down.transpose(1, 2).contiguous()
    return ExpertWeights(
        up_SIH=up,
        down_SHI=down,
        transposed=transposed,
        activation=function,
        post=rms_norm if post else None,
        up_bias_SI=normal(num_experts, fan * inner, scale=1) if bias else None,
        down_bias_SH=normal(num_experts, hidden, scale=1) if bias else None,
    )


def take_experts(weights: ExpertWeights, ids: Sequence[int]) -> ExpertWeights:
    """The experts `ids`, in that order: what a rank with these slots loads."""
    index = torch.tensor(list(ids), dtype=torch.int64)

    def take(x: torch.Tensor | None) -> torch.Tensor | None:
        return None if x is None else x[index]

    return replace(
        weights,
        up_SIH=weights.up_SIH[index],
        down_SHI=weights.down_SHI[index],
        up_bias_SI=take(weights.up_bias_SI),
        down_bias_SH=take(weights.down_bias_SH),
    )


def dense_row(x_H: torch.Tensor, weights: ExpertWeights, expert: int) -> torch.Tensor:
    """One row through one expert, in fp64."""
    h = x_H.double() @ weights.up_matrix[expert].double()
    if weights.up_bias_SI is not None:
        h = h + weights.up_bias_SI[expert].double()
    y = weights.activation(h[None])[0] @ weights.down_matrix[expert].double()
    if weights.down_bias_SH is not None:
        y = y + weights.down_bias_SH[expert].double()
    if weights.post is not None:
        y = y * torch.rsqrt(y.pow(2).mean() + 1e-6)
    return y


def dense_moe(
    x_TH: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor, weights: ExpertWeights
) -> torch.Tensor:
    """sum over k of weight x expert(x), in fp64, by loops over tokens and choices; id -1 adds nothing."""
    out_TH = torch.zeros(x_TH.shape, dtype=torch.float64)
    for t in range(x_TH.shape[0]):
        for k in range(ids_TK.shape[1]):
            if int(ids_TK[t, k]) >= 0:
                out_TH[t] += weights_TK[t, k].double() * dense_row(x_TH[t], weights, int(ids_TK[t, k]))
    return out_TH
