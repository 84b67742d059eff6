"""SchedulerCounters: what one group's scheduler has done."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class SchedulerCounters:
    """Totals since the scheduler was made.

    Attributes:
        preemptions: requests taken off the rank because KV blocks ran out.
        holds: decodes that sat a step out, waiting for a KV block.
        chunks: prefill pieces that left a part of the history to a later plan.
        mixed_steps: plans with prefill and decode. empty_plans: plans that compute nothing.
        prefill_tokens, decode_tokens: tokens planned (decodes: at most, a request may have stopped).
        prefix_query_tokens: tokens of requests admitted while the prefix cache was on, preempted ones again.
        prefix_hit_tokens: those of them whose KV was found there.
    """

    preemptions: int = 0
    holds: int = 0
    chunks: int = 0
    mixed_steps: int = 0
    empty_plans: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
