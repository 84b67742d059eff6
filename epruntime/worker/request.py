"""RankRequest: what a rank keeps of one request between steps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from epruntime.models.info import RopeLengths
from epruntime.plan import FINISH_LENGTH, FINISH_NONE, FINISH_STOP, NewRequest, SamplingSpec
from epruntime.worker.logit_adjuster import LogitAdjuster


class RankRequest:
    """Token history, KV blocks and sampling state of one live request.

    Attributes:
        num_tokens: known tokens: prompt and output so far.
        num_computed: leading tokens whose KV is written once the running step ends.
        decoding: it has sampled on this rank, and so computes its last token in every step unasked.
        sampling: its SamplingSpec.
        adjuster: what changes its logits before it samples; None if nothing does.
        rope_len: length, in tokens, by which its rotary frequencies are chosen, where a model's depend on it.
        num_prompt_logprobs: prompt positions, from the second on, whose log-probabilities have been reported.
    """

    __slots__ = (
        "_blocks", "_max_tokens", "_num_blocks", "_num_prompt_tokens", "_stop_ids", "_tokens", "adjuster", "decoding",
        "num_computed", "num_prompt_logprobs", "num_tokens", "rid", "rope_len", "sampling",
    )  # fmt: skip

    def __init__(self, new: NewRequest, *, max_model_len: int, rope: RopeLengths) -> None:
        self.rid = new.rid
        self.sampling: SamplingSpec = new.sampling
        self.num_tokens = len(new.token_ids)
        self.num_computed = new.num_computed_tokens
        self.num_prompt_logprobs = new.num_prompt_logprobs
        self.decoding = False
        # one that passes the original length and is recomputed then comes again with its whole history
        self.rope_len = self.num_tokens if rope.recompute else new.num_prompt_tokens
        self._num_prompt_tokens = new.num_prompt_tokens
        self._max_tokens = min(new.num_prompt_tokens + new.sampling.max_tokens, max_model_len)
        self._stop_ids = frozenset(new.sampling.stop_ids)
        self._tokens = np.empty(max(self.num_tokens + 1, self._max_tokens), np.int32)
        self._tokens[: self.num_tokens] = new.token_ids
        self.adjuster = LogitAdjuster.of(new.sampling, self.tokens, new.num_prompt_tokens)
        self._blocks = np.empty(max(len(new.block_ids), 4), np.int32)
        self._num_blocks = 0
        self.grant(new.block_ids)

    @property
    def num_uncomputed(self) -> int:
        return self.num_tokens - self.num_computed

    @property
    def num_missing_prompt_logprobs(self) -> int:
        """Prompt positions whose log-probabilities are asked for and not yet reported."""
        if self.sampling.prompt_logprobs < 0:
            return 0
        return self._num_prompt_tokens - 1 - self.num_prompt_logprobs

    @property
    def num_blocks(self) -> int:
        return self._num_blocks

    @property
    def tokens(self) -> np.ndarray:
        """Known tokens, int32 [num_tokens]; a view."""
        return self._tokens[: self.num_tokens]

    @property
    def block_ids(self) -> np.ndarray:
        """KV blocks in position order, int32 [num_blocks]; a view."""
        return self._blocks[: self._num_blocks]

    def grant(self, block_ids: Sequence[int]) -> None:
        """Appends KV blocks to the table."""
        end = self._num_blocks + len(block_ids)
        if end > self._blocks.size:
            self._blocks = np.resize(self._blocks, max(end, 2 * self._blocks.size))
        self._blocks[self._num_blocks : end] = block_ids
        self._num_blocks = end

    def accept(self, token: int) -> int:
        """Appends a sampled token; returns FINISH_STOP, FINISH_LENGTH or FINISH_NONE."""
        if self.num_tokens == self._tokens.size:
            self._tokens = np.resize(self._tokens, self._tokens.size + 1)
        self._tokens[self.num_tokens] = token
        self.num_tokens += 1
        self.decoding = True
        if self.adjuster is not None:
            self.adjuster.accept(token)
        if token in self._stop_ids:
            return FINISH_STOP
        return FINISH_LENGTH if self.num_tokens >= self._max_tokens else FINISH_NONE
