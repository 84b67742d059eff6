"""A stand-in for the MoE runtime that only keeps what a load hands to it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from epruntime.moe.types import ExpertWeights, StepContext


class Holder:
    """Keeps the weights of any choice of local experts, by layer; computes nothing."""

    def __init__(self, local: Sequence[int]) -> None:
        self.context = StepContext()
        self.local = tuple(local)
        self.weights: dict[int, ExpertWeights] = {}

    def local_experts(self, num_experts: int) -> tuple[int, ...]:
        return self.local

    def make_layer(self, layer_index: int, num_experts: int, weights: ExpertWeights) -> Holder:
        self.weights[layer_index] = weights
        return self

    def forward(self, x_TH: torch.Tensor, topk_ids_TK: torch.Tensor, topk_weights_TK: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError("weights are held here, not used")
