"""Rotary frequencies that depend on length: each request has what transformers gives that request alone, to the bit.

transformers chooses them by the longest position of the batch. Here requests below, beyond and passing the original
length share steps, chunks and prefixes, and are preempted.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from epruntime import LLM, SamplingParams
from epruntime.engine.ranks import Ranks
from epruntime.models import adapter
from epruntime.outputs import RequestOutput
from epruntime.testing.longrope import change_by_long_factors
from epruntime.testing.margins import top1_margin
from epruntime.testing.prompts import prompt_of
from epruntime.testing.ragged import fresh
from epruntime.testing.tiny_models import build, save

LENGTH = 40  #: the original one
NEW_TOKENS = 16
LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0 + 0.05 * i for i in range(8)],
    "long_factor": [2.0 + 0.5 * i for i in range(8)],
    "original_max_position_embeddings": LENGTH,
}
DYNAMIC: dict[str, Any] = {
    "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
    "max_position_embeddings": LENGTH,
}
#: name -> (model type, configuration, are requests that pass the length computed anew)
CASES: dict[str, tuple[str, dict[str, Any], bool]] = {
    "longrope": ("mixtral", {"rope_parameters": LONGROPE}, False),
    # transformers' code for it takes the short factors at every length: what changes is the scale
    "longrope of Phi": ("phimoe", {"rope_parameters": {**LONGROPE, "short_mscale": 1.1, "long_mscale": 1.5}}, True),
    "dynamic": ("qwen3_moe", DYNAMIC, False),
    "dynamic, latent": ("deepseek_v3", DYNAMIC, False),
}
#: What `make test` runs; `make test-all` runs the others too.
SLICE = ("longrope", "dynamic, latent")
#: below; passing it at each of several steps; at it; beyond. The last ones begin like others.
LENGTHS = (3, 20, 25, 31, 39, 40, 41, 50, 70)
OPTIONS: dict[str, Any] = {"dtype": "float32", "block_size": 4}
#: EP size and what makes requests meet: room for all; chunks and preemptions; no shared prefixes; one at a time
SETTINGS: list[tuple[int, dict[str, Any]]] = [
    (1, {"num_kv_blocks": 400, "max_num_batched_tokens": 512, "max_num_seqs": 16}),
    (2, {"num_kv_blocks": 30, "max_num_batched_tokens": 24, "max_num_seqs": 6}),
    (1, {"num_kv_blocks": 60, "max_num_batched_tokens": 17, "max_num_seqs": 5, "enable_prefix_caching": False}),
    (1, {"num_kv_blocks": 400, "max_num_batched_tokens": 64, "max_num_seqs": 1}),
]
PARAMS = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=2)


def _prompts() -> list[list[int]]:
    prompts = [prompt_of(length, 3) for length in LENGTHS]
    longest = prompts[-1]
    return [*prompts, longest[:36], longest[:45], longest[:60], longest]


@torch.inference_mode()
def _expected(reference: Any, prompt: list[int], *, anew: bool) -> tuple[list[int], float]:
    """(tokens of transformers' own generation in fp64, least margin). `anew`: without a cache, which gives the same as
    its cache where that is thrown away in time (5.16 does so, and then computes too little)."""
    out = fresh(reference).generate(
        torch.tensor([prompt]),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        use_cache=not anew,
        return_dict_in_generate=True,
        output_logits=True,
    )
    return out.sequences[0, len(prompt) :].tolist(), top1_margin(torch.cat(out.logits).float())


def _facts(output: RequestOutput) -> list[Any]:
    (completion,) = output.outputs
    assert completion.logprobs is not None
    return [completion.token_ids, [{t: e.logprob for t, e in step.items()} for step in completion.logprobs]]


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in SLICE else pytest.mark.full) for n in CASES])
def test_tokens_and_bits(name: str, ranks: Ranks, tmp_path: Path) -> None:
    model_type, overrides, anew = CASES[name]
    _, model = build(model_type, num_hidden_layers=2, **overrides)
    path = str(save(model, tmp_path))
    if name == "longrope":
        assert change_by_long_factors(model, position=max(LENGTHS)) > 0.01
    prompts = _prompts()
    reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
    reference.set_attn_implementation("eager")
    reference.set_experts_implementation("eager")
    expected = [_expected(reference, prompt, anew=anew) for prompt in prompts]
    if anew and adapter.version() >= (5, 24):
        assert [_expected(reference, prompt, anew=False)[0] for prompt in prompts] == [tokens for tokens, _ in expected]
    assert min(margin for _, margin in expected) > 1e-4, "an answer is not clear-cut"
    base: list[Any] = []
    preemptions = chunks = hits = 0
    for size, options in SETTINGS:
        with LLM(path, ranks=ranks, expert_parallel_size=size, **OPTIONS, **options) as llm:
            outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], PARAMS, use_tqdm=False)
            counters = [rank["scheduler"] for rank in llm.info()["ranks"]]
        if not base:
            passing = sum(LENGTH - NEW_TOKENS < length - 1 < LENGTH for length in map(len, prompts))
            assert sum(c["preemptions"] for c in counters) == (passing if anew else 0)
        preemptions += sum(c["preemptions"] for c in counters)
        chunks += sum(c["chunks"] for c in counters)
        hits += sum(c["prefix_hit_tokens"] for c in counters)
        found = [_facts(output) for output in outputs]
        wrong = [i for i, (tokens, _) in enumerate(expected) if found[i][0] != tokens]
        assert not wrong, f"EP {size}, {options}: prompts of {[len(prompts[i]) for i in wrong]} tokens"
        base = base or found
        different = [i for i, (a, b) in enumerate(zip(found, base, strict=True)) if a != b]
        assert not different, f"EP {size}, {options}: other bits in prompts of {[len(prompts[i]) for i in different]}"
    assert preemptions > 3
    assert chunks > 3
    assert hits > 3
