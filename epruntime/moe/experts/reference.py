"""The reference backend: a plain loop over the experts that have rows. Runs everywhere."""

from __future__ import annotations

import torch

from epruntime.comm.transport import Support
from epruntime.moe.experts.base import ExpertsBackend, dtype_support
from epruntime.moe.types import ExpertWeights
from epruntime.ops.gemm import matmul


class ReferenceExperts(ExpertsBackend):
    name = "reference"

    @classmethod
    def supports(cls, weights: ExpertWeights, *, strict: bool) -> Support:
        return dtype_support(weights)

    def linear(self, x_MI: torch.Tensor, matrix_SIO: torch.Tensor, ends_S: torch.Tensor) -> torch.Tensor:
        out_MO = torch.empty(x_MI.shape[0], matrix_SIO.shape[2], dtype=x_MI.dtype, device=x_MI.device)
        start = 0
        for slot, end in enumerate(ends_S.tolist()):
            if end > start:
                out_MO[start:end] = matmul(x_MI[start:end], matrix_SIO[slot])
            start = end
        return out_MO
