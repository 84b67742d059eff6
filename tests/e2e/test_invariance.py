"""A request's tokens and log-probabilities are the same bits in any company, at any EP size, preempted or not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from epruntime import LLM, SamplingParams
from epruntime.engine.ranks import Ranks
from epruntime.outputs import RequestOutput
from epruntime.testing.prompts import prompt_of
from epruntime.testing.tiny_models import build, save

#: EP size, then what differs from the first run: KV pressure, chunks of other sizes, rounds, prefix hits, blocks.
SETTINGS: list[tuple[int, dict[str, Any]]] = [
    (1, {"num_kv_blocks": 400, "max_num_batched_tokens": 256, "max_num_seqs": 16}),
    (3, {"num_kv_blocks": 17, "max_num_batched_tokens": 9, "max_num_seqs": 5}),
    (2, {"num_kv_blocks": 30, "enable_prefix_caching": False, "pipeline_depth": 1, "exchange_budget_tokens": 2}),
    (2, {"num_kv_blocks": 7, "block_size": 16, "max_num_batched_tokens": 33, "max_num_seqs": 9}),
]
CASES = [
    ("gpt_oss", "float32", {"num_local_experts": 7, "num_experts_per_tok": 3}),
    ("mixtral", "float32", {"num_local_experts": 2, "intermediate_size": 33, "head_dim": 20, "vocab_size": 131}),
    ("deepseek_v3", "bfloat16", {"hidden_size": 72}),
]
PROMPTS = [prompt_of(length, 5) for length in (1, 4, 9, 20, 37, 50, 37)] + [prompt_of(37, 5)[:30]]
PARAMS = [
    SamplingParams(
        temperature=(0, 0.7, 1.0, 1.5)[i % 4],
        top_k=(0, 5, 40)[i % 3],
        top_p=(1.0, 0.9)[i % 2],
        min_p=(0.0, 0.02, 0.0)[i % 3],
        repetition_penalty=(1.0, 1.2)[i // 2 % 2],
        presence_penalty=(0.0, 0.8, 0.0)[i % 3],
        frequency_penalty=(0.3, 0.0)[i % 2],
        logit_bias={7: 2.5, 90: -100.0} if i % 3 == 1 else {},
        stop_token_ids=list(range(20, 60)),
        min_tokens=10 + i % 4,
        prompt_logprobs=2 if i % 2 else None,
        seed=100 + i,
        max_tokens=14,
        ignore_eos=True,
        logprobs=3,
    )
    for i in range(len(PROMPTS))
]


def _facts(outputs: list[RequestOutput]) -> list[Any]:
    found = []
    for output in outputs:
        (completion,) = output.outputs
        assert completion.logprobs is not None
        values = [{token: entry.logprob for token, entry in step.items()} for step in completion.logprobs]
        prompt_values = [
            step and {token: entry.logprob for token, entry in step.items()} for step in output.prompt_logprobs or ()
        ]
        assert len(prompt_values) in (0, len(output.prompt_token_ids))
        found.append((completion.token_ids, values, prompt_values))
    return found


@pytest.mark.parametrize(("model_type", "dtype", "overrides"), CASES, ids=[case[0] for case in CASES])
def test_same_bits(model_type: str, dtype: str, overrides: dict[str, Any], ranks: Ranks, tmp_path: Path) -> None:
    _, model = build(model_type, dtype=getattr(torch, dtype), **overrides)
    path = str(save(model, tmp_path))
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    base, preemptions = None, 0
    for size, options in SETTINGS:
        options = {"block_size": 4, "max_num_seqs": 6, "max_num_batched_tokens": 16, **options}
        with LLM(path, ranks=ranks, expert_parallel_size=size, dtype=dtype, **options) as llm:
            found = _facts(llm.generate(prompts, PARAMS, use_tqdm=False))
            preemptions += sum(rank["scheduler"]["preemptions"] for rank in llm.info()["ranks"])
            if base is None:
                base = found
                for i in (0, 5):
                    assert _facts(llm.generate(prompts[i], PARAMS[i], use_tqdm=False)) == [base[i]], f"{i} alone"
        different = [i for i, (a, b) in enumerate(zip(found, base, strict=True)) if a != b]
        assert not different, f"EP {size}, {options}: prompts {different}"
    assert preemptions > 0
    assert base is not None
    assert [bool(values) for _, _, values in base] == [params.prompt_logprobs is not None for params in PARAMS]
