"""AsyncLLM's own part: deltas, n sequences, admission while prompts are read elsewhere."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from engine_requests import alone, collect, nothing_left, run_within, sampling, tokens_of, until
from fake_engine import LETTERS, MAX_MODEL_LEN, VOCAB, fake_engine

from epruntime.errors import InvalidRequestError, QueueFullError
from epruntime.sampling_params import derive_seed


def test_deltas_add_up_to_what_the_request_gives_alone() -> None:
    async def body() -> None:
        async with fake_engine() as (engine, _, _):
            deltas = await collect(engine, "abc", sampling())
            expected = alone([0, 1, 2], 3)
            first, last = deltas[0], deltas[-1]
            assert (first.prompt, first.prompt_token_ids, first.outputs, first.seed) == ("abc", [0, 1, 2], [], 3)
            assert tokens_of(deltas) == expected
            assert "".join(o.text for d in deltas for o in d.outputs) == "".join(LETTERS[t] for t in expected)
            assert [d.finished for d in deltas] == [False] * (len(deltas) - 1) + [True]
            assert last.outputs[0].finish_reason == "length"
            assert last.num_output_tokens == 12
            times = last.metrics
            assert times.arrival_time <= times.scheduled_time <= times.first_token_time <= times.finished_time  # type: ignore[operator]

    run_within(body)


def test_generate_is_cumulative_and_each_item_is_its_own() -> None:
    async def body() -> None:
        async with fake_engine() as (engine, _, _):
            items = [item async for item in engine.generate([0, 1], sampling())]
            expected = alone([0, 1], 3)
            lengths = [len(item.outputs[0].token_ids) for item in items]
            assert lengths == sorted(set(lengths))  # none without news, and earlier ones have not changed
            for item in items:
                (output,) = item.outputs
                assert output.token_ids == expected[: len(output.token_ids)]
                assert output.text == "".join(LETTERS[t] for t in output.token_ids)
            assert items[-1].finished
            assert items[-1].outputs[0].token_ids == expected

    run_within(body)


def test_a_slow_reader_gets_what_came_in_one_piece_and_holds_nobody_up() -> None:
    async def body() -> None:
        async with fake_engine() as (engine, _, _):
            slow = engine.stream("ab", sampling(max_tokens=100))
            await anext(slow)
            deltas = await collect(engine, "xy", sampling(max_tokens=100, seed=4))
            assert len(tokens_of(deltas)) == 100
            rest = [delta async for delta in slow]
            assert len(rest) <= 2  # what had come, and perhaps the last token
            assert tokens_of(rest) == alone([0, 1], 3, 100)

    run_within(body)


def test_cached_prompt_tokens_are_told() -> None:
    async def body() -> None:
        async with fake_engine() as (engine, _, _):
            assert (await collect(engine, "abcdefghij", sampling()))[-1].num_cached_tokens == 0
            again = await collect(engine, "abcdefghij", sampling())
            assert again[-1].num_cached_tokens == 8  # two full blocks of four tokens
            items = [item async for item in engine.generate("abcdefghij", sampling())]
            assert items[-1].num_cached_tokens == 8

    run_within(body)


def test_n_sequences_equal_n_requests_with_derived_seeds() -> None:
    async def body() -> None:
        async with fake_engine(2) as (engine, _, _):
            deltas = await collect(engine, "abc", sampling(n=5))
            for index in range(5):
                assert tokens_of(deltas, index) == alone([0, 1, 2], derive_seed(3, index))
            assert deltas[-1].num_output_tokens == 60
            ends = [(o.index, o.finish_reason) for d in deltas for o in d.outputs if o.finish_reason]
            assert sorted(ends) == [(index, "length") for index in range(5)]
            for delta in deltas:
                assert [o.index for o in delta.outputs] == sorted({o.index for o in delta.outputs})

    run_within(body)


def test_max_queued_requests_counts_sequences() -> None:
    async def body() -> None:
        async with fake_engine(max_queued_requests=4) as (engine, (rank,), _):
            with pytest.raises(InvalidRequestError, match=r"n=5: the engine takes at most 4 sequences"):
                await collect(engine, "a", sampling(n=5))
            rank.gate.clear()
            one = asyncio.ensure_future(collect(engine, "a", sampling(n=3)))
            await until(lambda: len(engine._live) == 1)
            with pytest.raises(QueueFullError, match="2 of 4 places"):
                await collect(engine, "a", sampling(n=2))
            two = asyncio.ensure_future(collect(engine, "a", sampling(n=1)))
            await until(lambda: len(engine._live) == 2)
            rank.gate.set()
            await one
            await two
            assert len(tokens_of(await collect(engine, "a", sampling(n=4)), 3)) == 12

    run_within(body)


def test_a_slow_prompt_does_not_hold_up_the_loop_or_the_others_tokens() -> None:
    async def body() -> None:
        async with fake_engine() as (engine, _, tokenizer):
            hold = tokenizer.holds["slow"] = threading.Event()
            slow = asyncio.ensure_future(collect(engine, "slow", sampling()))
            await until(lambda: tokenizer.encoded == ["slow"])
            stream = engine.stream([1, 2], sampling(max_tokens=1))
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

    run_within(body)


def test_running_requests_get_their_tokens_while_a_prompt_is_read() -> None:
    async def body() -> None:
        async with fake_engine() as (engine, _, tokenizer):
            tokenizer.delays["slow"] = 0.5
            running = engine.stream("ab", sampling(max_tokens=100))
            await anext(running)
            slow = asyncio.ensure_future(collect(engine, "slow", sampling()))
            await until(lambda: tokenizer.encoded[-1] == "slow")
            assert len(tokens_of([delta async for delta in running])) == 100
            assert not slow.done()
            assert len(tokens_of(await slow)) == 12

    run_within(body)


def test_requests_are_admitted_in_the_order_in_which_they_came() -> None:
    async def body() -> None:
        async with fake_engine() as (engine, (rank,), tokenizer):
            rank.gate.clear()
            tokenizer.delays["slow"] = 0.1
            order: list[str] = []

            async def one(name: str, prompt: Any) -> None:
                async for delta in engine.stream(prompt, sampling(max_tokens=1), name):
                    if not delta.outputs:
                        order.append(name)

            prompts = ["slow", "b", [3], {"prompt_token_ids": [4]}, {"prompt": "c"}]
            tasks = [asyncio.ensure_future(one(f"r{i}", prompt)) for i, prompt in enumerate(prompts)]
            await until(lambda: len(order) == 5)
            assert order == [f"r{i}" for i in range(5)]
            rank.gate.set()
            await asyncio.gather(*tasks)

    run_within(body)


def test_a_place_and_an_id_are_taken_before_the_prompt_is_read() -> None:
    async def body() -> None:
        async with fake_engine(max_queued_requests=2) as (engine, _, tokenizer):
            tokenizer.delays["slow"] = 0.2
            tasks = [asyncio.ensure_future(collect(engine, "slow", sampling(), name)) for name in ("a", "b")]
            await until(lambda: len(engine._live) == 2)
            with pytest.raises(QueueFullError):
                await collect(engine, "x", sampling())
            await engine.abort("b")
            (end,) = await tasks[1]  # at once, though its turn has not come
            assert (end.finished, end.outputs[0].finish_reason, end.prompt_token_ids) == (True, "abort", [])
            assert not tasks[0].done()
            with pytest.raises(InvalidRequestError, match="a live request has this id"):
                await collect(engine, "x", sampling(), "a")
            assert len(tokens_of(await tasks[0])) == 12
            assert tokenizer.encoded == ["slow"]  # the one that was aborted was not read

    run_within(body)


def test_a_refused_prompt_gives_its_place_back() -> None:
    async def body() -> None:
        async with fake_engine(max_queued_requests=1) as (engine, _, _):
            for prompt in ("a b", [VOCAB], [0] * MAX_MODEL_LEN, {"x": 1}, ""):
                with pytest.raises(InvalidRequestError):
                    await collect(engine, prompt, sampling(), "r")
            with pytest.raises(InvalidRequestError, match="SamplingParams"):
                await collect(engine, "a", {"n": 1})
            await nothing_left(engine)

    run_within(body)
