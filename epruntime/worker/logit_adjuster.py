"""LogitAdjuster: what changes one request's logits before temperature: penalties, logit bias, min_tokens.

row -> repetition penalty -> frequency and presence penalty -> logit bias -> min_tokens -> adjusted row

It counts tokens as they come, so that a step costs one dictionary access and a few operations on arrays as long as the
number of distinct tokens; nothing is as large as the vocabulary, and nothing goes through the history again.

Shape letters: V vocabulary, D distinct tokens, B biased tokens, E tokens that end the output.
"""

from __future__ import annotations

import numpy as np

from epruntime.plan import SamplingSpec

_LEAST, _MOST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)


class LogitAdjuster:
    """Adjusts the logits of one request; a function of its spec and its own tokens.

    Args:
        tokens: int32, prompt and then output so far.
        num_prompt_tokens: how many of them are the prompt's.
    """

    __slots__ = (
        "_bias_B", "_biased_B", "_end_E", "_frequency", "_min_tokens", "_num_output", "_output", "_presence",
        "_repetition", "_seen",
    )  # fmt: skip

    def __init__(self, spec: SamplingSpec, tokens: np.ndarray, num_prompt_tokens: int) -> None:
        # A penalty beyond float32 acts as the nearest one within, which keeps 0 * inf out of the logits.
        self._repetition = min(max(spec.repetition_penalty, _LEAST), _MOST)
        self._frequency, self._presence = spec.frequency_penalty, spec.presence_penalty
        self._biased_B = np.array([token for token, _ in spec.logit_bias], np.int64)
        self._bias_B = np.array([bias for _, bias in spec.logit_bias], np.float32)
        self._min_tokens, self._end_E = spec.min_tokens, np.array(spec.stop_ids, np.int64)
        output = tokens[num_prompt_tokens:]
        self._num_output = len(output)
        self._seen = _TokenCounts(tokens) if spec.repetition_penalty != 1.0 else None
        self._output = _TokenCounts(output) if spec.frequency_penalty or spec.presence_penalty else None

    @classmethod
    def of(cls, spec: SamplingSpec, tokens: np.ndarray, num_prompt_tokens: int) -> LogitAdjuster | None:
        """An adjuster, or None for a request that leaves its logits as they are."""
        penalised = spec.repetition_penalty != 1.0 or spec.presence_penalty or spec.frequency_penalty
        if penalised or spec.logit_bias or spec.min_tokens > len(tokens) - num_prompt_tokens:
            return cls(spec, tokens, num_prompt_tokens)
        return None

    def accept(self, token: int) -> None:
        """Counts a token that joins the output."""
        self._num_output += 1
        for counts in (self._seen, self._output):
            if counts is not None:
                counts.add(token)

    def adjusted(self, row_V: np.ndarray) -> np.ndarray:
        """The adjusted logits.

        Args:
            row_V: float32 [V] without NaN and +inf; left as it is.

        Returns:
            float32 [V], a new array, without NaN and +inf. The repetition penalty as transformers'
            RepetitionPenaltyLogitsProcessor, the other two as in OpenAI's API reference: less frequency_penalty times
            the occurrences in the output, less presence_penalty where there is one. All entries may be -inf.
        """
        out_V = row_V.copy()
        with np.errstate(over="ignore"):  # a large negative logit may become -inf, which it then is
            if self._seen is not None:
                ids_D = self._seen.ids
                seen_D = out_V[ids_D]
                penalised_D = np.where(seen_D < 0, seen_D * self._repetition, seen_D / self._repetition)
                out_V[ids_D] = np.minimum(penalised_D, np.float32(_MOST))
        if self._output is not None:
            ids_D = self._output.ids
            out_V[ids_D] = out_V[ids_D] - self._output.counts * self._frequency - self._presence
        if self._biased_B.size:
            out_V[self._biased_B] += self._bias_B
        if self._num_output < self._min_tokens:
            out_V[self._end_E[self._end_E < out_V.size]] = -np.inf
        return out_V


class _TokenCounts:
    """Distinct token ids, and how often each one occurred."""

    __slots__ = ("_counts", "_ids", "_place")

    def __init__(self, tokens: np.ndarray) -> None:
        ids, counts = np.unique(tokens, return_counts=True)
        self._place = {token: place for place, token in enumerate(ids.tolist())}
        size = max(2 * len(ids), 16)
        self._ids, self._counts = np.zeros(size, np.int64), np.zeros(size, np.float32)
        self._ids[: len(ids)], self._counts[: len(ids)] = ids, counts

    @property
    def ids(self) -> np.ndarray:
        """int64 [D]; a view."""
        return self._ids[: len(self._place)]

    @property
    def counts(self) -> np.ndarray:
        """float32 [D], parallel to `ids`; a view."""
        return self._counts[: len(self._place)]

    def add(self, token: int) -> None:
        place = self._place.setdefault(token, len(self._place))
        if place == self._ids.size:
            self._ids = np.concatenate((self._ids, np.zeros_like(self._ids)))
            self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
        self._ids[place] = token
        self._counts[place] += 1
