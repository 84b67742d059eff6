"""Output: what one request gave, and its exact bytes."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

from epruntime.plan import TokenLogprobs


@dataclass(kw_only=True)
class Output:
    """Tokens and log-probabilities of one request.

    Attributes:
        index: of its VerifyRequest; num_prompt_tokens: of its prompt. rank: where it ran.
        start, end: output tokens that were asked for; those before `start` stood in the prompt.
        logprobs: one entry per token. prompt_logprobs: from the second prompt position on; None if not asked for.
        error: why it ended early; "" if it did not.
        preempted_at: output tokens that it had each time that it came back from a preemption.
    """

    index: int
    num_prompt_tokens: int = 0
    rank: int = 0
    start: int = 0
    end: int = 2**31
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] | None = None
    error: str = ""
    preempted_at: list[int] = field(default_factory=list)

    @property
    def preempted_amid(self) -> bool:
        """It was preempted when it had sampled, and had to go on."""
        return any(0 < number < len(self.tokens) for number in self.preempted_at)

    def to_bytes(self, num_tokens: int) -> bytes:
        """Everything up to `num_tokens` output tokens; equal bytes mean equal bits."""
        parts = [struct.pack("<qq", self.index, min(num_tokens, len(self.tokens)))]
        for entry in self.prompt_logprobs or ():
            parts.append(entry_bytes(entry))
        for token, entry in zip(self.tokens[:num_tokens], self.logprobs, strict=False):
            parts += [struct.pack("<q", token), entry_bytes(entry)]
        parts.append(self.error.encode())
        return b"".join(parts)


def entry_bytes(entry: TokenLogprobs) -> bytes:
    """Floats by their bits: -0.0 is not 0.0, and equal NaNs are equal."""
    values: Sequence[float] = (entry.chosen, *entry.top_values)
    ids = entry.top_ids
    return struct.pack(f"<q{len(ids)}q{len(values)}d", len(ids), *ids, *values)
