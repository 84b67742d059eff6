"""The invariance contract at random: family, dimensions, experts, settings and prompts are drawn until time is up.

A failure prints its seed; EPRUNTIME_TEST_SEED=N begins with that one again. `make test` gives it some seconds,
`make test-all` most of a minute.
"""

from __future__ import annotations

import functools
import os
import random
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from epruntime.engine.model_group import ModelGroup
from epruntime.engine.ranks import Ranks
from epruntime.models import text_part
from epruntime.models.conformance import COVERED
from epruntime.testing.invariance import MAX_LENGTH, Setting, first_difference, mixed_requests, run
from epruntime.testing.odd_shapes import odd_shape
from epruntime.testing.tiny_models import available, build, save

SEED = "EPRUNTIME_TEST_SEED"
#: Plain decoder families, whose dimensions can all be drawn independently.
FREE = ("ernie4_5_moe", "glm4_moe", "gpt_oss", "mixtral", "olmoe", "phimoe", "qwen2_moe", "qwen3_moe")


def _dimensions(source: random.Random, model_type: str) -> dict[str, Any]:
    """Overrides for `build`: any numbers that fit together."""
    num_experts = source.randint(2, 11)
    top_k = source.randint(1, min(num_experts, 5))
    if model_type == "longcat_flash":
        top_k = max(top_k, 2)  # transformers' own code takes no fewer
    shape = odd_shape(model_type, num_experts=num_experts, top_k=top_k)
    if model_type not in FREE:
        return shape
    kv_heads = source.randint(1, 3)
    drawn = {
        "hidden_size": source.randint(9, 90),
        "num_key_value_heads": kv_heads,
        "num_attention_heads": kv_heads * source.randint(1, 3),
        "head_dim": 2 * source.randint(2, 20),
        "intermediate_size": source.randint(5, 130),
        "moe_intermediate_size": source.randint(5, 70),
        "shared_expert_intermediate_size": source.randint(5, 70),
        "vocab_size": source.randint(60, 300),
    }
    if "head_dim" not in shape:  # a head is a share of the hidden size
        drawn["head_dim"] = 2 * source.randint(2, 9)
        drawn["hidden_size"] = drawn["head_dim"] * drawn["num_attention_heads"]
    return shape | {name: value for name, value in drawn.items() if name in shape}


def _setting(source: random.Random, number: int) -> Setting:
    size, block_size = source.randint(1, 4), source.randint(1, 20)
    tokens = source.choice([source.randint(1, 12), source.randint(13, 70), 512])
    blocks = -(-MAX_LENGTH // block_size)
    return Setting(
        name=f"setting {number}",
        size=size,
        threads=source.randint(1, 3),
        order=source.choice(["together", "reversed"]),
        crowd=source.randint(0, 20),
        options={
            "block_size": block_size,
            "num_kv_blocks": blocks + source.choice([0, 2, 10 * blocks]),
            "max_num_batched_tokens": tokens,
            "max_num_seqs": source.randint(1, min(tokens, 32)),
            "pipeline_depth": source.randint(1, 2),
            "enable_prefix_caching": source.random() < 0.7,
            "exchange_budget_tokens": source.choice([1, 3, 7, 8192]),
            "expert_placement": source.choice(["linear", "round_robin"]),
            "num_redundant_experts": source.choice([0, 0, 1, 4]),
        },
    )


def _alone(setting: Setting) -> Setting:
    options = {"enable_prefix_caching": False, "pipeline_depth": 1, "num_kv_blocks": 8}
    return replace(setting, name="alone", size=1, threads=1, order="alone", crowd=0, options=options)


def _one(seed: int, ranks: Ranks, folder: Path, settings: int = 2, compared: int = 5) -> list[str]:
    """Draws a case from a seed and runs it; returns what differs."""
    source = random.Random(seed)
    model_type = source.choice(available(COVERED) if source.random() < 0.5 else FREE)
    dtype = source.choice(["float32", "bfloat16"])
    dimensions = _dimensions(source, model_type)
    config, model = build(model_type, seed, dtype=getattr(torch, dtype), **dimensions)
    path = str(save(model, folder / str(seed)))
    requests = mixed_requests(40, vocab_size=text_part.language_config(config).vocab_size, seed=seed)
    source.shuffle(requests)
    chosen = [_setting(source, number) for number in range(settings)]
    expected = run(path, ranks, _alone(chosen[0]), requests, compared=compared, dtype=dtype)
    found = []
    for setting in chosen:
        answers = run(path, ranks, setting, requests, compared=compared, dtype=dtype).answers
        if (difference := first_difference(answers, expected.answers)) is not None:
            found.append(f"{SEED}={seed}: {model_type} {dtype} {dimensions} under {setting}: {difference}")
    return found


@pytest.mark.parametrize("seconds", [6, pytest.param(40, marks=pytest.mark.full)])
def test_random_models_under_random_settings(seconds: float, ranks: Ranks, tmp_path: Path) -> None:
    first = int(os.environ.get(SEED, random.SystemRandom().randrange(2**30)))
    ends, seed, differences = time.monotonic() + seconds, first, []
    while seed < first + 2 or time.monotonic() < ends:
        print(f"{SEED}={seed}")
        differences += _one(seed, ranks, tmp_path)
        seed += 1
    assert not differences, "\n".join(differences)


def test_a_layer_that_depends_on_the_batch_is_seen(
    ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: a few random cases are enough to find it."""
    monkeypatch.setattr(ModelGroup, "load", functools.partial(ModelGroup.load, batch_dependent=True))
    assert any(_one(seed, ranks, tmp_path) for seed in range(4))
