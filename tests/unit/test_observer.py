"""Observers: what they are told of tokens, and that a faulty one harms nobody."""

from __future__ import annotations

import pytest

from epruntime.engine import observer as module
from epruntime.engine.observer import AdmittedRequest, EngineObserver, FinishedRequest, NewTokens, Observers
from epruntime.outputs import RequestMetrics


class Recorder(EngineObserver):
    def __init__(self) -> None:
        self.log: list[object] = []

    def admitted(self, request: AdmittedRequest) -> None:
        self.log.append(request)

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


def _admitted(request_id: str, prompt: int, n: int = 1) -> AdmittedRequest:
    return AdmittedRequest(request_id=request_id, num_prompt_tokens=prompt, n=n, max_tokens=5)


def _finished(request_id: str) -> FinishedRequest:
    return FinishedRequest(
        request_id=request_id,
        metrics=RequestMetrics(),
        finish_reasons=("stop",),
        num_prompt_tokens=3,
        num_output_tokens=(2,),
        num_cached_tokens=0,
    )


def test_times_to_the_first_token_and_between_tokens(clock) -> None:
    observers, seen = Observers(), Recorder()
    observers.add(seen)
    observers.admitted(_admitted("a", 3), [1], 99.0)
    observers.admitted(_admitted("b", 5, n=2), [2, 3], 99.5)
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
    observers.finished(_finished("a"), [1])
    observers.finished(_finished("a"), [1])  # once only
    assert seen.log[3:] == [_finished("a")]
    assert set(observers._clocks) == {2, 3}  # nothing is kept of what is gone


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
    observers.admitted(_admitted("a", 3), [1], 99.0)
    observers.add(seen)
    observers.tokens([(1, False)])
    observers.finished(_finished("a"), [1])
    assert seen.log == [NewTokens()]
