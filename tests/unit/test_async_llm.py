"""AsyncLLM's own part: admission while prompts are read elsewhere, n sequences, ends of all kinds, nothing kept."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import Any

import pytest
from fake_engine import LETTERS, MAX_MODEL_LEN, VOCAB, fake_engine

from epruntime.engine.async_llm import AsyncLLM
from epruntime.engine.request_state import RequestState
from epruntime.engine.status import EngineState
from epruntime.engine.text_thread import LONG
from epruntime.errors import (
    EngineDeadError,
    InvalidRequestError,
    QueueFullError,
    RankLostError,
    RequestNotFoundError,
    UnavailableError,
)
from epruntime.outputs import RequestDelta
from epruntime.plan import SamplingSpec
from epruntime.sampling_params import SamplingParams, derive_seed
from epruntime.testing.fake_rank import unbatched


def _run(body: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(body(), 120))  # type: ignore[arg-type]


def _params(**given: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 12, "seed": 3, **given})


def _alone(prompt: list[int], seed: int, max_tokens: int = 12) -> list[int]:
    spec = SamplingSpec(temperature=1.0, top_k=0, top_p=1.0, seed=seed, stop_ids=(), max_tokens=max_tokens)
    return unbatched(prompt, spec, VOCAB)[0]


async def _collect(
    engine: AsyncLLM, prompt: Any, params: SamplingParams, name: str | None = None
) -> list[RequestDelta]:
    return [delta async for delta in engine.stream(prompt, params, name)]


def _tokens(deltas: list[RequestDelta], index: int = 0) -> list[int]:
    return [token for d in deltas for o in d.outputs if o.index == index for token in o.token_ids]


async def _until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


# ---- deltas


def test_deltas_add_up_to_what_the_request_gives_alone() -> None:
    async def body() -> None:
        async with fake_engine() as (engine, _, _):
            deltas = await _collect(engine, "abc", _params())
            expected = _alone([0, 1, 2], 3)
            first, last = deltas[0], deltas[-1]
            assert (first.prompt, first.prompt_token_ids, first.outputs, first.seed) == ("abc", [0, 1, 2], [], 3)
            assert _tokens(deltas) == expected
            assert "".join(o.text for d in deltas for o in d.outputs) == "".join(LETTERS[t] for t in expected)
            assert [d.finished for d in deltas] == [False] * (len(deltas) - 1) + [True]
            assert last.outputs[0].finish_reason == "length"
            assert last.num_output_tokens == 12
            times = last.metrics
            assert times.arrival_time <= times.scheduled_time <= times.first_token_time <= times.finished_time  # type: ignore[operator]

    _run(body)


def test_generate_is_cumulative_and_each_item_is_its_own() -> None:
    async def body() -> None:
        async with fake_engine() as (engine, _, _):
            items = [item async for item in engine.generate([0, 1], _params())]
            expected = _alone([0, 1], 3)
            lengths = [len(item.outputs[0].token_ids) for item in items]
            assert lengths == sorted(set(lengths))  # none without news, and earlier ones have not changed
            for item in items:
                (output,) = item.outputs
                assert output.token_ids == expected[: len(output.token_ids)]
                assert output.text == "".join(LETTERS[t] for t in output.token_ids)
            assert items[-1].finished
            assert items[-1].outputs[0].token_ids == expected

    _run(body)


def test_a_slow_reader_gets_what_came_in_one_piece_and_holds_nobody_up() -> None:
    async def body() -> None:
        async with fake_engine() as (engine, _, _):
            slow = engine.stream("ab", _params(max_tokens=100))
            await anext(slow)
            deltas = await _collect(engine, "xy", _params(max_tokens=100, seed=4))
            assert len(_tokens(deltas)) == 100
            rest = [delta async for delta in slow]
            assert len(rest) <= 2  # what had come, and perhaps the last token
            assert _tokens(rest) == _alone([0, 1], 3, 100)

    _run(body)


def test_cached_prompt_tokens_are_told() -> None:
    async def body() -> None:
        async with fake_engine() as (engine, _, _):
            assert (await _collect(engine, "abcdefghij", _params()))[-1].num_cached_tokens == 0
            again = await _collect(engine, "abcdefghij", _params())
            assert again[-1].num_cached_tokens == 8  # two full blocks of four tokens
            items = [item async for item in engine.generate("abcdefghij", _params())]
            assert items[-1].num_cached_tokens == 8

    _run(body)


# ---- n sequences


def test_n_sequences_equal_n_requests_with_derived_seeds() -> None:
    async def body() -> None:
        async with fake_engine(2) as (engine, _, _):
            deltas = await _collect(engine, "abc", _params(n=5))
            for index in range(5):
                assert _tokens(deltas, index) == _alone([0, 1, 2], derive_seed(3, index))
            assert deltas[-1].num_output_tokens == 60
            ends = [(o.index, o.finish_reason) for d in deltas for o in d.outputs if o.finish_reason]
            assert sorted(ends) == [(index, "length") for index in range(5)]
            for delta in deltas:
                assert [o.index for o in delta.outputs] == sorted({o.index for o in delta.outputs})

    _run(body)


def test_each_sequence_has_its_own_stop_string() -> None:
    async def body() -> None:
        async with fake_engine() as (engine, _, _):
            free = [_alone([7], derive_seed(3, i), 30) for i in range(3)]
            letter = LETTERS[free[1][4]]
            deltas = await _collect(engine, [7], _params(n=3, stop=[letter], max_tokens=30))
            for index in range(3):
                text = "".join(o.text for d in deltas for o in d.outputs if o.index == index)
                assert text == "".join(LETTERS[t] for t in free[index]).split(letter)[0]
            assert engine._core.schedulers[0].num_running == 0

    _run(body)


def test_a_stop_string_ends_the_work_at_once_though_nobody_reads() -> None:
    async def body() -> None:
        async with fake_engine() as (engine, _, _):
            free = _alone([7], 3, 100)
            stream = engine.stream([7], _params(stop=[LETTERS[free[9]]], max_tokens=100))
            await anext(stream)
            core = engine._core
            await _until(lambda: core.schedulers[0].num_running == 0 and core.stats.decode_tokens > 0)
            assert core.stats.decode_tokens < 9 + 4  # and those of steps in flight
            (delta,) = [delta async for delta in stream]
            assert delta.outputs[0].text == "".join(LETTERS[t] for t in free[:9]).split(LETTERS[free[9]])[0]

    _run(body)


def test_max_queued_requests_counts_sequences() -> None:
    async def body() -> None:
        async with fake_engine(max_queued_requests=4) as (engine, (rank,), _):
            with pytest.raises(InvalidRequestError, match=r"n=5: the engine takes at most 4 sequences"):
                await _collect(engine, "a", _params(n=5))
            rank.gate.clear()
            one = asyncio.ensure_future(_collect(engine, "a", _params(n=3)))
            await _until(lambda: len(engine._live) == 1)
            with pytest.raises(QueueFullError, match="2 of 4 places"):
                await _collect(engine, "a", _params(n=2))
            two = asyncio.ensure_future(_collect(engine, "a", _params(n=1)))
            await _until(lambda: len(engine._live) == 2)
            rank.gate.set()
            await one
            await two
            assert len(_tokens(await _collect(engine, "a", _params(n=4)), 3)) == 12

    _run(body)


@pytest.mark.parametrize("how", ["abort", "close", "cancel"])
def test_all_sequences_end_with_the_request(how: str) -> None:
    async def body() -> None:
        async with fake_engine(2) as (engine, _, _):
            stream = engine.stream("abc", _params(n=6, max_tokens=100), "r")
            async with aclosing(stream):
                await anext(stream)
                await anext(stream)
                if how == "abort":
                    await engine.abort("r")
                    rest = [delta async for delta in stream]
                    assert {o.finish_reason for d in rest for o in d.outputs} == {"abort"}
                    assert sorted(o.index for o in rest[-1].outputs) == list(range(6))
                elif how == "cancel":
                    task = asyncio.ensure_future(anext(stream))
                    await asyncio.sleep(0)
                    task.cancel()
                    with pytest.raises(asyncio.CancelledError):
                        await task
            await _nothing_left(engine)

    _run(body)


# ---- prompts are read on another thread


def test_a_slow_prompt_does_not_hold_up_the_loop_or_the_others_tokens() -> None:
    async def body() -> None:
        async with fake_engine() as (engine, _, tokenizer):
            hold = tokenizer.holds["slow"] = threading.Event()
            slow = asyncio.ensure_future(_collect(engine, "slow", _params()))
            await _until(lambda: tokenizer.encoded == ["slow"])
            stream = engine.stream([1, 2], _params(max_tokens=1))
            # it was there first, and is admitted first; this one waits for its turn without a stall of the loop
            waiting = asyncio.ensure_future(anext(stream))
            for _ in range(100):
                await asyncio.sleep(0.001)
            assert not slow.done()
            assert not waiting.done()
            hold.set()
            await slow
            await waiting
            assert not tokenizer.held_too_long  # by a loop that reads prompts itself
            await stream.aclose()

    _run(body)


def test_running_requests_get_their_tokens_while_a_prompt_is_read() -> None:
    async def body() -> None:
        async with fake_engine() as (engine, _, tokenizer):
            tokenizer.delays["slow"] = 0.5
            running = engine.stream("ab", _params(max_tokens=100))
            await anext(running)
            slow = asyncio.ensure_future(_collect(engine, "slow", _params()))
            await _until(lambda: tokenizer.encoded[-1] == "slow")
            assert len(_tokens([delta async for delta in running])) == 100
            assert not slow.done()
            assert len(_tokens(await slow)) == 12

    _run(body)


def test_requests_are_admitted_in_the_order_in_which_they_came() -> None:
    async def body() -> None:
        async with fake_engine() as (engine, (rank,), tokenizer):
            rank.gate.clear()
            tokenizer.delays["slow"] = 0.1
            order: list[str] = []

            async def one(name: str, prompt: Any) -> None:
                async for delta in engine.stream(prompt, _params(max_tokens=1), name):
                    if not delta.outputs:
                        order.append(name)

            prompts = ["slow", "b", [3], {"prompt_token_ids": [4]}, {"prompt": "c"}]
            tasks = [asyncio.ensure_future(one(f"r{i}", prompt)) for i, prompt in enumerate(prompts)]
            await _until(lambda: len(order) == 5)
            assert order == [f"r{i}" for i in range(5)]
            rank.gate.set()
            await asyncio.gather(*tasks)

    _run(body)


def test_a_place_and_an_id_are_taken_before_the_prompt_is_read() -> None:
    async def body() -> None:
        async with fake_engine(max_queued_requests=2) as (engine, _, tokenizer):
            tokenizer.delays["slow"] = 0.2
            tasks = [asyncio.ensure_future(_collect(engine, "slow", _params(), name)) for name in ("a", "b")]
            await _until(lambda: len(engine._live) == 2)
            with pytest.raises(QueueFullError):
                await _collect(engine, "x", _params())
            await engine.abort("b")
            (end,) = await tasks[1]  # at once, though its turn has not come
            assert (end.finished, end.outputs[0].finish_reason, end.prompt_token_ids) == (True, "abort", [])
            assert not tasks[0].done()
            with pytest.raises(InvalidRequestError, match="a live request has this id"):
                await _collect(engine, "x", _params(), "a")
            assert len(_tokens(await tasks[0])) == 12
            assert tokenizer.encoded == ["slow"]  # the one that was aborted was not read

    _run(body)


def test_a_reader_that_leaves_while_its_prompt_is_read() -> None:
    async def body() -> None:
        async with fake_engine() as (engine, _, tokenizer):
            tokenizer.delays["slow"] = 0.2
            task = asyncio.ensure_future(_collect(engine, "slow", _params(), "r"))
            await _until(lambda: tokenizer.encoded == ["slow"])
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await _nothing_left(engine)
            with pytest.raises(RequestNotFoundError):
                await engine.abort("r")
            assert len(_tokens(await _collect(engine, "ab", _params(), "r"))) == 12

    _run(body)


def test_a_refused_prompt_gives_its_place_back() -> None:
    async def body() -> None:
        async with fake_engine(max_queued_requests=1) as (engine, _, _):
            for prompt in ("a b", [VOCAB], [0] * MAX_MODEL_LEN, {"x": 1}, ""):
                with pytest.raises(InvalidRequestError):
                    await _collect(engine, prompt, _params(), "r")
            with pytest.raises(InvalidRequestError, match="SamplingParams"):
                await _collect(engine, "a", {"n": 1})
            await _nothing_left(engine)

    _run(body)


def test_drain_waits_for_a_prompt_that_is_being_read() -> None:
    async def body() -> None:
        async with fake_engine() as (engine, _, tokenizer):
            tokenizer.delays["slow"] = 0.2
            task = asyncio.ensure_future(_collect(engine, "slow", _params()))
            await _until(lambda: tokenizer.encoded == ["slow"])
            assert not await engine.drain(0.01)
            with pytest.raises(UnavailableError, match="takes no new requests"):
                await _collect(engine, "x", _params())
            assert await engine.drain(5)
            assert len(_tokens(task.result())) == 12

    _run(body)


def test_shutdown_ends_requests_in_every_state() -> None:
    async def body() -> None:
        async with fake_engine() as (engine, (rank,), tokenizer):
            rank.gate.clear()
            running = asyncio.ensure_future(_collect(engine, "ab", _params()))
            await _until(lambda: engine._core.schedulers[0].num_running == 1)
            hold = tokenizer.holds["slow"] = threading.Event()
            reading = [asyncio.ensure_future(_collect(engine, "slow", _params())) for _ in range(2)]
            asking = [asyncio.ensure_future(engine.tokenize("slow")) for _ in range(2)]
            await _until(lambda: tokenizer.encoded[-1] == "slow")
            await engine.shutdown()
            results = await asyncio.gather(running, *reading, *asking, return_exceptions=True)
            hold.set()  # until now the tokenizer was at it: it was not waited for
            assert not tokenizer.held_too_long
            assert [type(result) for result in results] == [UnavailableError] * 5
            with pytest.raises(UnavailableError):
                await engine.tokenize("a")

    _run(body)


def test_a_dead_engine_ends_requests_in_every_state_and_says_so() -> None:
    async def body() -> None:
        async with fake_engine() as (engine, (rank,), tokenizer):
            rank.gate.clear()
            heard = []
            forget = engine.on_status(heard.append)
            engine.on_status(lambda status: None)()
            running = asyncio.ensure_future(_collect(engine, "ab", _params(n=2)))
            await _until(lambda: engine._core.schedulers[0].num_running == 2)
            tokenizer.delays["slow"] = 0.2
            reading = asyncio.ensure_future(_collect(engine, "slow", _params()))
            await _until(lambda: tokenizer.encoded[-1] == "slow")
            assert engine.status.state is EngineState.READY
            engine._core.fail(RankLostError(slot=0, host="host0", detail="killed"))
            for task in (running, reading):
                with pytest.raises(RankLostError, match="rank 0 on host host0"):
                    await task
            with pytest.raises(EngineDeadError):
                await _collect(engine, "x", _params())
            assert (engine.status.state, len(heard)) == (EngineState.DEAD, 1)
            assert "rank 0 on host host0" in engine.status.reason
            forget()
            forget()
            assert len(engine._live) == 0

    _run(body)


# ---- facts


def test_defaults_of_the_model_and_their_refusals() -> None:
    info = {"default_sampling": {"temperature": 0.6, "top_k": 20}, "eos_token_ids": (2,)}

    async def body() -> None:
        async with fake_engine(info=info) as (engine, _, _):
            assert engine.sampling_params() == SamplingParams(temperature=0.6, top_k=20)
            assert engine.sampling_params(top_k=0, seed=4) == SamplingParams(temperature=0.6, top_k=0, seed=4)
            with pytest.raises(InvalidRequestError, match="top_kk"):
                engine.sampling_params(top_kk=3)
            with pytest.raises(InvalidRequestError, match="top_p"):
                engine.sampling_params(top_p=2)
            facts = engine.model_info
            assert facts["default_sampling"] == {"temperature": 0.6, "top_k": 20}
            assert (facts["name"], facts["eos_token_ids"], facts["moe_layers"]) == ("none", [2], [1])
            assert (facts["has_tokenizer"], facts["has_chat_template"]) == (True, False)
            assert facts["max_model_len"] == MAX_MODEL_LEN
        async with fake_engine(info=info, generation_config="none") as (engine, _, _):
            assert engine.sampling_params() == SamplingParams()

    _run(body)


def test_tokenize_and_detokenize() -> None:
    async def body() -> None:
        async with fake_engine() as (engine, _, _):
            assert await engine.tokenize("abc") == ("abc", [0, 1, 2])
            assert await engine.tokenize([4, 5]) == (None, [4, 5])
            assert await engine.detokenize([2, 1]) == "cb"
            assert await engine.detokenize([]) == ""
            for ids in ([VOCAB], [-1], [1.5], "ab", None):
                with pytest.raises(InvalidRequestError):
                    await engine.detokenize(ids)  # type: ignore[arg-type]
            with pytest.raises(InvalidRequestError):
                await engine.tokenize(7)

    _run(body)


def test_a_long_text_keeps_no_short_one_waiting() -> None:
    async def body() -> None:
        async with fake_engine() as (engine, _, tokenizer):
            long = "x" * LONG
            tokenizer.delays[long] = 1.0
            asked = asyncio.ensure_future(engine.tokenize(long))
            await _until(lambda: tokenizer.encoded == [long])
            await _collect(engine, "abc", _params(max_tokens=1))
            assert (await engine.tokenize("a"))[1] == [0]
            assert await engine.detokenize([1]) == "b"
            assert not asked.done()
            assert len((await asked)[1]) == LONG

    _run(body)


def test_texts_that_wait_are_bounded() -> None:
    async def body() -> None:
        async with fake_engine(max_queued_requests=2) as (engine, _, tokenizer):
            tokenizer.delays["slow"] = 0.1
            asked = [asyncio.ensure_future(engine.tokenize("slow")) for _ in range(4)]
            done = await asyncio.gather(*asked, return_exceptions=True)
            assert [type(result) for result in done] == [tuple, tuple, QueueFullError, QueueFullError]
            assert (await engine.tokenize("a"))[1] == [0]
            assert engine._text_thread.num_jobs == 0

    _run(body)


# ---- nothing is kept


async def _nothing_left(engine: AsyncLLM) -> None:
    """All is given back: at once, but for KV blocks that a step in flight may still write."""
    assert len(engine._live) == 0
    assert engine._live.sequences == {}
    assert set(engine._core._router.loads) == {0}
    for scheduler in engine._core.schedulers:
        assert scheduler.num_running + scheduler.num_waiting == 0
    await asyncio.wait_for(_until(lambda: all(s.kv_usage == 0 for s in engine._core.schedulers)), 60)


def test_nothing_is_kept_of_requests_however_they_end(monkeypatch: pytest.MonkeyPatch) -> None:
    states: weakref.WeakSet[RequestState] = weakref.WeakSet()
    init = RequestState.__init__

    def watched(self: RequestState, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        states.add(self)

    monkeypatch.setattr(RequestState, "__init__", watched)

    async def one(engine: AsyncLLM, i: int) -> None:
        """Leaves after i deltas, in one of several ways."""
        kind, name = i % 5, f"r{i}"
        stream = engine.stream("abc"[: i % 3 + 1], _params(n=i % 3 + 1, seed=i, stop=["Q"]), name)
        async with aclosing(stream):
            for _ in range(i % 4):
                await anext(stream)
            if kind == 0:
                return
            if kind == 1 and i % 4:
                await engine.abort(name)
            if kind == 2:
                task = asyncio.ensure_future(anext(stream, None))
                await asyncio.sleep(0)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                return
            async for _ in stream:
                pass

    async def body() -> None:
        async with fake_engine(2) as (engine, ranks, _):
            for _ in range(3):
                await asyncio.gather(*(one(engine, i) for i in range(60)))
                await _nothing_left(engine)
                await _until(lambda: not any(rank.tasks for rank in ranks))
                gc.collect()
                assert len(states) == 0

    _run(body)
