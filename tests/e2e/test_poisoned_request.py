"""A request whose numbers are no numbers ends with an error, and no bit of another one's answer changes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from epruntime import LLM, SamplingParams
from epruntime.engine.ranks import Ranks
from epruntime.errors import EPRuntimeError
from epruntime.testing import tiny_models
from epruntime.testing.invariance import Answer, first_difference
from epruntime.testing.prompts import prompt_of

POISON = 99
OPTIONS: dict[str, Any] = {
    "block_size": 4, "num_kv_blocks": 40, "max_num_seqs": 8, "max_num_batched_tokens": 16,
    "expert_parallel_size": 2, "num_redundant_experts": 3, "exchange_budget_tokens": 5,
}  # fmt: skip
PROMPTS = [prompt_of(length, seed=21, vocab_size=POISON) for length in (9, 1, 17, 30, 5, 12)]
SOUND = SamplingParams(
    temperature=0.8, seed=4, max_tokens=24, ignore_eos=True, logprobs=2, prompt_logprobs=1, logit_bias={POISON: -100.0}
)
#: says the poisoned token itself, so that its row is among the others' decodes
SAYS_IT = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logit_bias={POISON: 100.0})


NAN, INF = float("nan"), float("inf")
#: attention -> (model type, configuration, number): every kind that a prompt of 30 tokens goes beyond.
CASES: dict[str, tuple[str, dict[str, Any], float]] = {
    "full": ("qwen3_moe", {}, NAN),
    "window": ("mixtral", {"sliding_window": 6}, NAN),
    "window and sinks": ("gpt_oss", {}, INF),
    "chunks": ("llama4_text", {"attention_chunk_size": 8}, NAN),
    "latent": ("deepseek_v3", {}, NAN),
    "sparse": ("deepseek_v32", {"index_topk": 5}, NAN),
    "sparse, sinks": ("hy_v4", {"index_topk": 5}, INF),
}
#: What `make test` runs; `make test-all` runs the others too.
SLICE = (("window and sinks", "float32"), ("latent", "bfloat16"), ("chunks", "bfloat16"), ("sparse", "float32"))


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param(name, dtype, marks=() if (name, dtype) in SLICE else pytest.mark.full)
        for name in CASES
        for dtype in ("float32", "bfloat16")
    ],
)
def test_others_are_untouched(name: str, dtype: str, ranks: Ranks, tmp_path: Path) -> None:
    model_type, overrides, poison = CASES[name]
    if model_type not in tiny_models.available([model_type]):
        pytest.skip(f"transformers {transformers.__version__} has no {model_type}")
    _, model = tiny_models.build(model_type, dtype=getattr(torch, dtype), **overrides)
    with torch.no_grad():
        model.get_input_embeddings().weight[POISON, ::2] = poison
    path = str(tiny_models.save(model, tmp_path))
    sound: list[Any] = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    with LLM(path, ranks=ranks, dtype=dtype, **OPTIONS) as llm:
        expected = [Answer.of(output) for output in llm.generate(sound, SOUND, use_tqdm=False)]

        def bad(prompt: list[int], params: SamplingParams) -> str:
            with pytest.raises(EPRuntimeError) as caught:
                llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
            return str(caught.value)

        with ThreadPoolExecutor(6) as pool:
            spoiled = [pool.submit(bad, prompt, SAYS_IT) for prompt in PROMPTS[:3]]
            spoiled += [pool.submit(bad, [*PROMPTS[2], POISON, *PROMPTS[0]], SOUND) for _ in range(2)]
            found = [Answer.of(output) for output in llm.generate(sound, SOUND, use_tqdm=False)]
        assert first_difference(found, expected) is None, first_difference(found, expected)
        assert all("not finite" in each.result() for each in spoiled)
        # and blocks that held what is no number serve others again
        again = [Answer.of(output) for output in llm.generate(sound, SOUND, use_tqdm=False)]
        assert first_difference(again, expected) is None, first_difference(again, expected)
