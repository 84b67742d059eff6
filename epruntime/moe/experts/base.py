"""The experts seam: rows in, one unweighted output row per (row, slot) out.

group (sort pairs by slot, pad each group) -> up GEMM -> activation -> down GEMM -> ungroup
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from epruntime.comm.transport import Support
from epruntime.moe.experts.activation import apply_activation, rows_for_activation
from epruntime.moe.types import ExpertRows, ExpertWeights
from epruntime.ops.padding import padded_rows


@dataclass(frozen=True, kw_only=True)
class GroupedRows:
    """Rows sorted by local slot, each slot's group padded with zero rows. P padded rows, M pairs, S slots.

    Attributes:
        x_PH: rows of slot 0, its padding, rows of slot 1, ... and zero rows up to P.
        ends_S: int32, end of each slot's padded group; the last may be below P.
        place_M: int64, where pair m is among the P rows; pairs by received row and then by k.
    """

    x_PH: torch.Tensor
    ends_S: torch.Tensor
    place_M: torch.Tensor


def group_rows(rows: ExpertRows, weights: ExpertWeights, *, strict: bool) -> GroupedRows:
    """Groups rows by slot. `strict` pads each group so that a row's bits do not depend on the others in it."""
    num_choices = rows.slots_NK.shape[1]
    slot_F = rows.slots_NK.reshape(-1).long()
    pair_M = (slot_F >= 0).nonzero().squeeze(1)
    slot_M = slot_F[pair_M]
    count_S = torch.bincount(slot_M, minlength=weights.num_slots)
    padded_S = _padded_counts(count_S, strict=strict)
    end_S = padded_S.cumsum(0)
    sorted_slot_M, order_M = slot_M.sort(stable=True)
    # Place of the i-th sorted pair: i, moved by the padding that the groups before it have.
    shift_S = (end_S - padded_S) - (count_S.cumsum(0) - count_S)
    place_sorted_M = shift_S[sorted_slot_M] + torch.arange(slot_M.shape[0], device=slot_M.device)
    place_M = torch.empty_like(place_sorted_M).index_copy_(0, order_M, place_sorted_M)
    total = int(end_S[-1]) if weights.num_slots else 0
    num_rows = rows_for_activation(total, weights.intermediate_size) if strict else total
    x_PH = rows.x_NH.new_zeros((num_rows, rows.x_NH.shape[1]))
    x_PH.index_copy_(0, place_M, rows.x_NH[pair_M // num_choices])
    return GroupedRows(x_PH=x_PH, ends_S=end_S.to(torch.int32), place_M=place_M)


def _padded_counts(count_S: torch.Tensor, *, strict: bool) -> torch.Tensor:
    """`padded_rows` of each entry: its step is that of one row."""
    step = padded_rows(1, strict=strict)
    return (count_S + (step - 1)) // step * step


class ExpertsBackend(ABC):
    """Computes local experts on rows. Stateless; the weights are handed in."""

    name: str

    @classmethod
    @abstractmethod
    def supports(cls, weights: ExpertWeights) -> Support:
        """Whether this backend can compute these weights (layout, dtype, device), on this machine."""

    @abstractmethod
    def linear(self, x_PI: torch.Tensor, matrix_SIO: torch.Tensor, ends_S: torch.Tensor) -> torch.Tensor:
        """Rows of group s times `matrix_SIO[s]` -> [P, O]. Rows beyond the last group come back as zeros."""

    def forward(self, rows: ExpertRows, weights: ExpertWeights, *, strict: bool) -> torch.Tensor:
        """Applies to each received row the experts of its slots.

        Returns:
            [M, H] in the model dtype: one unweighted row per slot >= 0, by received row and then by k.
        """
        assert rows.x_NH.dtype == weights.down_SHI.dtype, (rows.x_NH.dtype, weights.down_SHI.dtype)
        groups = group_rows(rows, weights, strict=strict)
        if groups.place_M.shape[0] == 0:
            return rows.x_NH.new_empty((0, rows.x_NH.shape[1]))
        slot_P = None
        if weights.up_bias_SI is not None or weights.down_bias_SH is not None:
            slot_P = torch.searchsorted(
                groups.ends_S,
                torch.arange(groups.x_PH.shape[0], dtype=torch.int32, device=groups.ends_S.device),
                right=True,
            )
            slot_P.clamp_(max=weights.num_slots - 1)  # rows beyond the last group; nobody reads them
        h_PI = self.linear(groups.x_PH, weights.up_matrix, groups.ends_S)
        if weights.up_bias_SI is not None:
            h_PI += weights.up_bias_SI[slot_P]
        a_PI = apply_activation(weights.activation, h_PI, strict=strict)
        y_PH = self.linear(a_PI, weights.down_matrix, groups.ends_S)
        if weights.down_bias_SH is not None:
            y_PH += weights.down_bias_SH[slot_P]
        if weights.post is not None:
            y_PH = weights.post(y_PH)
        return y_PH[groups.place_M]
