"""Texts and facts of an AsyncLLM: sampling defaults, tokenising beside the loop, what waits is bounded."""

from __future__ import annotations

import asyncio

import pytest
from engine_requests import collect, run_within, sampling, until
from fake_engine import MAX_MODEL_LEN, VOCAB, fake_engine

from epruntime.engine.text_thread import LONG
from epruntime.errors import InvalidRequestError, QueueFullError
from epruntime.sampling_params import SamplingParams


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

    run_within(body)


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

    run_within(body)


def test_a_long_text_keeps_no_short_one_waiting() -> None:
    async def body() -> None:
        async with fake_engine() as (engine, _, tokenizer):
            long = "x" * LONG
            tokenizer.delays[long] = 1.0
            asked = asyncio.ensure_future(engine.tokenize(long))
            await until(lambda: tokenizer.encoded == [long])
            await collect(engine, "abc", sampling(max_tokens=1))
            assert (await engine.tokenize("a"))[1] == [0]
            assert await engine.detokenize([1]) == "b"
            assert not asked.done()
            assert len((await asked)[1]) == LONG

    run_within(body)


def test_texts_that_wait_are_bounded() -> None:
    async def body() -> None:
        async with fake_engine(max_queued_requests=2) as (engine, _, tokenizer):
            tokenizer.delays["slow"] = 0.1
            asked = [asyncio.ensure_future(engine.tokenize("slow")) for _ in range(4)]
            done = await asyncio.gather(*asked, return_exceptions=True)
            assert [type(result) for result in done] == [tuple, tuple, QueueFullError, QueueFullError]
            assert (await engine.tokenize("a"))[1] == [0]
            assert engine._text_thread.num_jobs == 0

    run_within(body)
