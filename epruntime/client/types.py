"""What the client gives back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from epruntime.outputs import CompletionOutput, Logprob


@dataclass(frozen=True, kw_only=True, slots=True)
class Usage:
    """Tokens of one request; output tokens over all its sequences.

    Attributes:
        cached_tokens: of the prompt's, those whose KV was found in the prefix cache.
    """

    prompt_tokens: int
    output_tokens: int
    cached_tokens: int = 0


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
        prompt_token_ids, prompt_logprobs: of the prompt, if asked for; in the first chunks, piece by piece.
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
    prompt_token_ids: tuple[int, ...] = ()
    prompt_logprobs: tuple[dict[int, Logprob] | None, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateResult:
    """A finished request. `outputs` has one entry per sequence; the properties speak of the first.

    Attributes:
        prompt_token_ids, prompt_logprobs: None if not asked for; the first entry of prompt_logprobs is None, as nothing
            predicts the first token.
    """

    request_id: str
    outputs: list[CompletionOutput]
    usage: Usage
    seed: int | None = None
    timing: Timing = field(default_factory=Timing)
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None

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
        state: "loading", "ready", "stalled", "restarting", "draining" or "dead"; state_reason: words where it is not
            "ready".
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


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelInfo:
    """Facts of the served model that never change.

    Attributes:
        max_model_len: tokens of prompt and output together.
        num_experts, top_k: routed experts of each MoE layer, and of each token.
        moe_layers: which layers are MoE layers.
        default_sampling: SamplingParams fields that the checkpoint's generation_config.json sets.
        created: when it was loaded, in seconds since 1970.
    """

    name: str
    architecture: str
    model_type: str
    dtype: str
    max_model_len: int
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_experts: int
    top_k: int
    moe_layers: tuple[int, ...]
    eos_token_ids: tuple[int, ...]
    num_parameters: int
    checkpoint_bytes: int
    has_tokenizer: bool
    has_chat_template: bool
    default_sampling: dict[str, Any]
    created: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizeResult:
    """Tokens of a prompt, and the text they stand for: a chat's as the model's template renders it."""

    token_ids: list[int]
    text: str
