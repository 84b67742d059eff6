"""RequestState: what a reader gets of a request, however slow it is; one request's fault stays its own."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from epruntime.engine.detokenizer import TokenTexts
from epruntime.engine.processor import EngineRequest, InputProcessor, Limits
from epruntime.engine.request_state import RequestState
from epruntime.engine.text_thread import TextThread
from epruntime.engine.token_updates import TokenUpdate
from epruntime.errors import EngineDeadError, RequestFailedError
from epruntime.outputs import Logprob, RequestDelta
from epruntime.plan import FINISH_ERROR, FINISH_LENGTH, FINISH_NONE, FINISH_STOP, NewRequest, TokenLogprobs
from epruntime.sampling_params import SamplingParams, derive_seed


class Letters:
    """A tokenizer of 26 letters, which raises on other ids, as sentencepiece does."""

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        return "".join("abcdefghijklmnopqrstuvwxyz"[i] for i in ids)


class Live:
    """A RequestState that is admitted, with the token stream of each sequence at hand."""

    def __init__(self, prompt: tuple[int, ...] = (0,), **params: Any) -> None:
        sampling = SamplingParams(**{"seed": 5, **params})
        rids = range(10, 10 + sampling.n)
        processor = InputProcessor(
            TOKENIZER,  # type: ignore[arg-type]
            Limits(max_model_len=64, vocab_size=32, eos_token_ids=(25,)),
        )
        request = processor.process(
            {"prompt_token_ids": list(prompt)}, sampling, rid=10, request_id="r", arrival_time=0.0
        )
        self.state = RequestState("r", sampling, rids, arrival_time=0.0)
        self.requests: list[EngineRequest] = self.state.admit(request, TokenTexts(TOKENIZER))  # type: ignore[arg-type]
        self.thread = TextThread()

    def push(self, letter: str, index: int = 0, finish: int = FINISH_NONE, **fields: Any) -> bool:
        sequence = self.state.sequences[index]
        return self.state.update(sequence, TokenUpdate(sequence.rid, ord(letter) - 97, finish, **fields))

    def schedule(self, index: int, num_cached_tokens: int) -> None:
        request = self.requests[index]
        new = NewRequest(
            rid=request.rid,
            token_ids=tuple(request.prompt_token_ids),
            num_prompt_tokens=len(request.prompt_token_ids),
            num_computed_tokens=num_cached_tokens,
            block_ids=(),
            sampling=request.spec,
        )
        self.state.scheduled(self.state.sequences[index], new)

    async def next(self) -> RequestDelta:
        return await asyncio.wait_for(self.state.next(self.thread), 60)


TOKENIZER = Letters()


def _run(body: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(body(), 120))  # type: ignore[arg-type]


def test_the_first_delta_tells_the_prompt_and_no_tokens() -> None:
    async def body() -> None:
        live = Live(prompt=(3, 4))
        first = live.state.fetch()
        assert (first.prompt_token_ids, first.outputs, first.finished, first.seed) == ([3, 4], [], False, 5)
        assert (first.num_output_tokens, first.prompt_logprobs) == (0, None)

    _run(body)


def test_what_a_slow_reader_has_not_fetched_is_merged_and_then_gone() -> None:
    async def body() -> None:
        live = Live(logprobs=0)
        for letter in "abc":
            live.push(letter, logprobs=TokenLogprobs(chosen=-1.0, top_ids=(), top_values=()))
        (delta,) = (await live.next()).outputs
        assert (delta.text, delta.token_ids, delta.finish_reason) == ("abc", [0, 1, 2], None)
        assert delta.logprobs == [{i: Logprob(-1.0, "abc"[i])} for i in range(3)]
        live.push("d", finish=FINISH_LENGTH, logprobs=TokenLogprobs(chosen=-2.0, top_ids=(), top_values=()))
        last = await live.next()
        (delta,) = last.outputs
        assert (delta.text, delta.token_ids, delta.finish_reason) == ("d", [3], "length")
        assert delta.logprobs == [{3: Logprob(-2.0, "d")}]
        assert last.finished
        assert last.num_output_tokens == 4
        assert last.metrics.finished_time is not None
        sequence = live.state.sequences[0]
        assert (sequence._pieces, sequence._token_ids, sequence._logprobs) == ([], [], [])

    _run(body)


def test_a_token_that_the_tokenizer_does_not_know_ends_its_request_alone() -> None:
    async def body() -> None:
        live = Live()
        live.push("b")
        assert (await live.next()).outputs[0].text == "b"
        assert live.state.update(live.state.sequences[0], TokenUpdate(10, 30, FINISH_NONE))
        assert live.state.finished
        with pytest.raises(RequestFailedError, match="request r: token 30 cannot be made into text: IndexError"):
            await live.next()

    _run(body)


def test_the_first_time_on_a_rank_counts_and_the_cached_tokens_of_the_first_sequence() -> None:
    async def body() -> None:
        live = Live(n=2)
        state = live.state
        assert state.metrics.scheduled_time is None
        live.schedule(1, 4)
        first = state.metrics.scheduled_time
        live.schedule(0, 8)
        live.schedule(0, 16)
        assert state.metrics.scheduled_time == first is not None
        assert state.fetch().num_cached_tokens == 8

    _run(body)


def test_end_ids_are_ids_and_no_text_and_only_stop_ids_are_a_reason() -> None:
    async def body() -> None:
        for token, reason in (("z", None), ("y", 24)):
            live = Live(stop_token_ids=[24])
            live.push("a")
            live.push(token, finish=FINISH_STOP)
            (delta,) = (await live.next()).outputs
            assert (delta.text, delta.token_ids) == ("a", [0, ord(token) - 97])
            assert (delta.finish_reason, delta.stop_reason) == ("stop", reason)

    _run(body)


def test_sequences_have_rids_and_derived_seeds_of_their_own() -> None:
    live = Live(n=3, prompt_logprobs=1)
    assert [r.rid for r in live.requests] == [10, 11, 12]
    assert [r.spec.seed for r in live.requests] == [5, derive_seed(5, 1), derive_seed(5, 2)]
    assert [r.spec.prompt_logprobs for r in live.requests][1:] == [-1, -1]
    assert len({r.spec.seed for r in live.requests}) == 3


def test_sequences_come_by_index_and_the_request_ends_with_the_last_one() -> None:
    async def body() -> None:
        live = Live(n=3)
        assert not live.push("c", 2)
        assert not live.push("a", 0)
        delta = await live.next()
        assert [(o.index, o.text) for o in delta.outputs] == [(0, "a"), (2, "c")]
        assert live.push("x", 0, FINISH_LENGTH)
        assert live.push("b", 1, FINISH_LENGTH)
        delta = await live.next()
        assert not delta.finished
        assert [(o.index, o.finish_reason) for o in delta.outputs] == [(0, "length"), (1, "length")]
        assert live.push("y", 2, FINISH_LENGTH)
        delta = await live.next()
        assert delta.finished
        assert [(o.index, o.text) for o in delta.outputs] == [(2, "y")]
        assert delta.num_output_tokens == 5

    _run(body)


def test_a_fault_of_one_sequence_ends_the_request() -> None:
    async def body() -> None:
        live = Live(n=2)
        live.push("a", 0, FINISH_LENGTH)
        sequence = live.state.sequences[1]
        assert live.state.update(sequence, TokenUpdate(sequence.rid, -1, FINISH_ERROR, error="logits are not numbers"))
        with pytest.raises(RequestFailedError, match="request r: logits are not numbers"):
            await live.next()

    _run(body)


def test_an_abort_ends_what_still_runs_and_shows_what_was_held_back() -> None:
    async def body() -> None:
        live = Live(n=2, stop=["bc"])
        live.push("a", 0, FINISH_LENGTH)
        live.push("b", 1)  # may begin the stop string
        live.state.abort()
        live.state.abort()
        delta = await live.next()
        assert [(o.index, o.text, o.finish_reason) for o in delta.outputs] == [(0, "a", "length"), (1, "b", "abort")]
        assert delta.finished
        live.state.fail(EngineDeadError("too late"))
        assert live.state.error is None

    _run(body)


def test_an_abort_before_the_prompt_was_read() -> None:
    async def body() -> None:
        state = RequestState("r", SamplingParams(n=2, seed=9), (1, 2), arrival_time=0.0)
        state.abort()
        delta = state.fetch()
        assert [(o.index, o.finish_reason) for o in delta.outputs] == [(0, "abort"), (1, "abort")]
        assert (delta.finished, delta.prompt_token_ids, delta.seed) == (True, [], 9)

    _run(body)


def test_the_prompt_s_logprobs_come_once_with_its_own_tokens() -> None:
    async def body() -> None:
        live = Live(prompt=(3, 4, 5), prompt_logprobs=1)
        found = (
            TokenLogprobs(chosen=-3.0, top_ids=(7,), top_values=(-1.0,)),
            TokenLogprobs(chosen=-2.0, top_ids=(5,), top_values=(-2.0,)),
        )
        live.push("a", prompt_logprobs=found)
        delta = await live.next()
        assert delta.prompt_logprobs == [
            None,
            {4: Logprob(-3.0, "e"), 7: Logprob(-1.0, "h")},
            {5: Logprob(-2.0, "f")},
        ]
        assert delta.outputs[0].text == "a"
        live.push("b")
        assert (await live.next()).prompt_logprobs is None

    _run(body)


def test_preemptions_add_up_over_the_sequences() -> None:
    async def body() -> None:
        live = Live(n=2)
        live.push("a", 0, num_preemptions=2)
        live.push("a", 1, num_preemptions=1)
        live.push("a", 0, num_preemptions=2)
        assert (await live.next()).metrics.num_preemptions == 3

    _run(body)
