"""Splits an exchange that is over the budget into rounds; a pure function that every rank computes alike.

Each destination lines its incoming rows up, source after source, starting with itself and going on to its right
neighbours, and cuts the line every `budget_rows` rows. The start differs by destination so that in each round the
sources send about equally much, instead of rank 0 to all first.
"""

from __future__ import annotations

import torch


def split_rounds(rows_RR: torch.Tensor, budget_rows: int) -> torch.Tensor:
    """Rows that each source sends to each destination in each round.

    Args:
        rows_RR: int64 [R, R], rows from source (first) to destination (second), the same on every rank.
        budget_rows: most rows that a rank receives in one round, at least 1.

    Returns:
        int64 [rounds, R, R]; sums to `rows_RR` over rounds. No rounds if there is nothing to send.
    """
    incoming_R = rows_RR.sum(0)
    num_rounds = -(-int(incoming_R.max()) // budget_rows)
    if num_rounds <= 1:
        return rows_RR.unsqueeze(0)[:num_rounds]
    num_ranks = rows_RR.shape[0]
    ranks = torch.arange(num_ranks)
    # Line of destination d, place i: source (d + i) % R.
    source_RR = (ranks[:, None] + ranks[None, :]) % num_ranks
    line_RR = rows_RR.t().gather(1, source_RR)  # [destination, place]
    ends_RR = line_RR.cumsum(1)
    starts_RR = ends_RR - line_RR
    edges = torch.arange(num_rounds)[:, None, None] * budget_rows
    taken = torch.minimum(ends_RR, edges + budget_rows) - torch.maximum(starts_RR, edges)
    out = torch.empty_like(taken).scatter_(2, source_RR.expand_as(taken), taken.clamp_(min=0))
    return out.transpose(1, 2).contiguous()
