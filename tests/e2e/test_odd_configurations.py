"""Random configurations, several switches away from each type's small one, against transformers in fp64; and bit for
bit the same alone and in chunks among others.

A drawn configuration that transformers itself cannot compute is drawn again. One that is refused is a failure: the
table holds nothing that should be.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from epruntime.models import text_part
from epruntime.models.conformance import COVERED
from epruntime.models.loader import load_model
from epruntime.models.small_config import small_config
from epruntime.testing import tiny_models
from epruntime.testing.ragged import (
    alone_and_among_others,
    compare,
    local_runtime,
)

_ROPE = {"rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
#: Field -> values that it may take, where a type has it and its small configuration gives it a value.
VALUES: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("hidden_act", "hidden_activation"), ("gelu", "relu", "relu2", "quick_gelu", "gelu_pytorch_tanh")),
    **dict.fromkeys(
        ("attention_bias", "mlp_bias", "use_bias", "qkv_bias", "lm_head_bias", "norm_topk_prob", "use_qk_norm"),
        (True, False),
    ),
    **dict.fromkeys(("tie_word_embeddings", "rope_interleave", "mup_enabled", "use_expert_bias"), (True, False)),
    **dict.fromkeys(("routed_scaling_factor", "route_scale", "moe_routed_scaling_factor"), (0.7, 3.1)),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"), (0, 1, 2)),
    **dict.fromkeys(("shared_expert_intermediate_size", "moe_intermediate_size"), (7, 32)),
    **dict.fromkeys(("attention_dropout", "router_jitter_noise", "input_jitter_noise"), (0.5,)),
    **dict.fromkeys(
        ("attention_multiplier", "residual_multiplier", "logits_scaling", "embedding_multiplier"), (0.3, 2)
    ),
    **dict.fromkeys(("rms_norm_eps", "layer_norm_eps", "norm_eps"), (0.1, 1e-6)),
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers"), (0, 2)),
    **dict.fromkeys(("decoder_sparse_step", "interleave_moe_layer_step"), (1, 2)),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "top_k_experts"), (1, 2, 3)),
    "attention_chunk_size": (1, 3, 100),
    "expert_selection_fn": ("softmax", "sigmoid"),
    "final_logit_softcapping": (2.0, 30.0),
    "floor_scale": (1, 7),
    "hc_mult": (1, 2),
    "index_topk": (1, 3, 64),
    "kv_lora_rank": (9, 16),
    "logit_scale": (0.9,),
    "moe_apply_router_weight_on_input": (True, False),
    "moe_layer_start_index": (0, 2),
    "moe_router_logit_softcapping": (2.0,),
    "pad_token_id": (0, 127),
    "scoring_func": ("softmax", "sigmoid", "sqrtsoftplus"),
    "shared_expert_combination_strategy": ("sum", "average"),
    "sliding_window": (1, 3, 100),
    "swiglu_limit": (0.5, 7.0),
    "topk_method": ("greedy", "group_limited_greedy"),
    "vocab_size": (131,),
    "zero_expert_num": (1, 4),
}
#: Several fields at once, for types that have the first.
TOGETHER: tuple[dict[str, Any], ...] = (
    {"n_group": 1, "topk_group": 1},
    {"n_group": 4, "topk_group": 3},
    {"rope_parameters": {**_ROPE, "rope_type": "yarn", "attention_factor": 0.6, "truncate": False}},
    {"rope_parameters": {**_ROPE, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}},
    {"rope_parameters": {**_ROPE, "rope_type": "linear"}},
)
SWITCHES, CONFIGURATIONS, TRIES = 6, 3, 40
TIMES_EAGER, SHARE = 3.0, 2e-6
#: Types that `make test` runs, with one configuration each.
SLICE = ("afmoe", "deepseek_v3", "glm_moe_dsa", "gpt_oss", "laguna", "llama4_text", "longcat_flash", "qwen2_moe")
CASES = [
    pytest.param(t, seed, id=f"{t}-{seed}", marks=() if t in SLICE and not seed else pytest.mark.full)
    for t in tiny_models.distinct(COVERED)
    for seed in range(CONFIGURATIONS)
]


def _choices(model_type: str) -> list[dict[str, Any]]:
    config = text_part.language_config(small_config(model_type))

    def has(name: str) -> bool:
        try:
            return getattr(config, name, None) is not None
        except Exception:  # noqa: BLE001  a property that has no one value, in a type with several kinds of layers
            return False

    nested = any(isinstance(x, dict) for x in (getattr(config, "rope_parameters", None) or {}).values())
    together = [t for t in TOGETHER if has(next(iter(t))) and not ("rope_parameters" in t and nested)]
    return [{name: value} for name, values in VALUES.items() if has(name) for value in values] + together


def _drawn(model_type: str, seed: int) -> Iterator[dict[str, Any]]:
    """Configurations without end, the same for a seed."""
    generator, choices = random.Random(f"{model_type} {seed}"), _choices(model_type)
    while True:
        found: dict[str, Any] = {}
        for choice in generator.sample(choices, min(SWITCHES, len(choices))):
            found |= choice
        yield found


def _build(model_type: str, seed: int) -> tuple[dict[str, Any], Any]:
    """The first drawn configuration that transformers computes, and its model."""
    for _, overrides in zip(range(TRIES), _drawn(model_type, seed), strict=False):
        try:
            _, model = tiny_models.build(model_type, seed, **overrides)
            with torch.inference_mode():
                logits = model(input_ids=torch.arange(3, 12)[None], use_cache=False).logits
        except Exception:  # noqa: BLE001  values that do not fit each other raise what the library likes
            continue
        if bool(logits.isfinite().all()) and logits.abs().max() > 0.2:
            return overrides, model
    raise LookupError(f"{model_type}: none of {TRIES} configurations runs")


@pytest.mark.parametrize(("model_type", "seed"), CASES)
def test_a_random_configuration_equals_transformers(model_type: str, seed: int, tmp_path: Path) -> None:
    overrides, reference = _build(model_type, seed)
    tiny_models.save(reference, tmp_path)
    model = load_model(tmp_path, dtype="float32", moe=local_runtime())
    # a score within rounding of another may choose another expert or key: not with every sequence
    found = [compare(reference, model, seed=tokens) for tokens in (1, 2)]
    assert any(c.error <= TIMES_EAGER * c.eager_error + SHARE * c.largest_logit for c in found), (overrides, found)
    alone, among_others = alone_and_among_others(model)
    assert torch.equal(alone, among_others), overrides
