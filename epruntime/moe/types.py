"""Types of one token's way through an MoE layer.

router -> topk_ids, topk_weights -> Placement -> dispatch (rows out) -> ExpertRows -> experts backend -> combine

Shape letters: T tokens on this rank, K = top-k, H hidden, E logical experts, P physical experts,
S local slots, N received rows, M (row, slot) pairs, R ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from epruntime.comm.progress import Stamps


@dataclass(frozen=True, kw_only=True)
class ExpertWeights:
    """One layer's local experts, and how the family computes with them. S local experts.

    Attributes:
        up_SIH: gate and up fused [S, 2I, H] (`has_gate`), or up alone [S, I, H]; `[S, H, 2I]` if `transposed`.
        down_SHI: [S, H, I]; `[S, I, H]` if `transposed`.
        up_bias_SI, down_bias_SH: added once per (token, expert); None where the family has none.
        activation: [rows, 2I] (or [rows, I]) -> [rows, I], the family's own gate function.
        post: applied to each expert's output row, before weighting; None for none.
    """

    up_SIH: torch.Tensor
    down_SHI: torch.Tensor
    up_bias_SI: torch.Tensor | None
    down_bias_SH: torch.Tensor | None
    transposed: bool
    activation: Callable[[torch.Tensor], torch.Tensor]
    post: Callable[[torch.Tensor], torch.Tensor] | None = None

    @property
    def num_slots(self) -> int:
        return int(self.down_SHI.shape[0])

    @property
    def intermediate_size(self) -> int:
        """I: columns after the activation."""
        return int(self.down_SHI.shape[1 if self.transposed else 2])

    @property
    def up_matrix(self) -> torch.Tensor:
        """[S, H, 2I] view (or [S, H, I]): rows times this is the up projection, whatever the family's layout."""
        return self.up_SIH if self.transposed else self.up_SIH.transpose(1, 2)

    @property
    def down_matrix(self) -> torch.Tensor:
        """[S, I, H] view: rows times this is the down projection."""
        return self.down_SHI if self.transposed else self.down_SHI.transpose(1, 2)


@dataclass(frozen=True, kw_only=True)
class ExpertRows:
    """Rows that arrived at the rank of their experts, ready for an experts backend.

    Attributes:
        x_NH: hidden states in the model dtype; a strided view of the message, its last dimension contiguous.
        slots_NK: int32, local slots to apply, -1 for none; the same slot may occur twice in a row.
    """

    x_NH: torch.Tensor
    slots_NK: torch.Tensor


@dataclass(kw_only=True)
class StepContext:
    """What layers must know about the running step; one object per rank, its fields set before each forward.

    Attributes:
        num_tokens: valid leading rows of the flat batch; rows beyond are padding and are never routed.
        probe: True during the load-time probe: experts return zeros and nothing is exchanged.
        stamps: where layers say how far the step has come.
    """

    num_tokens: int = 0
    probe: bool = False
    stamps: Stamps = field(default_factory=Stamps)
