"""The invariance contract over every served type: tokens and log-probabilities are the same bits in any company.

Each case makes a tiny random model, runs requests of mixed parameters each alone on one rank, and then the same in
other company, on 1 to 4 ranks, with one compute thread or two. `make test` runs a case of each group of families,
`make test-all` every type under every setting: all but one in fp32 or bf16 by turns, half of each with round dimensions
and half with odd ones, and that one in the other dtype with the other dimensions.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from epruntime.engine.model_group import ModelGroup
from epruntime.engine.ranks import Ranks
from epruntime.models import text_part
from epruntime.models.conformance import COVERED
from epruntime.testing.invariance import Setting, first_difference, mixed_requests, run
from epruntime.testing.odd_shapes import odd_shape
from epruntime.testing.tiny_models import available, build, distinct, save

#: Requests whose answers are compared.
COMPARED, FEWER = 9, 5
ALONE = Setting(
    name="alone",
    order="alone",
    options={"enable_prefix_caching": False, "pipeline_depth": 1, "num_kv_blocks": 8},
)
SETTINGS = (
    Setting(
        name="among 64",
        crowd=55,
        threads=2,
        options={"num_kv_blocks": 640, "max_num_batched_tokens": 1500},
        must={"rows_per_step": 40},
    ),
    Setting(
        name="in chunks, pairs on copies",
        size=2,
        threads=2,
        options={
            "num_kv_blocks": 200,
            "block_size": 4,
            "max_num_batched_tokens": 7,
            "max_num_seqs": 5,
            "num_redundant_experts": 3,
        },
        must={"chunks": 10, "mixed_steps": 5, "ranks_at_work": 2, "replica_pairs": 20},
    ),
    Setting(
        name="preempted, exchanged in rounds",
        size=3,
        order="reversed",
        crowd=6,
        options={
            "num_kv_blocks": 33,
            "block_size": 3,
            "max_num_batched_tokens": 31,
            "max_num_seqs": 6,
            "exchange_budget_tokens": 2,
            "expert_placement": "round_robin",
        },
        must={"preemptions": 1, "prefix_hit_tokens": 1, "more_rounds": 50, "ranks_at_work": 3},
    ),
    Setting(
        name="on four ranks",
        size=4,
        crowd=7,
        options={"num_kv_blocks": 64, "pipeline_depth": 1, "enable_prefix_caching": False},
        must={"ranks_at_work": 4},
    ),
)
IN_CHUNKS = SETTINGS[1]
DTYPES, SHAPES = ("float32", "bfloat16"), ("round", "odd")
#: (type, dtype, dimensions): what `make test` runs; the rest is marked `full`.
SLICE = {
    ("mixtral", "float32", "odd"),
    ("deepseek_v3", "bfloat16", "odd"),
    ("gpt_oss", "bfloat16", "round"),
    ("gemma4_text", "float32", "odd"),
    ("llama4_text", "bfloat16", "odd"),
    ("longcat_flash", "float32", "round"),
    ("dbrx", "bfloat16", "odd"),
    ("glm_moe_dsa", "float32", "odd"),
    ("deepseek_v4", "bfloat16", "round"),
    ("qwen3_next", "float32", "odd"),
}
#: Every type (hy_v4_vl has the layers of hy_v4), in fp32 and bf16 by turns, half of each with round dimensions and half
#: with odd ones.
BY_TURNS = {
    (model_type, DTYPES[i // 2 % 2], SHAPES[(i + i // 2) % 2])
    for i, model_type in enumerate(sorted(set(distinct(COVERED)) - {"hy_v4_vl"}))
}
CASES = [
    pytest.param(*case, id="-".join(case), marks=() if case in SLICE else pytest.mark.full)
    for case in sorted(
        SLICE.intersection((t, d, s) for t in available(COVERED) for d in DTYPES for s in SHAPES) | BY_TURNS
    )
]


#: Of every type what BY_TURNS leaves out: the other dtype, with the other dimensions, and a setting.
_OTHER = dict([DTYPES, DTYPES[::-1], SHAPES, SHAPES[::-1]])
OTHERWISE = [
    pytest.param(*case, id="-".join(case), marks=pytest.mark.full)
    for case in sorted({(model_type, _OTHER[dtype], _OTHER[shape]) for model_type, dtype, shape in BY_TURNS} - SLICE)
]


def _make(model_type: str, dtype: str, shape: str, folder: Path) -> tuple[str, int]:
    """A checkpoint, and its vocabulary's size."""
    overrides: dict[str, Any] = odd_shape(model_type) if shape == "odd" else {}
    config, model = build(model_type, dtype=getattr(torch, dtype), **overrides)
    return str(save(model, folder)), text_part.language_config(config).vocab_size


def _differences(
    settings: Sequence[Setting], case: tuple[str, str, str], ranks: Ranks, folder: Path, *, compared: int = COMPARED
) -> list[str]:
    """What differs from each request alone, in words."""
    model_type, dtype, shape = case
    path, vocab_size = _make(model_type, dtype, shape, folder)
    requests = mixed_requests(64, vocab_size=vocab_size)
    expected = run(path, ranks, ALONE, requests, compared=compared, dtype=dtype)
    assert expected.happened["experts_at_work"] > 2
    differences = []
    for setting in settings:
        found = run(path, ranks, setting, requests, compared=compared, dtype=dtype)
        if (difference := first_difference(found.answers, expected.answers)) is not None:
            differences.append(f"{setting.name}: {difference}")
    return differences


@pytest.mark.parametrize(("model_type", "dtype", "shape"), CASES)
def test_same_bits_in_any_company(model_type: str, dtype: str, shape: str, ranks: Ranks, tmp_path: Path) -> None:
    case = (model_type, dtype, shape)
    settings = [setting for setting in SETTINGS if case in SLICE or setting is not IN_CHUNKS]
    differences = _differences(settings, case, ranks, tmp_path)
    assert not differences, "\n".join(differences)


@pytest.mark.parametrize(("model_type", "dtype", "shape"), OTHERWISE)
def test_same_bits_in_the_other_dtype(model_type: str, dtype: str, shape: str, ranks: Ranks, tmp_path: Path) -> None:
    differences = _differences([IN_CHUNKS], (model_type, dtype, shape), ranks, tmp_path, compared=FEWER)
    assert not differences, "\n".join(differences)


@pytest.mark.parametrize(("model_type", "dtype"), [("mixtral", "float32"), ("deepseek_v3", "bfloat16")])
def test_a_layer_that_depends_on_the_batch_is_seen(
    model_type: str, dtype: str, ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: the last bit of one layer's output, turned over in steps of several rows, is enough."""
    path, vocab_size = _make(model_type, dtype, "round", tmp_path)
    requests = mixed_requests(COMPARED, vocab_size=vocab_size)
    expected = run(path, ranks, ALONE, requests, compared=COMPARED, dtype=dtype)
    monkeypatch.setattr(ModelGroup, "load", functools.partial(ModelGroup.load, batch_dependent=True))
    together = Setting(name="together", options={"num_kv_blocks": 64})
    found = run(path, ranks, together, requests, compared=COMPARED, dtype=dtype)
    assert first_difference(found.answers, expected.answers) is not None
