"""The experts seam: rows in, one unweighted output row per (row, slot) out.

group (sort pairs by slot) -> up GEMM -> activation -> down GEMM -> ungroup
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from epruntime.comm.transport import Support
from epruntime.moe.types import ExpertRows, ExpertWeights
from epruntime.ops.checks import FLOATS


@dataclass(frozen=True, kw_only=True)
class GroupedRows:
    """Rows sorted by local slot, a copy of a row for each of its slots. M pairs, S slots.

    Attributes:
        x_MH: rows of slot 0, rows of slot 1, ...
        slot_M: int64, slot of each of them.
        ends_S: int32, end of each slot's group.
        place_M: int64, where pair m is among them; pairs by received row and then by k.
    """

    x_MH: torch.Tensor
    slot_M: torch.Tensor
    ends_S: torch.Tensor
    place_M: torch.Tensor


def group_rows(rows: ExpertRows, num_slots: int) -> GroupedRows:
    """Groups the pairs (row, slot >= 0) of received rows by slot; within a slot they keep their order."""
    num_choices = rows.slots_NK.shape[1]
    slot_F = rows.slots_NK.reshape(-1).long()
    pair_M = (slot_F >= 0).nonzero().squeeze(1)
    slot_M, order_M = slot_F[pair_M].sort(stable=True)
    place_M = torch.empty_like(order_M)
    place_M[order_M] = torch.arange(len(order_M), device=order_M.device)
    ends_S = torch.bincount(slot_M, minlength=num_slots).cumsum(0)
    return GroupedRows(
        x_MH=rows.x_NH[pair_M[order_M] // num_choices],
        slot_M=slot_M,
        ends_S=ends_S.to(torch.int32),
        place_M=place_M,
    )


def dtype_support(weights: ExpertWeights) -> Support:
    """Whether `ops.gemm` multiplies weights of this dtype."""
    for label, tensor in (("up", weights.up_SIH), ("down", weights.down_SHI)):
        if tensor.dtype not in FLOATS:
            return Support(ok=False, reason=f"{label} weights are {tensor.dtype}, not torch.float32 or torch.bfloat16")
    return Support(ok=True)


class ExpertsBackend(ABC):
    """Computes local experts on rows. Stateless; the weights are handed in.

    Under invariance=strict a row's bits depend on that row and its expert alone: the products must see to it
    (`supports` says no where they do not), the family's activation is made so for the whole rank.
    """

    name: str

    @classmethod
    @abstractmethod
    def supports(cls, weights: ExpertWeights, *, strict: bool) -> Support:
        """Whether this backend can compute these weights (layout, dtype, device), on this machine.

        Args:
            strict: a row's bits must depend on that row alone.
        """

    @abstractmethod
    def linear(self, x_MI: torch.Tensor, matrix_SIO: torch.Tensor, ends_S: torch.Tensor) -> torch.Tensor:
        """Rows of group s times `matrix_SIO[s]` -> [M, O]. M is the last end and above 0."""

    def forward(self, rows: ExpertRows, weights: ExpertWeights) -> torch.Tensor:
        """Applies to each received row the experts of its slots.

        Returns:
            [M, H] in the model dtype: one unweighted row per slot >= 0, by received row and then by k.
        """
        assert rows.x_NH.dtype == weights.down_SHI.dtype, (rows.x_NH.dtype, weights.down_SHI.dtype)
        groups = group_rows(rows, weights.num_slots)
        if groups.place_M.shape[0] == 0:
            return rows.x_NH.new_empty((0, rows.x_NH.shape[1]))
        h_MI = self.linear(groups.x_MH, weights.up_matrix, groups.ends_S)
        if weights.up_bias_SI is not None:
            h_MI += weights.up_bias_SI[groups.slot_M]
        y_MH = self.linear(weights.activation(h_MI), weights.down_matrix, groups.ends_S)
        if weights.down_bias_SH is not None:
            y_MH += weights.down_bias_SH[groups.slot_M]
        if weights.post is not None:
            y_MH = weights.post(y_MH)
        return y_MH[groups.place_M]
