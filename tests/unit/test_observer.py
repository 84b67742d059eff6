"""Observers: what they are told of tokens, and that a faulty one harms nobody."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from epruntime.engine import observer as module
from epruntime.engine.observer import AdmittedRequest, EngineObserver, FinishedRequest, NewTokens, Observers
from epruntime.errors import EngineDeadError, QueueFullError
from epruntime.outputs import RequestMetrics


class Recorder(EngineObserver):
    def __init__(self) -> None:
        self.log: list[Any] = []

    def admitted(self, request: AdmittedRequest) -> None:
        self.log.append(request)

    def refused(self, error: BaseException) -> None:
        self.log.append(error)

    def tokens(self, new: NewTokens) -> None:
        self.log.append(new)

    def step(self, num_prefill_tokens: int, num_decode_tokens: int) -> None:
        self.log.append((num_prefill_tokens, num_decode_tokens))

    def finished(self, request: FinishedRequest) -> None:
        self.log.append(request)


@pytest.fixture
def clock(monkeypatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    return now


def _state(request_id: str, rids: list[int], prompt: int, arrival: float) -> Any:
    """As much of a RequestState as is looked at."""
    sequences = [SimpleNamespace(rid=rid, finish_reason=None, num_tokens=2) for rid in rids]
    return SimpleNamespace(
        request_id=request_id,
        sequences=sequences,
        num_prompt_tokens=prompt,
        num_cached_tokens=1,
        params=SimpleNamespace(max_tokens=5),
        metrics=RequestMetrics(arrival_time=arrival),
        error=None,
    )


def test_times_to_the_first_token_and_between_tokens(clock) -> None:
    observers, seen = Observers(), Recorder()
    observers.add(seen)
    a, b = _state("a", [1], 3, 99.0), _state("b", [2, 3], 5, 99.5)
    observers.admitted(a)
    observers.admitted(b)
    assert seen.log == [
        AdmittedRequest(request_id="a", num_prompt_tokens=3, n=1, max_tokens=5),
        AdmittedRequest(request_id="b", num_prompt_tokens=5, n=2, max_tokens=5),
    ]
    seen.log.clear()
    observers.tokens([(1, False), (2, False), (3, False)])
    clock[0] = 100.25
    observers.tokens([(1, False), (3, True)])
    clock[0] = 101.0
    observers.tokens([(2, False), (4, False)])  # nobody knows 4
    assert seen.log == [
        # the second sequence of b brings neither the request's first token nor a gap
        NewTokens(num_tokens=3, num_prompt_tokens=8, first_token_s=[1.0, 0.5]),
        NewTokens(num_tokens=2, inter_token_s=[0.25, 0.25], num_preempted=1),
        NewTokens(num_tokens=1, inter_token_s=[1.0]),
    ]
    seen.log.clear()
    a.sequences[0].finish_reason = "stop"
    observers.finished(a)
    observers.finished(a)  # once only
    b.sequences[1].finish_reason = "length"  # the other one was cut off
    observers.finished(b)
    first, second = seen.log
    assert first == FinishedRequest(
        request_id="a",
        metrics=RequestMetrics(arrival_time=99.0, finished_time=101.0),
        finish_reasons=("stop",),
        num_prompt_tokens=3,
        num_output_tokens=(2,),
        num_cached_tokens=1,
    )
    assert second.finish_reasons == ("abort", "length")
    assert not observers._clocks  # nothing is kept of what is gone


def test_errors_refuse_and_end(clock) -> None:
    observers, seen = Observers(), Recorder()
    observers.add(seen)
    with pytest.raises(QueueFullError), observers.refusal():
        raise QueueFullError("full")
    with pytest.raises(ZeroDivisionError), observers.refusal():
        raise ZeroDivisionError  # a fault is not a refusal
    assert [str(error) for error in seen.log] == ["full"]
    state = _state("a", [1, 2], 3, 99.0)
    observers.admitted(state)
    state.error, state.sequences[0].finish_reason = EngineDeadError("dead"), "stop"
    observers.finished(state)
    assert seen.log[-1].finish_reasons == ("stop", "error")
    assert seen.log[-1].error is state.error


def test_an_observer_that_raises_is_told_no_more(caplog) -> None:
    class Faulty(EngineObserver):
        calls = 0

        def step(self, num_prefill_tokens: int, num_decode_tokens: int) -> None:
            self.calls += 1
            raise ZeroDivisionError

    observers, faulty, good = Observers(), Faulty(), Recorder()
    assert not observers
    observers.add(faulty)
    forget = observers.add(good)
    observers.step(1, 2)
    observers.step(3, 4)
    assert faulty.calls == 1
    assert good.log == [(1, 2), (3, 4)]
    assert "Faulty" in caplog.text
    forget()
    forget()
    assert not observers


def test_requests_admitted_before_the_observer_came_are_left_out(clock) -> None:
    observers, seen = Observers(), Recorder()
    state = _state("a", [1], 3, 99.0)
    observers.admitted(state)
    observers.add(seen)
    observers.tokens([(1, False)])
    observers.finished(state)
    assert seen.log == [NewTokens()]
