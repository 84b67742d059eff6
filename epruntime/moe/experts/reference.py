"""The reference backend: a plain loop over the experts that have rows. Runs everywhere."""

from __future__ import annotations

import torch

from epruntime.comm.transport import Support
from epruntime.moe.experts.base import ExpertsBackend
from epruntime.moe.types import ExpertWeights


class ReferenceExperts(ExpertsBackend):
    name = "reference"

    @classmethod
    def supports(cls, weights: ExpertWeights) -> Support:
        return Support(ok=True)

    def linear(self, x_PI: torch.Tensor, matrix_SIO: torch.Tensor, ends_S: torch.Tensor) -> torch.Tensor:
        out_PO = x_PI.new_zeros((x_PI.shape[0], matrix_SIO.shape[2]))
        start = 0
        for slot, end in enumerate(ends_S.tolist()):
            if end > start:
                torch.mm(x_PI[start:end], matrix_SIO[slot], out=out_PO[start:end])
            start = end
        return out_PO
