"""Memory of each rank, told before anything is loaded. Expected values: transformers' own modules, and arithmetic."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from epruntime.config import EngineConfig
from epruntime.engine.memory_need import LIBRARY_BYTES, memory_needs
from epruntime.errors import ConfigError
from epruntime.models.info import KVLayerInfo, ModelInfo
from epruntime.models.loader import inspect_model
from epruntime.testing import tiny_models

GIB = 2**30
INFO = ModelInfo(
    architecture="X", model_type="x", dtype="bfloat16", vocab_size=1000, hidden_size=64, num_layers=2,
    max_position_embeddings=4096, num_experts=8, top_k=2, moe_layers=(0, 1), eos_token_ids=(),
    kv_layers=(KVLayerInfo(num_heads=2, key_dim=16, value_dim=16),) * 2, num_parameters=0, checkpoint_bytes=0,
    shared_bytes=1000, expert_bytes=((8, 10), (8, 20)),
)  # fmt: skip


def _config(**options: object) -> EngineConfig:
    return EngineConfig.from_kwargs(model="m", expert_parallel_size=3, **options)


@pytest.mark.parametrize("model_type", tiny_models.available(["mixtral", "gpt_oss", "deepseek_v3", "qwen3_moe"]))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_are_what_the_modules_hold(model_type: str, dtype: str, tmp_path: Path) -> None:
    _, model = tiny_models.build(model_type)
    tiny_models.save(model, tmp_path)
    info = inspect_model(tmp_path, dtype=dtype)
    if dtype == "bfloat16":
        import torch
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    experts = [module for module in model.modules() if hasattr(module, "has_gate")]
    in_experts = {id(p): p for module in experts for p in module.parameters()}
    shared = sum(p.nbytes for p in model.parameters() if id(p) not in in_experts)
    assert info.weight_bytes(lambda count: 0) == shared
    assert info.weight_bytes(lambda count: count) == shared + sum(p.nbytes for p in in_experts.values())
    one = sum(p[0].nbytes for p in in_experts.values())
    assert info.weight_bytes(lambda count: 3) == shared + 3 * one


def test_survives_the_wire() -> None:
    assert ModelInfo.from_dict(INFO.to_dict()) == INFO


def test_experts_are_shared_out_as_ranks_load_them() -> None:
    needs = memory_needs(_config(), INFO, ["a"] * 3, [GIB] * 3)
    assert [need.weights for need in needs] == [1000 + 3 * 30, 1000 + 3 * 30, 1000 + 2 * 30]


def test_copies_of_experts_take_memory_too() -> None:
    needs = memory_needs(_config(num_redundant_experts=5), INFO, ["a"] * 3, [GIB] * 3)
    assert [need.weights for need in needs] == [1000 + 5 * 30, 1000 + 4 * 30, 1000 + 4 * 30]  # 8 + 5 on 3 ranks
    (need,) = memory_needs(_config(num_redundant_experts=3), INFO, ["a"], [GIB])
    assert need.weights == 1000 + 11 * 30  # also where a rank holds an expert twice
    with pytest.raises(
        ConfigError, match=r"num_redundant_experts=1000 for 8 experts .* on 3 ranks: must be in 0\.\.88"
    ):
        memory_needs(_config(num_redundant_experts=1000), INFO, ["a"] * 3, [GIB] * 3)


def test_kv_cache_as_configured() -> None:
    per_token = 2 * 2 * (16 + 16) * 2  # layers x heads x (key + value) x bytes
    (need, *_) = memory_needs(_config(num_kv_blocks=10), INFO, ["a"] * 3, [GIB] * 3)
    assert need.kv == 10 * 16 * per_token
    (need, *_) = memory_needs(_config(kv_cache_memory_gb=0.5), INFO, ["a"] * 3, [GIB] * 3)
    assert GIB // 2 - 16 * per_token < need.kv <= GIB // 2
    # the default: what 4 sequences of 33 tokens need, the last of which is never computed
    (need, *_) = memory_needs(_config(max_num_seqs=4, max_model_len=33), INFO, ["a"] * 3, [GIB] * 3)
    assert need.kv == 4 * 2 * 16 * per_token


def test_the_default_kv_cache_is_a_quarter_of_what_is_left_by_rank_at_most() -> None:
    info = replace(INFO, shared_bytes=100 << 20)
    needs = memory_needs(_config(max_num_seqs=512, max_num_batched_tokens=512), info, ["a", "a", "b"], [GIB, GIB, GIB])
    left = GIB - sum(need.weights for need in needs[:2])
    per_block = 16 * 256
    assert needs[0].kv == left // 4 // 2 // per_block * per_block
    assert needs[2].kv == (GIB - needs[2].weights) // 4 // per_block * per_block
    (none, *_) = memory_needs(_config(), replace(info, shared_bytes=GIB), ["a"] * 3, [GIB] * 3)
    assert none.kv == 0  # no room is told by the weights


def test_rows_and_logits_are_bounded_by_the_configuration() -> None:
    (need, *_) = memory_needs(_config(max_num_batched_tokens=100, max_num_seqs=10), INFO, ["a"] * 3, [GIB] * 3)
    assert need.exchange == 2 * 300 * 3 * 64 * 2
    assert need.libraries == LIBRARY_BYTES + 10 * 1000 * 4
    (need, *_) = memory_needs(_config(exchange_budget_tokens=50), INFO, ["a"] * 3, [GIB] * 3)
    assert need.exchange == 2 * 50 * 3 * 64 * 2
