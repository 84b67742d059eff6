"""torch.nn.functional.grouped_mm: one call for all experts of a projection."""

from __future__ import annotations

import torch

from epruntime.comm.transport import Support
from epruntime.moe.experts.base import ExpertsBackend
from epruntime.moe.types import ExpertWeights

_DTYPES = (torch.float32, torch.bfloat16)


class GroupedMMExperts(ExpertsBackend):
    name = "grouped_mm"

    @classmethod
    def supports(cls, weights: ExpertWeights, *, strict: bool) -> Support:
        if strict:
            return Support(
                ok=False, reason="invariance=strict: its kernel, and a row's bits, depend on how many rows a group has"
            )
        if not hasattr(torch.nn.functional, "grouped_mm"):
            return Support(ok=False, reason=f"torch {torch.__version__} has no grouped_mm")
        for label, tensor in (("up", weights.up_SIH), ("down", weights.down_SHI)):
            if tensor.dtype not in _DTYPES or (tensor.is_cuda and tensor.dtype is not torch.bfloat16):
                return Support(ok=False, reason=f"{label} weights are {tensor.dtype} on {tensor.device.type}")
            if not tensor.is_contiguous():
                return Support(ok=False, reason=f"{label} weights are strided {tuple(tensor.stride())}, not contiguous")
        # Rows and weights must be strided in multiples of 16 bytes, in every operand.
        for label, columns in (
            ("hidden size", weights.up_matrix.shape[1]),
            ("up columns", weights.up_matrix.shape[2]),
            ("intermediate size", weights.intermediate_size),
        ):
            if columns * weights.up_SIH.dtype.itemsize % 16:
                return Support(
                    ok=False,
                    reason=f"{label} {columns} x {weights.up_SIH.dtype.itemsize} bytes is not a multiple of 16 bytes",
                )
        return Support(ok=True)

    def linear(self, x_MI: torch.Tensor, matrix_SIO: torch.Tensor, ends_S: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.grouped_mm(x_MI, matrix_SIO, offs=ends_S)
