"""Our own grouped product: one call for all experts of a projection, rows of a group neither padded nor copied."""

from __future__ import annotations

import torch

from epruntime.comm.transport import Support
from epruntime.moe.experts.base import ExpertsBackend, dtype_support
from epruntime.moe.types import ExpertWeights
from epruntime.ops.extension import load, why_absent
from epruntime.ops.gemm import grouped_matmul


class NativeExperts(ExpertsBackend):
    name = "native"

    @classmethod
    def supports(cls, weights: ExpertWeights, *, strict: bool) -> Support:
        if load() is None:
            return Support(ok=False, reason=f"the C++ kernels are absent: {why_absent()}")
        if (device := weights.up_SIH.device.type) != "cpu":
            return Support(ok=False, reason=f"weights are on {device}, not on cpu")
        return dtype_support(weights)

    def linear(self, x_MI: torch.Tensor, matrix_SIO: torch.Tensor, ends_S: torch.Tensor) -> torch.Tensor:
        return grouped_matmul(x_MI, matrix_SIO, ends_S)
