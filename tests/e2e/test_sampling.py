"""Penalties, min_tokens and prompt log-probabilities of whole models against transformers' generate and forward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from epruntime import LLM, SamplingParams
from epruntime.engine.ranks import Ranks
from epruntime.outputs import RequestOutput
from epruntime.testing.margins import top1_margin, watch_selections
from epruntime.testing.prompts import prompt_of
from epruntime.testing.tiny_models import build, save

#: prompt seeds per family, one per length, chosen by the reference's margins alone; the last two share a prefix
LENGTHS = (1, 3, 9, 17, 30, 41, 60)
SEEDS = {"qwen2_moe": (0, 1, 1, 0, 6, 1, 0), "deepseek_v3": (0, 1, 0, 0, 0, 0, 0)}
SHARED_SEED = 0
NEW_TOKENS = 20
MIN_MARGIN = 1e-4
#: as in test_tokens_equal.py: fp32 in another order of summation
LOGPROB_BOUND = 5e-4
SMALL = {"dtype": "float32", "max_num_batched_tokens": 24, "max_num_seqs": 12, "block_size": 4, "num_kv_blocks": 32}
LARGE = {"dtype": "float32", "max_num_batched_tokens": 256, "max_num_seqs": 12, "block_size": 4, "num_kv_blocks": 400}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A prompt, and what generate is asked for.

    Attributes:
        stops: ids that end the output; among them tokens that would come before `min_tokens`.
    """

    prompt: list[int]
    penalty: float = 1.0
    min_tokens: int = 0
    stops: tuple[int, ...] = ()

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(
            temperature=0,
            max_tokens=NEW_TOKENS,
            repetition_penalty=self.penalty,
            min_tokens=self.min_tokens,
            stop_token_ids=self.stops,
            ignore_eos=True,
            prompt_logprobs=3,
        )


@torch.inference_mode()
def generate(model: Any, case: Case) -> tuple[list[int], float]:
    """transformers' own new tokens, and the least gap between the best and second-best processed score."""
    options: dict[str, Any] = {}
    if case.penalty != 1.0:
        options["repetition_penalty"] = case.penalty
    if case.min_tokens:
        options["min_new_tokens"] = case.min_tokens
    with watch_selections() as router:
        out = model.generate(
            torch.tensor([case.prompt]),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            eos_token_id=list(case.stops) or None,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_scores=True,
            **options,
        )
    margin = min(router.least, top1_margin(torch.cat(out.scores)))
    return out.sequences[0, len(case.prompt) :].tolist(), margin


def make_case(model: Any, shared: list[int], length: int, seed: int) -> tuple[Case, list[int], list[int], float]:
    """A case, transformers' tokens, those without penalty and minimum, and the least margin of both runs."""
    prompt = (shared if length > 30 else []) + prompt_of(length, seed)
    plain, margin = generate(model, Case(prompt=prompt))
    case = Case(
        prompt=prompt,
        penalty=(1.0, 1.3, 0.8)[length % 3],
        min_tokens=(12, 7)[length % 2],
        # what plain decoding begins with, so that it would stop at once, and some that may come later
        stops=tuple(dict.fromkeys((*plain[:3], *range(40, 50)))),
    )
    expected, its_margin = generate(model, case)
    return case, expected, plain, min(margin, its_margin)


@torch.inference_mode()
def worst_error(outputs: Sequence[RequestOutput], cases: Sequence[Case], model: Any) -> float:
    """Largest distance of a prompt log-probability from transformers' log-softmax over one full forward."""
    worst = 0.0
    for output, case in zip(outputs, cases, strict=True):
        exact = model(input_ids=torch.tensor([case.prompt]), use_cache=False).logits[0].double().log_softmax(-1)
        assert output.prompt_logprobs is not None
        assert len(output.prompt_logprobs) == len(case.prompt)
        assert output.prompt_logprobs[0] is None
        for position, entries in enumerate(output.prompt_logprobs[1:], start=1):
            assert entries is not None
            assert case.prompt[position] in entries
            assert len(entries) in (3, 4)
            row = exact[position - 1]
            assert sorted(e.logprob for e in entries.values())[-3:] == pytest.approx(
                row.topk(3).values.flip(0).tolist(), abs=LOGPROB_BOUND
            )
            worst = max(worst, *(abs(entry.logprob - row[token].item()) for token, entry in entries.items()))
    return worst


@pytest.mark.parametrize("family", SEEDS)
def test_penalties_min_tokens_and_prompt_logprobs_equal_transformers(
    family: str, ranks: Ranks, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, model = build(family)
    path = str(save(model, tmp_path))
    shared = prompt_of(34, SHARED_SEED)
    found = [make_case(model, shared, *pair) for pair in zip(LENGTHS, SEEDS[family], strict=True)]
    cases, expected, plain, margins = zip(*found, strict=True)
    assert min(margins) > MIN_MARGIN
    assert sum(a != b for a, b in zip(expected, plain, strict=True)) >= 5, "the penalties must matter"
    assert any(len(tokens) < NEW_TOKENS for tokens in expected), "a stop id must come in the end"
    prompts = [{"prompt_token_ids": case.prompt} for case in cases]
    report = []
    for size, options in ((1, LARGE), (1, SMALL), (2, SMALL)):
        with LLM(path, ranks=ranks, expert_parallel_size=size, **options) as llm:
            asking = [case.params for case in cases]
            others = [replace(params, prompt_logprobs=None) for params in asking]
            outputs = llm.generate(prompts + prompts, asking + others, use_tqdm=False)
            # the second time the prompts' blocks are in the prefix cache
            outputs += llm.generate(prompts, asking, use_tqdm=False)
            counters = [rank["scheduler"] for rank in llm.info()["ranks"]]
        wrong = [i for i, o in enumerate(outputs) if o.outputs[0].token_ids != expected[i % len(cases)]]
        assert not wrong, f"EP {size}, {options}: {wrong}"
        n = len(cases)
        assert all(output.prompt_logprobs is None for output in outputs[n : 2 * n])
        error = worst_error(outputs[:n] + outputs[2 * n :], cases * 2, model)
        assert error < LOGPROB_BOUND
        totals = {name: sum(c[name] for c in counters) for name in ("preemptions", "chunks", "prefix_hit_tokens")}
        report.append(f"EP {size}: {totals}, error {error:.1e}")
        if options is SMALL:
            assert min(totals.values()) > 0, totals
    with capsys.disabled():
        print(f"\n  {family}: " + "; ".join(report))


def test_a_seed_gives_the_same_tokens_in_any_company(ranks: Ranks, tmp_path: Path) -> None:
    _, model = build("qwen2_moe")
    path = str(save(model, tmp_path))
    prompt = {"prompt_token_ids": prompt_of(17, 0)}
    params = SamplingParams(temperature=1.2, top_p=0.95, min_p=0.01, presence_penalty=0.5, seed=77, max_tokens=12)
    mates = [SamplingParams(temperature=1.0, seed=i, max_tokens=5 + i) for i in range(8)]
    with LLM(path, ranks=ranks, **SMALL) as llm:
        alone = llm.generate(prompt, params, use_tqdm=False)[0]
        company = [{"prompt_token_ids": prompt_of(9 + i, i)} for i in range(8)]
        crowd = llm.generate([*company, prompt], [*mates, params], use_tqdm=False)[-1]
        unseeded = [llm.generate(prompt, SamplingParams(temperature=1.2), use_tqdm=False)[0] for _ in range(3)]
        assert all(output.seed is not None for output in unseeded)
        assert len({tuple(output.outputs[0].token_ids) for output in unseeded}) > 1
        again = llm.generate(prompt, SamplingParams(temperature=1.2, seed=unseeded[0].seed), use_tqdm=False)[0]
    assert alone.outputs[0].token_ids == crowd.outputs[0].token_ids
    assert alone.seed == 77
    assert again.outputs[0].token_ids == unseeded[0].outputs[0].token_ids, "the seed that is returned is the one drawn"
