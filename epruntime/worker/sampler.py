"""From logits to tokens, one row at a time.

row of logits -> penalties, bias, min_tokens (logit_adjuster.py)
              -> greedy: argmax | temperature -> top-k -> top-p -> min-p -> inverse CDF of one counter-based uniform
              -> log-probabilities of the unmodified row, where asked

Each row is treated by itself, with operations on that row alone, so that a request's tokens cannot
depend on its batch-mates. The filters keep the same tokens as transformers' TemperatureLogitsWarper,
TopKLogitsWarper, TopPLogitsWarper and MinPLogitsWarper in that order, ties included.

Shape letters: N rows, V vocabulary, C kept candidates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from epruntime.plan import SamplingSpec, TokenLogprobs
from epruntime.worker.logit_adjuster import LogitAdjuster
from epruntime.worker.philox import uniform


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingRow:
    """Of the request that a row of logits belongs to.

    Attributes:
        spec: its sampling parameters.
        position: index that the chosen token will have in its whole sequence.
        adjuster: what changes its logits; None if nothing does.
    """

    spec: SamplingSpec
    position: int
    adjuster: LogitAdjuster | None = None


@dataclass(frozen=True, kw_only=True)
class SampledTokens:
    """Outcome of N rows.

    Attributes:
        tokens: int32 [N]; -1 where the row is in `errors`.
        logprobs: row -> log-probabilities, for rows that asked.
        errors: row -> what is wrong with its logits.
    """

    tokens: np.ndarray
    logprobs: dict[int, TokenLogprobs]
    errors: dict[int, str]


def sample(logits_NV: torch.Tensor, rows: Sequence[SamplingRow]) -> SampledTokens:
    """Chooses one token per row.

    Args:
        logits_NV: float32 [N, V]; `-inf` marks a token that cannot be chosen.
        rows: N, one per row of logits.
    """
    assert logits_NV.dtype == torch.float32
    assert logits_NV.shape[0] == len(rows)
    tokens = np.full(len(rows), -1, np.int32)
    logprobs: dict[int, TokenLogprobs] = {}
    errors: dict[int, str] = {}
    for i, (row_V, row) in enumerate(zip(logits_NV.cpu().numpy(), rows, strict=True)):
        spec, error = row.spec, not_finite(row_V, row.position)
        if error is not None:
            errors[i] = error
            continue
        adjusted_V = row_V if row.adjuster is None else row.adjuster.adjusted(row_V)
        token = int(adjusted_V.argmax())  # the lowest id on ties
        if adjusted_V[token] == -np.inf:
            errors[i] = (
                f"no token is left to choose at position {row.position}: the model allows only tokens that "
                f"min_tokens={spec.min_tokens}, logit_bias or repetition_penalty rule out"
            )
            continue
        if spec.temperature != 0.0:
            token = _draw(adjusted_V, spec, uniform(spec.seed, row.position))
        tokens[i] = token
        if spec.logprobs >= 0:
            logprobs[i] = token_logprobs(row_V, token, spec.logprobs)
    return SampledTokens(tokens=tokens, logprobs=logprobs, errors=errors)


def not_finite(row_V: np.ndarray, position: int) -> str | None:
    """What is wrong with the logits that predict the token at `position`; None if there is a largest one."""
    largest = row_V[row_V.argmax()]  # the first NaN where there is one
    if np.isfinite(largest):
        return None
    return f"the model's logits at position {position - 1} are not finite (largest: {largest})"


def _draw(row_V: np.ndarray, spec: SamplingSpec, u: float) -> int:
    """Inverse CDF in vocabulary order: the first kept token at which the cumulated probability exceeds u."""
    scaled_V, kept_C = kept_tokens(row_V, spec)
    kept = scaled_V if kept_C is None else scaled_V[kept_C]
    cdf_C = _exponentials(kept, float(kept.max()))
    np.cumsum(cdf_C, out=cdf_C)
    index = int(np.searchsorted(cdf_C, u * cdf_C[-1], side="right"))
    return index if kept_C is None else int(kept_C[index])


def _exponentials(values: np.ndarray, peak: float) -> np.ndarray:
    """exp(values - peak) in float64; in place, since a vocabulary of float64 is worth not allocating twice."""
    out = values.astype(np.float64)
    out -= peak
    return np.exp(out, out=out)


def kept_tokens(row_V: np.ndarray, spec: SamplingSpec) -> tuple[np.ndarray, np.ndarray | None]:
    """Applies temperature, top-k, top-p and min-p to one row with a finite maximum.

    Returns:
        The scaled float32 row [V], and the ids kept, int64 [C] ascending; None keeps all.
    """
    scaled_V = _scale(row_V, spec.temperature)
    kept_C = None
    if 0 < spec.top_k < scaled_V.size:
        # As transformers: all that equal the k-th largest stay, so more than k can.
        threshold = np.partition(scaled_V, scaled_V.size - spec.top_k)[scaled_V.size - spec.top_k]
        kept_C = np.flatnonzero(scaled_V >= threshold)
    if spec.top_p < 1.0:
        kept_C = _nucleus(scaled_V, kept_C, spec.top_p)
    if spec.min_p > 0.0:
        # transformers' own arithmetic again: the float32 softmax of what is left, compared with a share of its maximum
        masked_V = _masked(scaled_V, kept_C)
        probs_V = torch.from_numpy(masked_V).softmax(dim=-1).numpy()
        kept_C = np.flatnonzero((probs_V >= probs_V.max() * np.float32(spec.min_p)) & (masked_V > -np.inf))
    return scaled_V, kept_C


def _masked(scaled_V: np.ndarray, kept_C: np.ndarray | None) -> np.ndarray:
    """The row with -inf for what is not kept."""
    if kept_C is None:
        return scaled_V
    masked_V = np.full_like(scaled_V, -np.inf)
    masked_V[kept_C] = scaled_V[kept_C]
    return masked_V


def _scale(row_V: np.ndarray, temperature: float) -> np.ndarray:
    """Logits divided by the temperature in float32; a temperature so small that this overflows acts as its limit."""
    scaled_V = (torch.from_numpy(row_V) / temperature).numpy()
    if np.isfinite(scaled_V.max()):
        return scaled_V
    with np.errstate(over="ignore"):
        return ((row_V.astype(np.float64) - float(row_V.max())) / temperature).astype(np.float32)


def _nucleus(scaled_V: np.ndarray, kept_C: np.ndarray | None, top_p: float) -> np.ndarray:
    """The nucleus with transformers' own arithmetic: ascending sort, float32 softmax, cumulated sum <= 1 - top_p goes.

    Only values are sorted, which numpy does some 30 times quicker than torch sorts values and indices.
    """
    masked_V = _masked(scaled_V, kept_C)
    ascending_V = np.sort(masked_V)
    goes_V = torch.from_numpy(ascending_V).softmax(dim=-1).cumsum(dim=-1) <= (1 - top_p)
    num_gone = min(int(goes_V.sum()), scaled_V.size - 1)
    least = ascending_V[num_gone]
    if num_gone and ascending_V[num_gone - 1] == least:
        return _nucleus_among_equals(masked_V, num_gone)
    return np.flatnonzero(masked_V >= least)


def _nucleus_among_equals(masked_V: np.ndarray, num_gone: int) -> np.ndarray:
    """The nucleus if equal logits lie on both sides of its edge.

    Which of them stay is the choice of torch's unstable sort, taken over as it is: a function of this
    row, equal to transformers under the same torch.
    """
    return np.sort(torch.sort(torch.from_numpy(masked_V), descending=False).indices[num_gone:].numpy())


def token_logprobs(row_V: np.ndarray, token: int, num_top: int) -> TokenLogprobs:
    """Natural log of the softmax of a row of unmodified logits, in float64.

    Args:
        row_V: float32 [V], finite maximum.
        token: the chosen id, or the prompt's own.
        num_top: how many of the most likely ids are reported, descending, the lowest id first on ties.
    """
    peak = float(row_V.max())
    log_total = peak + float(np.log(_exponentials(row_V, peak).sum()))
    num_top = min(num_top, row_V.size)
    top_ids: tuple[int, ...] = ()
    if num_top > 0:
        threshold = np.partition(row_V, row_V.size - num_top)[row_V.size - num_top]
        candidates = np.flatnonzero(row_V >= threshold)
        top_ids = tuple(candidates[np.argsort(-row_V[candidates], kind="stable")[:num_top]].tolist())
    return TokenLogprobs(
        chosen=float(row_V[token]) - log_total,
        top_ids=top_ids,
        top_values=tuple(float(row_V[i]) - log_total for i in top_ids),
    )
