"""What the client gives back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from epruntime.outputs import CompletionOutput, Logprob


@dataclass(frozen=True, kw_only=True, slots=True)
class Usage:
    """Tokens of one request; output tokens over all its sequences."""

    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """Seconds on the server since the request arrived; None where the server did not say.

    Attributes:
        queue_s: until first scheduled; ttft_s: until the first output token; e2e_s: until the last.
    """

    queue_s: float | None = None
    ttft_s: float | None = None
    e2e_s: float | None = None
    num_preemptions: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """What is new in one sequence of a request since the last chunk of the same index.

    Attributes:
        text, token_ids, logprobs: new ones only (logprobs is None if not asked for).
        finish_reason: "stop", "length" or "abort" in the last chunk of this index, else None.
        final: the last chunk of the request; `usage`, `seed` and `timing` are set in it.
    """

    request_id: str
    index: int = 0
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[dict[int, Logprob], ...] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    final: bool = False
    usage: Usage | None = None
    seed: int | None = None
    timing: Timing | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateResult:
    """A finished request. `outputs` has one entry per sequence; the properties speak of the first."""

    request_id: str
    outputs: list[CompletionOutput]
    usage: Usage
    seed: int | None = None
    timing: Timing = field(default_factory=Timing)

    @property
    def text(self) -> str:
        return self.outputs[0].text

    @property
    def token_ids(self) -> list[int]:
        return self.outputs[0].token_ids

    @property
    def logprobs(self) -> list[dict[int, Logprob]] | None:
        return self.outputs[0].logprobs

    @property
    def finish_reason(self) -> str | None:
        return self.outputs[0].finish_reason

    @property
    def stop_reason(self) -> int | str | None:
        return self.outputs[0].stop_reason


@dataclass(frozen=True, kw_only=True, slots=True)
class Rank:
    """One rank of the engine; the index in ServerInfo.ranks is its expert-parallel rank."""

    slot: int
    incarnation: int
    host: str
    local_rank: int
    pid: int


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerLoad:
    """Tokens that the router of one layer sent: by logical expert, and by expert-parallel rank."""

    layer: int
    tokens_per_expert: tuple[int, ...]
    tokens_per_rank: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerInfo:
    """State of a server.

    Attributes:
        state: "loading", "ready", "draining" or "dead"; state_reason: words where it is not "ready".
        raw: all that the engine says about itself; its keys may change between versions.
    """

    version: str
    state: str
    state_reason: str
    model: str
    uptime_s: float
    running_requests: int
    expert_parallel_size: int
    ranks: tuple[Rank, ...]
    expert_load: tuple[LayerLoad, ...]
    raw: dict[str, Any]
