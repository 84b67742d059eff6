"""What a caller gets back: RequestOutput, with one CompletionOutput per sequence."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Logprob:
    """Log-probability (natural log, of the unmodified logits) of one token, and its text."""

    logprob: float
    decoded_token: str = ""


@dataclass(slots=True)
class CompletionOutput:
    """One generated sequence.

    Attributes:
        text: never holds half a character nor any part of a stop string.
        token_ids: the ids behind `text`, stop token included, tokens after a stop excluded.
        logprobs: per output token, id -> Logprob (the chosen token's id is always present); None if
            not asked for.
        finish_reason: "stop", "length", "abort", or None while running.
        stop_reason: the stop string or stop token id that ended it, None for an end-of-sequence id.
    """

    index: int = 0
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Times in seconds on the engine's monotonic clock; None until reached.

    Attributes:
        arrival_time: accepted; scheduled_time: first given to a rank; first_token_time, finished_time: of the output.
        num_preemptions: how often it lost its KV blocks and was computed again.
    """

    arrival_time: float = 0.0
    scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    num_preemptions: int = 0


@dataclass(slots=True)
class RequestOutput:
    """State of one request. When streamed, each item holds the whole output so far (cumulative)."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    seed: int | None = None
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
