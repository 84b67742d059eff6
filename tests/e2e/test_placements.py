"""Wherever experts lie, and however often: the same bits, the same load by logical expert, and no byte read twice."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from epruntime import LLM
from epruntime.engine.ranks import Ranks
from epruntime.errors import ConfigError
from epruntime.moe.placement import placement_for
from epruntime.testing.invariance import Answer, first_difference, mixed_requests
from epruntime.testing.tiny_models import build, save

FAMILIES = [
    # transposed weights and a bias; experts on 2 and 3 ranks in unequal numbers
    ("gpt_oss", "bfloat16", {"num_local_experts": 7, "num_experts_per_tok": 3}, 7),
    # fewer experts than ranks
    ("mixtral", "float32", {"num_local_experts": 2}, 2),
    # shared experts, and a layer without experts
    ("deepseek_v3", "float32", {}, 8),
]
#: EP size, expert_placement, num_redundant_experts
PLACES = [(1, "linear", 0), (1, "linear", 3), (2, "round_robin", 0), (2, "linear", 3), (3, "linear", 0)]
PLACES += [(3, "round_robin", 5)]
OPTIONS: dict[str, Any] = {
    "block_size": 4, "num_kv_blocks": 300, "max_num_batched_tokens": 48, "max_num_seqs": 12, "max_model_len": 128,
    # the work is then the same in every run: nothing is found in a cache, nothing computed in vain
    "enable_prefix_caching": False, "pipeline_depth": 1,
}  # fmt: skip


def _tensor_bytes(path: Path) -> tuple[int, int]:
    """Bytes of the checkpoint's tensors: of routed experts, and of all others."""
    experts = others = 0
    with safe_open(path / "model.safetensors", "pt") as source:
        for name in source.keys():  # noqa: SIM118
            size = source.get_tensor(name).nbytes
            routed = ".experts." in name
            experts, others = experts + size * routed, others + size * (not routed)
    return experts, others


@pytest.mark.parametrize(("model_type", "dtype", "overrides", "num_experts"), FAMILIES, ids=[f[0] for f in FAMILIES])
def test_same_bits_wherever_experts_lie(
    model_type: str, dtype: str, overrides: dict[str, Any], num_experts: int, ranks: Ranks, tmp_path: Path
) -> None:
    _, model = build(model_type, dtype=getattr(torch, dtype), **overrides)
    path = save(model, tmp_path)
    expert_bytes, other_bytes = _tensor_bytes(path)
    requests = mixed_requests(9, vocab_size=model.config.vocab_size, max_tokens=8)
    prompts: list[Any] = [{"prompt_token_ids": list(r.prompt)} for r in requests]
    expected: list[Answer] = []
    chosen: dict[str, list[int]] = {}
    for size, strategy, redundant in PLACES:
        options = {**OPTIONS, "expert_placement": strategy, "num_redundant_experts": redundant}
        with LLM(str(path), ranks=ranks, expert_parallel_size=size, dtype=dtype, **options) as llm:
            answers = [Answer.of(o) for o in llm.generate(prompts, [r.params for r in requests], use_tqdm=False)]
            info = llm.info()
        where = f"EP {size}, {strategy}, {redundant} redundant"
        expected = expected or answers
        assert first_difference(answers, expected) is None, f"{where}: {first_difference(answers, expected)}"
        facts = info["engine"]
        assert (facts["expert_placement"], facts["num_redundant_experts"]) == (strategy, redundant)

        placement = placement_for(num_experts, size, strategy, redundant)
        layers = [rank["moe"]["layers"] for rank in info["ranks"]]
        for i, rank in enumerate(info["ranks"]):
            local = placement.local_logical(i)
            assert {tuple(layer["local_experts"]) for layer in layers[i].values()} == {local}
            assert rank["load"]["local_experts"] == len(local)
            wanted = other_bytes + expert_bytes // num_experts * len(set(local))
            assert (rank["load"]["read_bytes"], rank["load"]["needed_bytes"]) == (wanted, wanted), where
        for name in layers[0]:
            counts = [sum(c) for c in zip(*(layer[name]["expert_tokens"] for layer in layers), strict=True)]
            assert chosen.setdefault(name, counts) == counts, f"{where}: load by logical expert"
            assert sum(layer[name]["pairs_received"] for layer in layers) == sum(counts)
            on_copies = [layer[name]["replica_pairs"] for layer in layers]
            holders = [any(placement.replica_slots(i)) for i in range(size)]
            assert [n > 0 for n in on_copies] == holders, f"{where}: pairs on copies {on_copies}"
            # about an n-th of an expert's pairs fall to each of its n copies
            share = sum(n * (1 - 1 / len(placement.replicas[e])) for e, n in enumerate(counts))
            assert abs(sum(on_copies) - share) <= 0.25 * share


@pytest.mark.parametrize("preflight", [True, False])
def test_copies_without_sense_are_refused(preflight: bool, ranks: Ranks, tmp_path: Path) -> None:
    """By the coordinator before a byte is read, or by the ranks; and they can be used afterwards."""
    path = str(save(build("mixtral")[1], tmp_path))
    options = {**OPTIONS, "preflight": preflight, "expert_parallel_size": 2}
    words = "num_redundant_experts=57 for 8 experts per layer on 2 ranks: must be in 0..56, and 8 put every expert on"
    with pytest.raises(ConfigError, match=re.escape(words)):
        LLM(path, ranks=ranks, num_redundant_experts=57, **options)
    with pytest.raises(ConfigError, match="num_redundant_experts=-1: must be at least 0"):
        LLM(path, ranks=ranks, num_redundant_experts=-1, **options)
    with pytest.raises(ConfigError, match="expert_placement='random': must be one of linear, round_robin"):
        LLM(path, ranks=ranks, expert_placement="random", **options)
    with LLM(path, ranks=ranks, num_redundant_experts=9, **options) as llm:
        assert len(llm.generate([3, 4, 5], use_tqdm=False)[0].outputs[0].token_ids) > 0
