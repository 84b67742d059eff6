"""What a caller gets back: RequestDelta by RequestDelta, or RequestOutput with one CompletionOutput per sequence."""

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
    """State of one request. When streamed, each item holds the whole output so far (cumulative).

    Attributes:
        outputs: one per sequence, by index.
        seed: the seed that was used (of sequence 0).
        prompt_logprobs: per prompt position, id -> Logprob (the prompt's own token is always present); None for the
            first position, which nothing predicts. None as a whole if not asked for.
        num_cached_tokens: prompt tokens whose KV was found in the prefix cache.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    seed: int | None = None
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int = 0


@dataclass(slots=True)
class CompletionDelta:
    """What is new in one sequence since the last delta of the same index; fields as in CompletionOutput.

    Attributes:
        finish_reason: in the last delta of this index, else None.
    """

    index: int = 0
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(slots=True)
class RequestDelta:
    """What is new in one request since the last delta. Deltas that a slow reader did not fetch are merged.

    The first one comes when the request is admitted, before any token, and has no outputs: it tells the prompt.

    Attributes:
        outputs: sequences with something new, by index; empty in the first delta.
        finished: the last delta; every sequence has ended.
        seed: as in RequestOutput; 0 where an unseeded request was aborted before it was admitted.
        prompt_logprobs: as in RequestOutput, once, in the delta with the first token of sequence 0.
        num_output_tokens: over all sequences, so far.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionDelta]
    finished: bool
    seed: int
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
