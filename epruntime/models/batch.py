"""ForwardBatch: one step's flat ragged batch on one rank, as the model runner hands it to the model.

Shape letters: T rows of the flat batch (padding included), S sequences, B block-table width, N rows
whose logits are wanted.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class ForwardBatch:
    """Sequences one after another in one row of tokens; padding rows at the end.

    Attributes:
        input_ids_T: int64 [T]; padding rows hold any valid id (0 by custom).
        positions_T: int64 [T], position of each token in its sequence; padding rows hold 0.
        slots_T: int64 [T], KV slot (block * block_size + offset) that each token's keys and values
            are written to; -1 for padding rows, which are never written.
        query_starts_S1: int32 [S+1], sequence s owns rows query_starts[s]:query_starts[s+1], the last
            positions of what it has so far; query_starts[S] == num_tokens.
        seq_lens_S: int32 [S], tokens in the KV cache once this step's are written.
        block_tables_SB: int32 [S, B], KV block ids in position order; entries past a sequence's length
            are never read.
        logits_rows_N: int64 [N], rows whose logits are wanted; may repeat.
        rope_lens_S: int32 [S], length by which a sequence's rotary frequencies are chosen, in tokens; the row at
            position p takes max(rope_lens[s], p + 1). None will do for models whose frequencies do not depend on it.
        num_tokens: valid leading rows. An idle rank passes 0 with T=1, S=0, N=0.
    """

    input_ids_T: torch.Tensor
    positions_T: torch.Tensor
    slots_T: torch.Tensor
    query_starts_S1: torch.Tensor
    seq_lens_S: torch.Tensor
    block_tables_SB: torch.Tensor
    logits_rows_N: torch.Tensor
    num_tokens: int
    rope_lens_S: torch.Tensor | None = None

    @classmethod
    def idle(cls) -> ForwardBatch:
        """The batch of a rank with nothing to compute: one padding row, so that every layer still runs."""
        return cls(
            input_ids_T=torch.zeros(1, dtype=torch.int64),
            positions_T=torch.zeros(1, dtype=torch.int64),
            slots_T=torch.full((1,), -1, dtype=torch.int64),
            query_starts_S1=torch.zeros(1, dtype=torch.int32),
            seq_lens_S=torch.zeros(0, dtype=torch.int32),
            block_tables_SB=torch.zeros(0, 1, dtype=torch.int32),
            logits_rows_N=torch.zeros(0, dtype=torch.int64),
            num_tokens=0,
            rope_lens_S=torch.zeros(0, dtype=torch.int32),
        )
