"""Every served model type equals eager transformers: ragged prefill, mixed chunks, decode, over scattered KV blocks.

The oracle is transformers' own eager forward in fp64, one sequence at a time; transformers' eager forward in fp32 (or
bf16) on the same weights says how far rounding alone goes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from epruntime.models import adapter, text_part
from epruntime.models.batch import ForwardBatch
from epruntime.models.conformance import COVERED, COVERED_ROPE_TYPES
from epruntime.models.loader import load_model
from epruntime.models.small_config import small_config
from epruntime.testing import tiny_models
from epruntime.testing.ragged import (
    SCHEDULE,
    RaggedDriver,
    alone_and_among_others,
    compare,
    local_runtime,
    reference_logits,
    sequences_for,
)

_SLIDING = {"use_sliding_window": True, "sliding_window": 6}
_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
_LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0 + 0.05 * i for i in range(8)],
    "long_factor": [2.0 + 0.5 * i for i in range(8)],
    "original_max_position_embeddings": 16,
}
_MSCALES = {"short_mscale": 1.1, "long_mscale": 1.4}
_DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
_ALTERNATE = ["sliding_attention", "full_attention", "sliding_attention"]

#: Variants beyond each type's tiny default.
VARIANTS: dict[str, list[dict[str, Any]]] = {
    "mixtral": [
        {"sliding_window": 6},
        {"rope_parameters": _LLAMA3},
        {"rope_parameters": _LINEAR},
        {"rope_parameters": _LONGROPE},
        {"rope_parameters": _DYNAMIC, "max_position_embeddings": 16},
        {
            "num_local_experts": 5,
            "hidden_size": 48,
            "head_dim": 20,
            "num_attention_heads": 6,
            "num_key_value_heads": 3,
            "vocab_size": 131,
        },
        {"num_key_value_heads": 1},
        {"num_experts_per_tok": 1},
        {"num_experts_per_tok": 8},
    ],
    "qwen2_moe": [
        {**_SLIDING, "max_window_layers": 1},
        {"mlp_only_layers": [1]},
        {"decoder_sparse_step": 2},
        {"norm_topk_prob": True},
        {"qkv_bias": False},
    ],
    "qwen3_moe": [
        {**_SLIDING, "max_window_layers": 0},
        {"mlp_only_layers": [0]},
        {"norm_topk_prob": True},
        {"attention_bias": True},
        {"head_dim": 32, "rope_parameters": _YARN},
    ],
    "olmoe": [{"norm_topk_prob": True}, {"clip_qkv": 0.5}, {"attention_bias": True}],
    "granitemoe": [
        {"attention_multiplier": 0.25, "logits_scaling": 4.0, "residual_multiplier": 0.5, "embedding_multiplier": 3.0},
        {"attention_bias": True},
    ],
    "granitemoeshared": [{"shared_intermediate_size": 0}],
    "deepseek_v2": [
        {"topk_method": "group_limited_greedy", "routed_scaling_factor": 2.5},
        {"q_lora_rank": 0},
        {"first_k_dense_replace": 0},
        {"rope_parameters": _DYNAMIC, "max_position_embeddings": 16},
    ],
    "deepseek_v3": [
        {"rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0}},
        {"rope_interleave": False},
        {"attention_bias": True},
        {"norm_topk_prob": False},
        {"first_k_dense_replace": 2},
        {
            "num_attention_heads": 6,
            "num_key_value_heads": 6,
            "kv_lora_rank": 20,
            "v_head_dim": 12,
            "n_routed_experts": 6,
            "n_group": 3,
        },
    ],
    "glm4_moe": [{"use_qk_norm": True}, {"attention_bias": True}, {"first_k_dense_replace": 0}],
    "gpt_oss": [
        {"sliding_window": 3, "layer_types": _ALTERNATE},
        {"num_local_experts": 5, "head_dim": 20, "num_attention_heads": 6, "num_key_value_heads": 1},
    ],
    "phimoe": [
        {"sliding_window": 6},
        {"attention_bias": True},
        {"lm_head_bias": True},
        {"rope_parameters": {**_LONGROPE, **_MSCALES}},
    ],
    "ernie4_5_moe": [{"use_bias": True}, {"moe_layer_start_index": 0}],
    "ernie4_5_vl_moe": [
        {"use_bias": True, "moe_num_shared_experts": 0},
        {"mlp_layer_types": ["sparse"] * 3, "tie_word_embeddings": True},
    ],
    "cohere2_moe": [
        {"layer_types": _ALTERNATE},
        {"first_k_dense_replace": 2, "prefix_dense_intermediate_size": 40},
    ],
    "laguna": [
        {"layer_types": _ALTERNATE},
        {"gating": False},
        {"num_attention_heads_per_layer": [4, 2, 8]},
        {
            "layer_types": _ALTERNATE,
            "rope_parameters": {"full_attention": _LONGROPE, "sliding_attention": {"rope_theta": 1e4}},
        },
    ],
    "mellum": [{"layer_types": _ALTERNATE, "sliding_window": 5}, {"mlp_layer_types": ["dense", "sparse", "sparse"]}],
    "dots1": [{"layer_types": _ALTERNATE, "sliding_window": 5}],
    "flint": [{"layer_types": _ALTERNATE, "sliding_window": 5}, {"mlp_only_layers": [0, 1]}],
    "kolibri1": [{"layer_types": _ALTERNATE, "sliding_window": 5}],
    "afmoe": [{"layer_types": _ALTERNATE}, {"num_dense_layers": 0}],
    "hunyuan_v1_moe": [
        {"attention_bias": True},
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 1.0, "alpha": 50.0}},
    ],
    "lara_mini": [{"layer_types": _ALTERNATE, "sliding_window": 3}],
    "mimo_v2_flash": [{"v_head_dim": 8}],
    "minimax": [{"sliding_window": 3}],
    "minimax_m3_vl_text": [{"mlp_layer_types": ["dense", "sparse", "sparse"], "dense_intermediate_size": 40}],
    "internvl": [{**_SLIDING, "max_window_layers": 0}, {"mlp_only_layers": [0]}],
    "gemma4": [{"tie_word_embeddings": True}],
    "qwen3_omni_moe": [{"mlp_only_layers": [0]}, {"tie_word_embeddings": True}],
    "qwen3_omni_moe_thinker": [
        {"mlp_only_layers": [0]},
        {"tie_word_embeddings": True},
        {"head_dim": 32, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [6, 5, 5]}},
    ],
    "qwen3_vl_moe": [{"mlp_only_layers": [0]}, {"tie_word_embeddings": True}],
    "llama4": [{"interleave_moe_layer_step": 2}],
    "step3p7": [
        {"swiglu_limits": [0.0, 0.5, 0.0], "swiglu_limits_shared": [0.0, 0.0, 0.5]},
        {
            "query_pre_attn_scalar": 5,
            "rope_parameters": {
                "full_attention": {**_LLAMA3, "partial_rotary_factor": 0.5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ],
    "minimax_m3_vl": [{"mlp_layer_types": ["dense", "sparse", "sparse"], "dense_intermediate_size": 40}],
    "muse_spark": [{"mlp_layer_types": ["dense", "sparse", "sparse"]}],
    "mistral4": [{"first_k_dense_replace": 0}],
    "mistral_large4": [
        {"kv_source_layers": None, "indexer_types": None, "no_rope_layers": None, "index_topk": 3},
        {
            "kv_source_layers": [0, 0, 0],
            "indexer_types": ["full", "full", "shared"],
            "no_rope_layers": [1, 1, 1],
            "rope_parameters": _DYNAMIC,
            "max_position_embeddings": 16,
            "attention_bias": True,
        },
    ],
    "qwen3_next": [{"mlp_only_layers": [0]}, {"decoder_sparse_step": 2}],
    "llama4_text": [
        {"num_experts_per_tok": 2},
        {"interleave_moe_layer_step": 2},
        {"use_qk_norm": False},
        {"attn_temperature_tuning": False},
        {"no_rope_layers": [1, 1, 1, 1], "attention_chunk_size": 5, "attention_bias": True},
        {"attention_chunk_size": 1},
    ],
    "deepseek_v32": [
        {"index_topk": 3},
        {"index_topk": 64},
        {"index_topk": 5, "index_head_dim": 24, "kv_lora_rank": 20, "num_attention_heads": 6, "num_key_value_heads": 6},
        {"rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0}},
    ],
    "glm_moe_dsa": [{"indexer_types": ["full", "shared", "shared"]}, {"index_topk": 3}],
    "hy_v4": [{"indexer_types": ["full", "shared", "full"]}, {"index_topk": 3}],
    "axk2": [{"index_topk": 3}],
    "longcat_flash": [{"zero_expert_num": 0}, {"router_bias": True}, {"moe_topk": 12}, {"attention_bias": True}],
    "dbrx": [
        {
            "ffn_config": {
                "ffn_hidden_size": 40,
                "moe_num_experts": 5,
                "moe_top_k": 3,
                "moe_normalize_expert_weights": 2.0,
            }
        },
        {"ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 8, "moe_normalize_expert_weights": None}},
    ],
}
TYPES = tiny_models.available(COVERED)
CASES = [
    pytest.param(model_type, overrides, id="-".join([model_type, *overrides]))
    for model_type in TYPES
    for overrides in ({}, *VARIANTS.get(model_type, []))
]
#: Largest error against fp64, as a multiple of eager fp32's own and as a share of the largest logit. The sums run in
#: another order (partitions of keys, experts in k order), so errors are alike, not equal.
TIMES_EAGER, SHARE = 3.0, 2e-6


def _case(model_type: str, overrides: dict[str, Any]) -> dict[str, Any]:
    if overrides.get("q_lora_rank") == 0:  # None, said so that the tiny default does not fill it in
        return {**overrides, "q_lora_rank": None}
    return overrides


@pytest.mark.parametrize(("model_type", "overrides"), CASES)
def test_equals_transformers_fp32(model_type: str, overrides: dict[str, Any], tmp_path: Path) -> None:
    _, reference = tiny_models.build(model_type, **_case(model_type, overrides))
    tiny_models.save(reference, tmp_path)
    model = load_model(tmp_path, dtype="float32", moe=local_runtime())
    found = compare(reference, model)
    bound = TIMES_EAGER * found.eager_error + SHARE * found.largest_logit
    assert found.error <= bound, found
    assert found.largest_logit > 0.5, "logits too flat to prove anything"
    assert found.eager_error < 1e-3 * found.largest_logit, f"the oracle itself is unsteady: {found}"


def _runs_as_loaded(path: Path) -> bool:
    """False: transformers itself keeps some weights in fp32 and then multiplies them with bf16 (5.16, deepseek_v4)."""
    model = text_part.from_pretrained(path, adapter.read_config(path), "auto")
    try:
        model(torch.arange(3, 9)[None])
    except RuntimeError as error:
        return "same dtype" not in str(error)
    return True


@pytest.mark.parametrize("model_type", TYPES)
def test_bf16_is_as_near_as_eager_bf16(model_type: str, tmp_path: Path) -> None:
    _, reference = tiny_models.build(model_type, dtype=torch.bfloat16)
    tiny_models.save(reference, tmp_path)
    model = load_model(tmp_path, dtype="auto", moe=local_runtime())
    assert model.info.dtype == "bfloat16"
    if not _runs_as_loaded(tmp_path):
        pytest.skip(f"transformers {transformers.__version__} cannot run the bf16 checkpoint that it has saved")
    # three seeds: a router that flips moves one's median
    found = [compare(reference, model, seed=seed) for seed in (1, 2, 3)]
    assert tuple(model.forward(ForwardBatch.idle()).shape) == (0, model.info.vocab_size)
    error, eager = (sum(getattr(c, name) for c in found) for name in ("median_error", "median_eager_error"))
    assert error <= 1.5 * eager + 1e-3 * found[0].largest_logit, found


def test_every_claimed_feature_is_reached() -> None:
    """A row of the table claims no feature that its cases do not have, and none that they have is left out."""
    from epruntime.models import adapter, loader
    from epruntime.models.probe import OR

    rope: set[str] = set()
    for model_type in TYPES:
        reached: set[str] = set()
        for overrides in ({}, *VARIANTS.get(model_type, [])):
            config = small_config(model_type, **_case(model_type, overrides))
            model = adapter.build_meta_model(config, torch.float32)
            features = loader.features_of_model(model, config)
            reached |= {f for f in features if OR not in f}  # what either of two tests covers needs none of its own
            rope |= adapter.rope_types(model)
        assert reached == COVERED[model_type], model_type
    if adapter.version() < (5, 24):
        rope.add("ntk_alpha")  # still named "dynamic"
    assert rope == COVERED_ROPE_TYPES


def test_idle_rank_and_no_logits(tmp_path: Path) -> None:
    """One padding row and no sequence runs through every layer, changes no cache slot and gives no logits."""
    for model_type in ("mixtral", "deepseek_v3", "gpt_oss"):
        _, reference = tiny_models.build(model_type)
        path = tiny_models.save(reference, tmp_path / model_type)
        model = load_model(path, dtype="float32", moe=local_runtime())
        driver = RaggedDriver(model)
        before = [layer.k_cache_NBKD.clone() for layer in model.layers]
        logits = model.forward(ForwardBatch.idle())
        assert tuple(logits.shape) == (0, model.info.vocab_size)
        assert logits.dtype == torch.float32
        for layer, old in zip(model.layers, before, strict=True):
            assert torch.equal(layer.k_cache_NBKD.isnan(), old.isnan())
        driver.step([("a", torch.arange(3, 9))])


def test_padding_is_never_routed_nor_written(tmp_path: Path) -> None:
    _, reference = tiny_models.build("qwen2_moe")
    tiny_models.save(reference, tmp_path)
    runtime = local_runtime()
    model = load_model(tmp_path, dtype="float32", moe=runtime)
    driver = RaggedDriver(model)
    driver.step([("a", torch.arange(3, 9)), ("b", torch.arange(20, 25))])
    written = (~model.layers[0].k_cache_NBKD[:, :, 0, 0].isnan()).sum().item()
    assert written == 11
    counts = runtime.stats.snapshot()
    routed = sum(sum(layer["expert_tokens"]) for layer in counts["layers"].values())
    assert routed == 11 * model.info.top_k * model.info.num_layers


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    "model_type",
    tiny_models.available(
        (
            "mixtral",
            "qwen2_moe",
            "deepseek_v3",
            "gpt_oss",
            "llama4_text",
            "longcat_flash",
            "dbrx",
            "deepseek_v32",
            "hy_v4",
        )
    ),
)
def test_result_does_not_depend_on_batch_mates(model_type: str, threads: int, tmp_path: Path) -> None:
    """Bit for bit, in strict mode: one sequence alone, and the same in chunks among others."""
    _, reference = tiny_models.build(model_type)
    tiny_models.save(reference, tmp_path)
    model = load_model(tmp_path, dtype="float32", moe=local_runtime())
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        alone, among_others = alone_and_among_others(model)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(among_others, alone)


@pytest.mark.parametrize("model_type", ["mixtral", "gpt_oss"])
def test_a_wrong_window_is_seen(model_type: str, tmp_path: Path) -> None:
    """Negative control: the comparison fails when a layer's window is off by one, or a block table is wrong."""
    import dataclasses

    _, reference = tiny_models.build(model_type, sliding_window=6)
    tiny_models.save(reference, tmp_path)
    model = load_model(tmp_path, dtype="float32", moe=local_runtime())
    layer = model.layers[0]
    view = dataclasses.replace(layer.call.visibility, window=7)
    layer.call = dataclasses.replace(layer.call, visibility=view)
    found = compare(reference, model)
    assert found.error > 100 * (TIMES_EAGER * found.eager_error + SHARE * found.largest_logit)


def test_reference_logits_are_per_sequence() -> None:
    _, reference = tiny_models.build("mixtral")
    tokens = sequences_for(128, SCHEDULE, seed=1)
    logits = reference_logits(reference, tokens, torch.float64)
    assert {name: tuple(x.shape) for name, x in logits.items()} == {n: (len(t), 128) for n, t in tokens.items()}
