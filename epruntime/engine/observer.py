"""EngineObserver: told what happens to requests, for metrics and logs; and Observers, which tells all of them.

AsyncLLM, EngineCore -> Observers: refusal, admitted, tokens, step, finished -> EngineObserver
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from epruntime.errors import EPRuntimeError
from epruntime.outputs import RequestMetrics

if TYPE_CHECKING:
    from epruntime.engine.request_state import RequestState

logger = logging.getLogger("epruntime.engine.observer")


@dataclass(frozen=True, kw_only=True)
class AdmittedRequest:
    """A request that the engine has taken.

    Attributes:
        n: output sequences. max_tokens: as asked for; None: as many as fit.
    """

    request_id: str
    num_prompt_tokens: int
    n: int
    max_tokens: int | None


@dataclass(slots=True)
class NewTokens:
    """Output tokens that one rank's step brought, all at one moment.

    Attributes:
        num_tokens: over all sequences.
        num_prompt_tokens: prompts of those requests of which this is the first token of all.
        first_token_s: of the same requests, seconds from arrival to now.
        inter_token_s: of the other tokens, seconds since the one before of the same sequence.
        num_preempted: sequences that had been preempted, and computed again, since their token before.
    """

    num_tokens: int = 0
    num_prompt_tokens: int = 0
    first_token_s: list[float] = field(default_factory=list)
    inter_token_s: list[float] = field(default_factory=list)
    num_preempted: int = 0


@dataclass(frozen=True, kw_only=True)
class FinishedRequest:
    """A request that has left the engine, in whatever way.

    Attributes:
        metrics: its times; finished_time is set, also where it was cut off.
        finish_reasons: by sequence: "stop", "length", "abort" (also: its reader left), or "error".
        num_output_tokens: by sequence.
        num_cached_tokens: prompt tokens found in the prefix cache.
        error: what it ended with, if with an error.
    """

    request_id: str
    metrics: RequestMetrics
    finish_reasons: tuple[str, ...]
    num_prompt_tokens: int
    num_output_tokens: tuple[int, ...]
    num_cached_tokens: int
    error: BaseException | None = None


class EngineObserver:
    """Override what is of interest. All calls come on the engine's loop, between steps: be quick, and do not wait.

    One that raises is told no more.
    """

    def admitted(self, request: AdmittedRequest) -> None:
        """A request was accepted and queued."""

    def refused(self, error: BaseException) -> None:
        """A request was not accepted."""

    def tokens(self, new: NewTokens) -> None:
        """A rank's step brought output tokens."""

    def step(self, num_prefill_tokens: int, num_decode_tokens: int) -> None:
        """A lockstep step has ended; tokens that all ranks together computed in it."""

    def finished(self, request: FinishedRequest) -> None:
        """A request that was admitted is gone."""


@dataclass(slots=True)
class _Clock:
    """When tokens of a request came. One per request; `last` has the time of the last token by rid."""

    arrival: float
    num_prompt_tokens: int
    started: bool = False
    last: dict[int, float] = field(default_factory=dict)


class Observers:
    """All observers of one engine, and the times between tokens that they are told. Costs nothing without observers."""

    def __init__(self) -> None:
        self._observers: list[EngineObserver] = []
        self._clocks: dict[int, _Clock] = {}  # by rid; a request's sequences share one

    def __bool__(self) -> bool:
        return bool(self._observers)

    def add(self, observer: EngineObserver) -> Callable[[], None]:
        """From now on `observer` is told; returns what takes it back, which may be called again."""
        self._observers.append(observer)

        def forget() -> None:
            if observer in self._observers:
                self._observers.remove(observer)

        return forget

    @contextmanager
    def refusal(self) -> Iterator[None]:
        """An error that is raised in here refuses a request."""
        try:
            yield
        except EPRuntimeError as error:
            self._tell("refused", error)
            raise

    def admitted(self, state: RequestState) -> None:
        if not self._observers:
            return
        num_prompt_tokens = state.num_prompt_tokens
        clock = _Clock(state.metrics.arrival_time, num_prompt_tokens)
        self._clocks.update((sequence.rid, clock) for sequence in state.sequences)
        request = AdmittedRequest(
            request_id=state.request_id,
            num_prompt_tokens=num_prompt_tokens,
            n=len(state.sequences),
            max_tokens=state.params.max_tokens,
        )
        self._tell("admitted", request)

    def tokens(self, taken: Sequence[tuple[int, bool]]) -> None:
        """Tokens that came together: (rid of the sequence, whether it was preempted since its last token)."""
        new, now, clocks = NewTokens(), time.monotonic(), self._clocks
        gaps = new.inter_token_s
        for rid, preempted in taken:
            clock = clocks.get(rid)
            if clock is None:  # admitted before the first observer came
                continue
            new.num_tokens += 1
            new.num_preempted += preempted
            before = clock.last.get(rid)
            clock.last[rid] = now
            if before is not None:
                gaps.append(now - before)
            elif not clock.started:
                clock.started = True
                new.first_token_s.append(now - clock.arrival)
                new.num_prompt_tokens += clock.num_prompt_tokens
        self._tell("tokens", new)

    def step(self, num_prefill_tokens: int, num_decode_tokens: int) -> None:
        self._tell("step", num_prefill_tokens, num_decode_tokens)

    def finished(self, state: RequestState) -> None:
        """The request has left. Observers are told of those of whose admission they were told."""
        clocks = [self._clocks.pop(sequence.rid, None) for sequence in state.sequences]
        if not any(clocks):
            return
        metrics, instead = state.metrics, "abort" if state.error is None else "error"
        if metrics.finished_time is None:
            metrics = replace(metrics, finished_time=time.monotonic())
        request = FinishedRequest(
            request_id=state.request_id,
            metrics=metrics,
            finish_reasons=tuple(sequence.finish_reason or instead for sequence in state.sequences),
            num_prompt_tokens=state.num_prompt_tokens,
            num_output_tokens=tuple(sequence.num_tokens for sequence in state.sequences),
            num_cached_tokens=state.num_cached_tokens,
            error=state.error,
        )
        self._tell("finished", request)

    def _tell(self, what: str, *args: Any) -> None:
        for observer in list(self._observers):
            try:
                getattr(observer, what)(*args)
            except Exception:  # an observer's fault must not end the engine
                logger.exception("observer %s failed at %r and is told no more", type(observer).__name__, what)
                self._observers.remove(observer)
