"""Which rows a token becomes, and how a row looks on the wire.

topk_ids_TK -> (rank, slot) per choice -> one row per (token, destination rank) -> RowFormat.pack -> bytes

Shape letters: T tokens on this rank, K = top-k, R ranks, N rows, M (row, slot) pairs, H hidden, B bytes.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import cached_property

import torch

from epruntime.moe.placement import Placement
from epruntime.ops.dispatch import pack_rows

#: Widest replica table: replicas are dealt to token rows in turn, with a period of at most this.
_MAX_PERIOD = 256


class PlacementTables:
    """A placement as lookup tables. Row E, which index -1 reaches, is the address of "not routed": rank R, slot -1."""

    def __init__(self, placement: Placement, device: str = "cpu") -> None:
        self.placement = placement
        counts = [len(ids) for ids in placement.replicas]
        # Token row t uses replica (first + t) % count of each expert, see `addresses`.
        self.period = min(math.lcm(*counts), _MAX_PERIOD)
        columns = [[ids[c % len(ids)] for c in range(self.period)] for ids in placement.replicas]
        rank = [[placement.physical_to_rank[p] for p in row] for row in columns]
        slot = [[placement.physical_to_slot[p] for p in row] for row in columns]
        self.rank_EC = torch.tensor([*rank, [placement.world_size] * self.period], dtype=torch.int64, device=device)
        self.slot_EC = torch.tensor([*slot, [-1] * self.period], dtype=torch.int32, device=device)
        self._rank_E, self._slot_E = self.rank_EC[:, 0].contiguous(), self.slot_EC[:, 0].contiguous()

    def addresses(self, ids_TK: torch.Tensor, first: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """int64 [T, K] logical ids, -1 not routed -> (rank int64 [T, K], slot int32 [T, K]).

        Args:
            first: replicas are dealt to token rows in turn, beginning with this one. Sources and steps that begin with
                different ones share the replicas out evenly also where each has but one row.
        """
        if self.period == 1:
            return self._rank_E[ids_TK], self._slot_E[ids_TK]
        column_T1 = (torch.arange(first, first + ids_TK.shape[0], device=ids_TK.device) % self.period).unsqueeze(1)
        return self.rank_EC[ids_TK, column_T1], self.slot_EC[ids_TK, column_T1]


@dataclass(frozen=True, kw_only=True)
class RowPlan:
    """The rows of one rank's tokens, in the order in which they are sent.

    Attributes:
        token_N: int64, token row of each row.
        slots_NK: int32, local slot at the destination for each k, -1 where that k is not for it.
        rows_R: int64, rows per destination rank.
    """

    token_N: torch.Tensor
    slots_NK: torch.Tensor
    rows_R: torch.Tensor

    def permuted(self, order_N: torch.Tensor) -> RowPlan:
        return RowPlan(token_N=self.token_N[order_N], slots_NK=self.slots_NK[order_N], rows_R=self.rows_R)

    def index_TK(self, num_tokens: int) -> torch.Tensor:
        """int32 [num_tokens, K]: where each choice's result is among all results, -1 for none.

        Results come back in row order and, within a row, in k order.
        """
        num_choices = self.slots_NK.shape[1]
        index = torch.full((num_tokens, num_choices), -1, dtype=torch.int32, device=self.token_N.device)
        pair_row, pair_k = (self.slots_NK >= 0).nonzero(as_tuple=True)
        index[self.token_N[pair_row], pair_k] = torch.arange(pair_row.shape[0], dtype=torch.int32, device=index.device)
        return index


def plan_rows(ids_TK: torch.Tensor, tables: PlacementTables, first: int = 0) -> RowPlan:
    """One row per (token, destination rank), by destination and then by token.

    Args:
        ids_TK: int64 [T, K] logical expert ids, -1 for "not routed"; the same expert may occur twice in a row.
        first: replica with which dealing begins, see `PlacementTables.addresses`.
    """
    world_size = tables.placement.world_size
    rank_TK, slot_TK = tables.addresses(ids_TK, first)
    wanted = torch.zeros((world_size + 1, ids_TK.shape[0]), dtype=torch.bool, device=ids_TK.device)
    wanted_RT = wanted.scatter_(0, rank_TK.t(), True)[:world_size]
    rank_N, token_N = wanted_RT.nonzero(as_tuple=True)
    slots_NK = torch.where(rank_TK[token_N] == rank_N.unsqueeze(1), slot_TK[token_N], -1)
    return RowPlan(token_N=token_N, slots_NK=slots_NK, rows_R=wanted_RT.sum(1))


def pairs_by_peer(slots_NK: torch.Tensor, rows_by_peer: list[int]) -> list[int]:
    """(row, slot) pairs in each run of rows: `rows_by_peer[r]` consecutive rows belong to peer r."""
    if len(rows_by_peer) == 1:
        return [int((slots_NK >= 0).sum())]
    ends_N = torch.nn.functional.pad((slots_NK >= 0).sum(1).cumsum(0), (1, 0))
    edges = ends_N[torch.tensor([0, *rows_by_peer], device=slots_NK.device).cumsum(0)].tolist()
    return [b - a for a, b in itertools.pairwise(edges)]


@dataclass(frozen=True, kw_only=True)
class RowFormat:
    """One row of a dispatch message: hidden state, then K int32 slots, then zeros up to a multiple of 16 bytes.

    The multiple lets both parts be read in place as arrays of their own type.
    """

    hidden_size: int
    top_k: int
    dtype: torch.dtype

    @cached_property
    def slots_at(self) -> int:
        """Byte offset of the slots."""
        return -(-self.hidden_size * self.dtype.itemsize // 4) * 4

    @cached_property
    def row_bytes(self) -> int:
        return -(-(self.slots_at + 4 * self.top_k) // 16) * 16

    def pack(self, x_TH: torch.Tensor, plan: RowPlan) -> torch.Tensor:
        """-> uint8 [N, row_bytes]."""
        return pack_rows(x_TH, plan.token_N, plan.slots_NK, slots_at=self.slots_at, row_bytes=self.row_bytes)

    def hidden_of(self, message_NB: torch.Tensor) -> torch.Tensor:
        """[N, H] view in the model dtype."""
        return message_NB.view(self.dtype)[:, : self.hidden_size]

    def slots_of(self, message_NB: torch.Tensor) -> torch.Tensor:
        """int32 [N, K] view."""
        first = self.slots_at // 4
        return message_NB.view(torch.int32)[:, first : first + self.top_k]
