"""What a front end needs from an engine. AsyncLLM has it; tests stand in with less."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any, Protocol

from epruntime.engine.observer import EngineObserver
from epruntime.engine.stats import EngineStats
from epruntime.engine.status import EngineStatus
from epruntime.errors import EngineDeadError
from epruntime.outputs import RequestDelta
from epruntime.sampling_params import SamplingParams


class Engine(Protocol):
    """One loaded model."""

    @property
    def errored(self) -> bool:
        """It is dead and will not come back."""
        ...

    @property
    def dead_error(self) -> EngineDeadError | None: ...

    @property
    def status(self) -> EngineStatus:
        """Whether it takes requests and steps, now."""
        ...

    def on_status(self, callback: Callable[[EngineStatus], None]) -> Callable[[], None]:
        """Calls back, on the loop, after each change of `status`; returns what takes it back."""
        ...

    @property
    def model_info(self) -> dict[str, Any]:
        """JSON-ready facts of the model that never change; asks no rank.

        Keys: name, architecture, model_type, dtype, max_model_len, vocab_size, hidden_size, num_layers, num_experts,
        top_k, moe_layers, eos_token_ids, num_parameters, checkpoint_bytes, has_tokenizer, has_chat_template,
        default_sampling (a dict of SamplingParams fields), created (seconds since 1970).
        """
        ...

    @property
    def max_sequences(self) -> int:
        """Sequences (n per request) that can be live at once; more are refused with QueueFullError."""
        ...

    def sampling_params(self, **given: Any) -> SamplingParams:
        """SamplingParams of the fields given; what is left out is the model's default, else SamplingParams' own.

        Raises:
            InvalidRequestError: a value that makes no sense, or an unknown field.
        """
        ...

    def stream(
        self, prompt: Any, sampling_params: SamplingParams | None = None, request_id: str | None = None
    ) -> AsyncGenerator[RequestDelta, None]:
        """What is new, as it comes; merged for a consumer that is slow. Closing it early aborts the request."""
        ...

    async def tokenize(self, prompt: Any) -> tuple[str | None, list[int]]:
        """The text of a prompt (as `stream` takes it) where it has one, and the ids that the model would get.

        Raises:
            InvalidRequestError: no tokenizer, or a prompt that cannot be read.
        """
        ...

    async def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Raises InvalidRequestError: no tokenizer, or ids outside the vocabulary."""
        ...

    async def abort(self, request_id: str) -> None:
        """Ends a live request, whose stream then ends with finish_reason "abort".

        Raises:
            RequestNotFoundError: no live request has this id.
        """
        ...

    def add_observer(self, observer: EngineObserver) -> Callable[[], None]:
        """From now on `observer` is told of requests and tokens; returns what takes it back."""
        ...

    def stats_snapshot(self) -> EngineStats:
        """What the engine has done and how it stands; asks no rank. Counters never fall."""
        ...

    def poll_stats(self, interval_s: float) -> None:
        """Asks the ranks for their own counters every `interval_s` seconds, for `stats_snapshot`, until shutdown."""
        ...

    async def info(self) -> dict[str, Any]:
        """JSON-ready facts."""
        ...

    async def drain(self, timeout_s: float) -> bool:
        """Waits for the live requests; True if all ended in time."""
        ...

    async def shutdown(self) -> None: ...
