"""The invariance contract at thousands of tokens: many partitions of keys, windows passed many times, scaled rotations.

Prompts of 2,600 and 1,100 tokens (where keys are selected, which is slow, of 1,300 and 550) beside short ones; alone
each prompt is prefilled in one piece.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from epruntime import SamplingParams
from epruntime.engine.ranks import Ranks
from epruntime.testing.invariance import Request, Setting, first_difference, run
from epruntime.testing.longrope import change_by_long_factors
from epruntime.testing.prompts import prompt_of
from epruntime.testing.tiny_models import build, save

PROMPTS, NEW_TOKENS = (2600, 1100, 40, 3), 30
MAX_LENGTH = max(PROMPTS) + NEW_TOKENS
BLOCK = 16
_ONE_PROMPT = -(-MAX_LENGTH // BLOCK)
ALONE = Setting(
    name="alone",
    order="alone",
    options={
        "max_model_len": MAX_LENGTH,
        "max_num_batched_tokens": 4096,
        "num_kv_blocks": _ONE_PROMPT + 1,
        "enable_prefix_caching": False,
        "pipeline_depth": 1,
    },
)
SETTINGS = (
    Setting(
        name="in chunks, on two ranks, with copies",
        size=2,
        threads=2,
        options={
            "max_model_len": MAX_LENGTH,
            "max_num_batched_tokens": 333,
            "num_kv_blocks": 2 * _ONE_PROMPT,
            "num_redundant_experts": 2,
        },
        must={"chunks": 4, "mixed_steps": 2, "ranks_at_work": 2, "replica_pairs": 20},
    ),
    Setting(
        name="on three ranks, exchanged in rounds",
        size=3,
        order="reversed",
        options={
            "max_model_len": MAX_LENGTH,
            "max_num_batched_tokens": 700,
            "num_kv_blocks": _ONE_PROMPT + 1,
            "block_size": BLOCK,
            "exchange_budget_tokens": 100,
            "expert_placement": "round_robin",
        },
        must={"chunks": 2, "more_rounds": 10, "ranks_at_work": 3},
    ),
    Setting(
        name="preempted while it is continued, on one rank",
        threads=2,
        order="reversed",
        options={
            "max_model_len": MAX_LENGTH,
            "max_num_batched_tokens": 4096,
            "num_kv_blocks": _ONE_PROMPT + 75,  # for the prompts, and not for all that is continued
            "enable_prefix_caching": False,
        },
        must={"preemptions": 1},
    ),
)
_YARN = {"rope_type": "yarn", "factor": 16.0, "rope_theta": 1e4, "original_max_position_embeddings": 256}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0 + 0.02 * i for i in range(8)],
    "long_factor": [2.0 + 2.0 * i for i in range(8)],
    "original_max_position_embeddings": 1110,  # the prompt of 1,100 tokens comes to it while it is continued
}
_WINDOWED = {"layer_types": ["sliding_attention", "full_attention"]}
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "window, sinks, yarn": ("gpt_oss", "bfloat16", {**_WINDOWED, "sliding_window": 200, "rope_parameters": _YARN}),
    "longrope": ("mixtral", "float32", {"rope_parameters": _LONGROPE}),
    "latent, yarn": ("deepseek_v3", "bfloat16", {"rope_parameters": {**_YARN, "mscale": 0.7, "mscale_all_dim": 1.0}}),
    "window": ("mixtral", "float32", {"sliding_window": 700}),
    "chunks and temperature": (
        "llama4_text",
        "bfloat16",
        {"num_hidden_layers": 4, "attention_chunk_size": 512, "floor_scale": 256},
    ),
    "sparse": ("deepseek_v32", "float32", {"index_topk": 128, "index_n_heads": 32}),
    "one window in every layer": ("deepseek_v4", "float32", {}),
}
SLICE = ("window, sinks, yarn", "longrope")


def _requests(name: str, vocab_size: int) -> list[Request]:
    """The second is sampled, and has the log-probabilities of its prompt; the last one repeats the first."""
    requests = []
    for i, length in enumerate([*PROMPTS, PROMPTS[0]]):
        if name == "sparse" and length > 1000:
            length //= 2
        params = SamplingParams(
            temperature=1.0 if i == 1 else 0,
            seed=i,
            max_tokens=NEW_TOKENS,
            ignore_eos=True,
            logprobs=3,
            prompt_logprobs=2 if i == 1 else None,
        )
        requests.append(Request(prompt=tuple(prompt_of(length, 7, vocab_size=vocab_size)), params=params))
    return requests


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in SLICE else pytest.mark.full) for n in CASES])
def test_same_bits_at_thousands_of_tokens(name: str, ranks: Ranks, tmp_path: Path) -> None:
    model_type, dtype, overrides = CASES[name]
    overrides = {"num_hidden_layers": 2, "max_position_embeddings": 8192, **overrides}
    config, model = build(model_type, dtype=getattr(torch, dtype), **overrides)
    if name == "longrope":
        assert change_by_long_factors(model, position=MAX_LENGTH) > 0.01
    path, requests = str(save(model, tmp_path)), _requests(name, config.vocab_size)
    expected = run(path, ranks, ALONE, requests, compared=len(requests), dtype=dtype)
    assert expected.happened["chunks"] == 0, "a prompt was not prefilled in one piece"
    assert expected.answers[0] == expected.answers[-1]
    for setting in SETTINGS[:2] if name == "sparse" else SETTINGS:  # the third has blocks for the longer prompts
        found = run(path, ranks, setting, requests, compared=len(requests), dtype=dtype)
        assert first_difference(found.answers, expected.answers) is None, setting.name
