"""A small configuration of any Mixture-of-Experts type: what the survey builds on the meta device, and tests for real.

One table of values serves all families; a configuration takes those that it has fields for. What a family needs
beyond it is in a second table, so that a type which a later transformers brings is usually built without a new line.
Of a type that is served in part (`conformance.PARTLY`), the configuration is one that is served.
"""

from __future__ import annotations

from typing import Any

from transformers.models.auto.configuration_auto import CONFIG_MAPPING

#: Values for every family; a configuration takes those that it has fields for.
_BASE: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "max_position_embeddings": 512,
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "moe_num_experts": 8,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_k": 2,
    "moe_topk": 2,
    "top_k_experts": 2,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "shared_expert_intermediate_size": 32,
    "shared_intermediate_size": 32,
    "n_group": 2,
    "topk_group": 1,
    "num_expert_group": 2,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "qk_head_dim": 24,
    "index_n_heads": 16,
    "index_head_dim": 16,
    "index_topk": 8,
    "first_k_dense_replace": 1,
    "moe_layer_start_index": 1,
    "num_dense_layers": 1,
    "mlp_only_layers": [],
    "sliding_window": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "mamba_d_state": 8,
    "mamba_n_heads": 4,
    "mamba_d_head": 32,
    "mamba_n_groups": 1,
    "mamba_expand": 2,
    "use_mamba_kernels": False,
    "num_nextn_predict_layers": 0,
    "mtp_num_hidden_layers": 0,
    "num_mtp_modules": 0,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
    "output_router_logits": False,
}
#: Fields that switch a feature on: only given a value where the family's default has one.
_OPTIONAL = ("sliding_window", "q_lora_rank", "mlp_only_layers")
#: Names of one field in different families: some configurations accept several, the last one wins.
_ALIASES = (
    ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
    ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "top_k_experts"),
)
_LATENT: dict[str, Any] = {"num_key_value_heads": 4, "head_dim": 8}
_LATENT_TYPES = (
    "axk1",
    "axk2",
    "deepseek_v2",
    "deepseek_v3",
    "deepseek_v32",
    "glm4_moe_lite",
    "glm_moe_dsa",
    "longcat_flash",
    "sarvam_mla",
)
_ALTERNATING = {"layer_types": ["sliding_attention", "full_attention", "full_attention"]}
_ALL_FULL = {"layer_types": ["full_attention"] * 3}
_PER_TYPE: dict[str, dict[str, Any]] = {
    **dict.fromkeys(_LATENT_TYPES, _LATENT),
    "gpt_oss": _ALTERNATING,
    **dict.fromkeys(("lara_mini", "lfm2_moe", "minimax", "qwen3_5_moe_text", "qwen3_next"), _ALL_FULL),
    "beam": {"mlp_layer_types": ["dense", "sparse", "sparse"]},
    "dbrx": {
        "d_model": 64,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
        "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 8, "moe_top_k": 2},
    },
    "deepseek_v4": {"layer_types": ["sliding_attention"] * 3, "mlp_layer_types": ["hash_moe", "moe", "moe"]},
    "dots3_note_text": _LATENT,
    "doge": {"is_moe": True, "num_experts": 16},
    "gemma4_text": {
        **_ALTERNATING,
        "enable_moe_block": True,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 128,
        "num_kv_shared_layers": 0,
        "global_head_dim": 32,
    },
    "granitemoehybrid": {"layer_types": ["attention"] * 3},
    "jamba": {"attn_layer_period": 1, "attn_layer_offset": 0, "expert_layer_period": 2, "expert_layer_offset": 1},
    "llama4_text": {
        "num_hidden_layers": 4,
        "num_experts_per_tok": 1,
        "intermediate_size_mlp": 96,
        "interleave_moe_layer_step": 1,
        "attention_chunk_size": 8,
        "floor_scale": 4,
    },
    "zaya": {"num_experts_per_tok": 1},
    "longcat_flash": {**_LATENT, "num_layers": 2, "zero_expert_num": 4, "moe_topk": 3},
}


def _has(config: Any, name: str) -> bool:
    try:
        return hasattr(config, name)
    except Exception:  # noqa: BLE001  a property that needs other fields first: the name exists
        return True


def small_config(model_type: str, **overrides: Any) -> Any:
    """A small configuration of a type that transformers has.

    Args:
        overrides: fields that win over the tables; None leaves a field at the family's default.
    """
    kind = CONFIG_MAPPING[model_type]
    defaults = kind()
    values = {name: value for name, value in _BASE.items() if _has(defaults, name)}
    for name in _OPTIONAL:
        if name in values and getattr(defaults, name, None) is None:
            del values[name]
    for group in _ALIASES:
        for name in overrides.keys() & set(group):
            values |= {alias: overrides[name] for alias in group if alias in values}
    values |= {"initializer_range": 0.3, **_PER_TYPE.get(model_type, {}), **overrides}
    if "num_layers" in values:
        values.pop("num_hidden_layers", None)
    return kind(**{name: value for name, value in values.items() if value is not None})
