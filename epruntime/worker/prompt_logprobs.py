"""Log-probabilities of prompts' own tokens, a piece of the rows at a time.

PromptPiece of each request -> rows of the last forward -> model.logits, piece by piece -> TokenLogprobs by request

A long prompt chunk has as many rows as a step has tokens, and a row of logits is as wide as the vocabulary: the head is
therefore run on as many rows at a time as fit a fixed number of bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from epruntime.plan import TokenLogprobs
from epruntime.worker.input_batch import PromptPiece
from epruntime.worker.sampler import not_finite, token_logprobs

#: float32 logits of one run of the head, bytes; at least one row is run
_LOGITS_BYTES = 64 * 2**20


@dataclass(frozen=True, kw_only=True)
class PromptLogprobs:
    """What a step yields of prompts.

    Attributes:
        entries: rid -> one per token of its piece, in order.
        errors: rid -> what is wrong with its logits; not in `entries`.
    """

    entries: dict[int, tuple[TokenLogprobs, ...]]
    errors: dict[int, str]


def rows_at_a_time(vocab_size: int) -> int:
    """Rows of one run of the head."""
    return max(_LOGITS_BYTES // (4 * vocab_size), 1)


def prompt_logprobs(
    logits_of: Callable[[torch.Tensor], torch.Tensor],
    pieces: Sequence[PromptPiece],
    *,
    vocab_size: int,
) -> PromptLogprobs:
    """Computes them; a request whose logits are not finite ends up in `errors`, and the others are untouched.

    Args:
        logits_of: rows of the last forward, int64 [N] -> float32 logits [N, V].
    """
    entries: dict[int, list[TokenLogprobs]] = {}
    errors: dict[int, str] = {}
    # one entry per row: its piece and its place in the piece
    wanted = [(piece, k) for piece in pieces for k in range(len(piece.token_ids))]
    step = rows_at_a_time(vocab_size)
    for start in range(0, len(wanted), step):
        run = wanted[start : start + step]
        rows_N = torch.tensor([piece.row + k for piece, k in run], dtype=torch.int64)
        logits_NV = logits_of(rows_N).cpu().numpy()
        for row_V, (piece, k) in zip(logits_NV, run, strict=True):
            request = piece.request
            if request.rid in errors:
                continue
            error = not_finite(row_V, piece.first_position + k)
            if error is not None:
                errors[request.rid] = error
                continue
            entry = token_logprobs(row_V, int(piece.token_ids[k]), request.sampling.prompt_logprobs)
            entries.setdefault(request.rid, []).append(entry)
    return PromptLogprobs(
        entries={rid: tuple(found) for rid, found in entries.items() if rid not in errors}, errors=errors
    )
