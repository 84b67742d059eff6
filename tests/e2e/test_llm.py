"""LLM and AsyncLLM on real ranks: order, options, errors, cancellation, and ranks that are really killed."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
import traceback
from pathlib import Path

import pytest

from epruntime import LLM, AsyncLLM, SamplingParams
from epruntime.engine.ranks import Ranks
from epruntime.errors import (
    CheckpointError,
    ConfigError,
    EngineDeadError,
    InvalidRequestError,
    RankLostError,
    UnsupportedModelError,
)
from epruntime.testing.patience import PATIENCE_S, soon
from epruntime.testing.tiny_models import build, save

OPTIONS = {"dtype": "float32", "block_size": 4, "num_kv_blocks": 64, "max_num_seqs": 8, "max_num_batched_tokens": 32}
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    _, built = build("mixtral")
    return save(built, tmp_path_factory.mktemp("mixtral"))


def _ids(*tokens: int) -> dict[str, list[int]]:
    return {"prompt_token_ids": list(tokens)}


def test_outputs_come_in_order_one_parameter_set_each(model: Path, ranks: Ranks) -> None:
    prompts = [_ids(*range(3, 4 + i)) for i in range(20)]
    params = [SamplingParams(temperature=0, max_tokens=1 + i, ignore_eos=True) for i in range(20)]
    with LLM(model, ranks=ranks, expert_parallel_size=3, **OPTIONS) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        alone = llm.generate(prompts[7], params[7], use_tqdm=False)
    assert [len(o.outputs[0].token_ids) for o in outputs] == list(range(1, 21))
    assert [o.prompt_token_ids for o in outputs] == [p["prompt_token_ids"] for p in prompts]
    assert alone[0].outputs[0].token_ids == outputs[7].outputs[0].token_ids
    for output in outputs:
        times = output.metrics
        assert times.arrival_time < times.scheduled_time < times.first_token_time <= times.finished_time
    assert ranks.pool._lost_callbacks == []  # nothing that outlives the engine holds it


def test_a_seed_gives_the_same_tokens_in_any_company(model: Path, ranks: Ranks) -> None:
    params = SamplingParams(temperature=1.0, top_k=20, top_p=0.9, seed=11, max_tokens=12, ignore_eos=True)
    company = [_ids(*random.Random(i).choices(range(3, 128), k=9)) for i in range(11)]
    with LLM(model, ranks=ranks, expert_parallel_size=2, **OPTIONS) as llm:
        alone = llm.generate(_ids(5, 6, 7), params, use_tqdm=False)[0].outputs[0].token_ids
        mixed = llm.generate([*company, _ids(5, 6, 7)], params, use_tqdm=False)[-1].outputs[0].token_ids
        other = llm.generate(_ids(5, 6, 7), SamplingParams(seed=12, max_tokens=12, ignore_eos=True), use_tqdm=False)
    assert mixed == alone
    assert other[0].outputs[0].token_ids != alone
    assert other[0].seed == 12


def test_the_model_s_own_end_and_stop_ids_end_a_request(model: Path, ranks: Ranks) -> None:
    with LLM(model, ranks=ranks, expert_parallel_size=2, **OPTIONS) as llm:
        tokens = llm.generate(_ids(3, 4, 5), GREEDY, use_tqdm=False)[0].outputs[0].token_ids
        stop = tokens[4]
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, stop_token_ids=[stop])
        completion = llm.generate(_ids(3, 4, 5), params, use_tqdm=False)[0].outputs[0]
    assert completion.token_ids == tokens[: tokens.index(stop) + 1]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)


def test_refusals(model: Path, ranks: Ranks, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="expert_parallel_size"):
        LLM(model, expert_paralel_size=2)
    with pytest.raises(ConfigError, match="the pool has 4 ranks"):
        LLM(model, ranks=ranks, expert_parallel_size=5, **OPTIONS)
    with pytest.raises(CheckpointError):
        LLM(tmp_path, ranks=ranks)
    save(build("llama")[1], tmp_path)
    with pytest.raises(UnsupportedModelError, match="dense model"):
        LLM(tmp_path, ranks=ranks)
    with LLM(model, ranks=ranks, **OPTIONS) as llm:
        for prompt, field in (("text", "prompt"), (_ids(128), "prompt_token_ids"), (_ids(*[5] * 300), "prompt")):
            with pytest.raises(InvalidRequestError) as caught:
                llm.generate([_ids(3), prompt], GREEDY, use_tqdm=False)
            assert caught.value.field == field
        assert llm.generate(_ids(3), GREEDY, use_tqdm=False)[0].finished  # and it goes on serving
        assert llm.info()["ranks"][0]["scheduler"]["kv_usage"] == 0


def test_cancelled_streams_free_their_blocks(model: Path, ranks: Ranks) -> None:
    with LLM(model, ranks=ranks, expert_parallel_size=2, **OPTIONS) as llm:
        engine = llm.engine

        async def reader(i: int) -> str:
            stream = engine.generate(
                _ids(*range(3, 4 + i % 30)), SamplingParams(max_tokens=40, ignore_eos=True), request_id=f"r{i}"
            )
            async for output in stream:
                if output.finished:
                    return output.outputs[0].finish_reason or ""
                if len(output.outputs[0].token_ids) >= i % 7 + 1 and i % 3 == 0:
                    await stream.aclose()
                    return "closed"
                if i % 3 == 1 and len(output.outputs[0].token_ids) >= 3:
                    await engine.abort(f"r{i}")
            return ""

        async def all_readers() -> list[str]:
            return await asyncio.gather(*(reader(i) for i in range(40)))

        reasons = llm._loop_thread.run(all_readers())
        info = llm.info()
    assert [r for i, r in enumerate(reasons) if i % 3 == 0] == ["closed"] * 14
    assert {r for i, r in enumerate(reasons) if i % 3 == 1} <= {"abort", "length"}
    assert {r for i, r in enumerate(reasons) if i % 3 == 2} == {"length"}
    for rank in info["ranks"]:
        assert rank["scheduler"]["num_running"] == rank["scheduler"]["num_waiting"] == 0
        assert rank["scheduler"]["kv_usage"] == 0
    assert info["engine"]["num_requests"] == 0


@pytest.mark.parametrize("busy", [True, False], ids=["while generating", "while idle"])
def test_a_killed_rank_ends_every_request_by_name(model: Path, busy: bool) -> None:
    with Ranks(2, threads_per_rank=1) as ranks:
        llm = LLM(model, ranks=ranks, expert_parallel_size=2, **OPTIONS)
        victim = ranks.pool.ranks[1].info.pid

        async def serve(engine: AsyncLLM) -> list[BaseException | None]:
            begun = asyncio.Semaphore(0)

            async def one(i: int) -> None:
                async for _ in engine.generate(_ids(3 + i), SamplingParams(max_tokens=200, ignore_eos=True)):
                    begun.release()

            tasks = [asyncio.ensure_future(one(i)) for i in range(6)] if busy else []
            for _ in range(6 * len(tasks)):
                await begun.acquire()
            os.kill(victim, signal.SIGKILL)
            began = time.monotonic()
            done = await asyncio.gather(*tasks, return_exceptions=True)
            while not engine.errored and time.monotonic() - began < PATIENCE_S:
                await asyncio.sleep(0.05)
            assert time.monotonic() - began < soon(5)
            return done

        errors = ranks.loop_thread.run(serve(llm.engine))
        assert len(errors) == (6 if busy else 0)
        for error in [*errors, llm.engine.dead_error]:
            assert isinstance(error, RankLostError), error
            assert error.slot == 1
            assert "SIGKILL" in str(error)
        with pytest.raises(EngineDeadError) as caught:
            llm.generate(_ids(3), GREEDY, use_tqdm=False)
        assert len(traceback.extract_tb(caught.value.__traceback__)) < 20  # those of this call only
        llm.shutdown()


def test_a_stuck_rank_is_named(model: Path) -> None:
    with Ranks(3, threads_per_rank=1) as ranks:
        with LLM(model, ranks=ranks, expert_parallel_size=3, step_timeout_s=2, **OPTIONS) as llm:
            llm.generate(_ids(3), GREEDY, use_tqdm=False)
            os.kill(ranks.pool.ranks[2].info.pid, signal.SIGSTOP)
            with pytest.raises(RankLostError) as caught:
                llm.generate([_ids(3), _ids(4), _ids(5)], GREEDY, use_tqdm=False)
        assert caught.value.slot == 2


def test_what_was_shut_down_says_so(model: Path) -> None:
    ranks = Ranks(1, threads_per_rank=1)
    llm = LLM(model, ranks=ranks, **OPTIONS)
    ranks.shutdown()
    with pytest.raises(EngineDeadError, match="shut down"):
        llm.generate(_ids(3), GREEDY, use_tqdm=False)
    llm.shutdown()
    ranks.shutdown()
