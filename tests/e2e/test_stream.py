"""AsyncLLM.stream and LLM on real ranks: n sequences, prompt log-probabilities, cached tokens, nothing left behind."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path

import pytest
import torch

from epruntime import LLM, SamplingParams
from epruntime.engine.ranks import Ranks
from epruntime.errors import InvalidRequestError
from epruntime.sampling_params import derive_seed
from epruntime.testing.tiny_models import build, save

OPTIONS = {"dtype": "float32", "block_size": 4, "num_kv_blocks": 64, "max_num_seqs": 8, "max_num_batched_tokens": 32}
SAMPLED = {"temperature": 1.0, "top_k": 50, "max_tokens": 10, "ignore_eos": True, "seed": 7}
PROMPT = [5, 6, 7, 8, 9, 10, 11]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.nn.Module]:
    _, built = build("mixtral")
    path = save(built, tmp_path_factory.mktemp("mixtral"))
    (path / "generation_config.json").write_text('{"do_sample": true, "temperature": 0.5, "top_k": 11}')
    return path, built


# (before the others, which share one engine: the ranks hold one model at a time)
def test_more_sequences_than_places_wait_their_turn(checkpoint: tuple[Path, torch.nn.Module], ranks: Ranks) -> None:
    with LLM(str(checkpoint[0]), ranks=ranks, max_queued_requests=3, **OPTIONS) as small:
        outputs = small.generate([[3 + i] for i in range(6)], SamplingParams(n=2, **SAMPLED), use_tqdm=False)
        assert [len(o.outputs) for o in outputs] == [2] * 6
        with pytest.raises(InvalidRequestError, match="at most 3 sequences"):
            small.generate([3], SamplingParams(n=4), use_tqdm=False)


@pytest.fixture(scope="module")
def llm(checkpoint: tuple[Path, torch.nn.Module], ranks: Ranks) -> Iterator[LLM]:
    with LLM(str(checkpoint[0]), ranks=ranks, expert_parallel_size=2, **OPTIONS) as running:
        yield running


def test_n_sequences_equal_n_requests_with_derived_seeds(llm: LLM) -> None:
    (together,) = llm.generate(PROMPT, SamplingParams(n=4, logprobs=1, **SAMPLED), use_tqdm=False)
    alone = llm.generate(
        [PROMPT] * 4,
        [SamplingParams(**SAMPLED | {"seed": derive_seed(7, i), "logprobs": 1}) for i in range(4)],
        use_tqdm=False,
    )
    assert [o.index for o in together.outputs] == [0, 1, 2, 3]
    assert [o.token_ids for o in together.outputs] == [a.outputs[0].token_ids for a in alone]
    assert [o.logprobs for o in together.outputs] == [a.outputs[0].logprobs for a in alone]
    assert [o.finish_reason for o in together.outputs] == ["length"] * 4
    assert len({tuple(o.token_ids) for o in together.outputs}) == 4
    assert together.seed == 7


def test_a_list_of_integers_is_one_prompt(llm: LLM) -> None:
    params = SamplingParams(**SAMPLED)
    (one,) = llm.generate(PROMPT, params, use_tqdm=False)
    two = llm.generate([PROMPT, {"prompt_token_ids": PROMPT}], params, use_tqdm=False)
    assert one.prompt_token_ids == PROMPT
    assert [o.outputs[0].token_ids for o in two] == [one.outputs[0].token_ids] * 2
    assert llm.generate([], params, use_tqdm=False) == []


def test_what_a_caller_leaves_out_is_the_model_s_default(llm: LLM) -> None:
    assert llm.default_sampling_params() == SamplingParams(temperature=0.5, top_k=11)
    default = SamplingParams(temperature=0.5, top_k=11, seed=1, ignore_eos=True)
    expected = llm.generate(PROMPT, default, use_tqdm=False)[0].outputs[0].token_ids
    given = llm.engine.sampling_params(seed=1, ignore_eos=True)
    assert llm.generate(PROMPT, given, use_tqdm=False)[0].outputs[0].token_ids == expected
    assert len(llm.generate(PROMPT, use_tqdm=False)[0].outputs[0].token_ids) <= 16
    facts = llm.engine.model_info
    assert facts["default_sampling"] == {"temperature": 0.5, "top_k": 11}
    assert (facts["architecture"], facts["has_tokenizer"]) == ("MixtralForCausalLM", False)


@pytest.mark.parametrize("n", [1, 3])
def test_prompt_logprobs_are_those_of_transformers(llm: LLM, checkpoint: tuple[Path, torch.nn.Module], n: int) -> None:
    prompt = [9, 8, 7, 3, 4, 5, 6, 90, 91, 92, 17, 3]
    (output,) = llm.generate(prompt, SamplingParams(n=n, prompt_logprobs=3, **SAMPLED), use_tqdm=False)
    with torch.no_grad():
        expected = torch.log_softmax(checkpoint[1](torch.tensor([prompt])).logits[0].double(), -1)
    found = output.prompt_logprobs
    assert found is not None
    assert found[0] is None
    assert len(found) == len(prompt)
    for position in range(1, len(prompt)):
        entries, row = found[position], expected[position - 1]
        assert entries is not None
        assert set(entries) == {prompt[position], *row.topk(3).indices.tolist()}
        for token, entry in entries.items():
            assert math.isclose(entry.logprob, row[token].item(), abs_tol=1e-4)
    assert llm.generate(prompt, SamplingParams(**SAMPLED), use_tqdm=False)[0].prompt_logprobs is None


def test_cached_tokens_of_a_prompt_that_came_before(llm: LLM) -> None:
    prompt = list(range(60, 71))  # two full blocks, and a part
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    found = [llm.generate(prompt, params, use_tqdm=False)[0].num_cached_tokens for _ in range(5)]
    assert found[0] == 0
    assert found[-1] == 8  # by then on each of the two ranks


def test_streams_that_end_in_every_way_leave_nothing(llm: LLM) -> None:
    engine = llm.engine

    async def one(i: int) -> str:
        params = SamplingParams(n=i % 3 + 1, max_tokens=30, seed=i, ignore_eos=True)
        ends: list[str | None] = []
        async with aclosing(engine.stream([3 + i % 90] * (i % 13 + 1), params, f"s{i}")) as stream:
            for _ in range(i % 4):
                await anext(stream)
            if i % 3 == 0:
                return "closed"
            if i % 3 == 1 and i % 4:
                await engine.abort(f"s{i}")
            async for delta in stream:
                ends += [o.finish_reason for o in delta.outputs if o.finish_reason]
        assert len(ends) == params.n
        assert len(set(ends)) == 1
        return str(ends[0])

    async def rounds() -> list[list[str]]:
        return [list(await asyncio.gather(*(one(i) for i in range(36)))) for _ in range(2)]

    for found in llm._loop_thread.run(rounds()):
        for i, end in enumerate(found):
            assert end == ("closed" if i % 3 == 0 else "abort" if i % 3 == 1 and i % 4 else "length"), i
    info = llm.info()
    assert info["engine"]["num_requests"] == 0
    for rank in info["ranks"]:
        assert rank["scheduler"]["num_running"] == rank["scheduler"]["num_waiting"] == 0
        assert rank["scheduler"]["kv_usage"] == 0
