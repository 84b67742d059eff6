"""A small configuration of any Mixture-of-Experts type: what the survey builds on the meta device, and tests for real.

One table of values serves all families; a configuration takes those that it has fields for. What a family needs
beyond it is in a second table, so that a type which a later transformers brings is usually built without a new line.
Of a type that is served in part (`conformance.PARTLY`), the configuration is one that is served.
"""

from __future__ import annotations

from typing import Any

from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from epruntime.models import text_part
from epruntime.models.conformance import LANGUAGES

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
#: Of the other models in a multimodal configuration, which are made, saved, and left out by a server.
_TOWER: dict[str, Any] = {
    "depth": 1,
    "num_hidden_layers": 1,
    "num_layers": 1,
    "hidden_size": 32,
    "embed_dim": 32,
    "num_heads": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 32,
    "patch_size": 4,
    "image_size": 16,
    "out_hidden_size": 64,
    "adapter_out_dim": 64,
    "vision_output_dim": 32,
    "projector_input_dim": 32,
    "projector_output_dim": 32,
    "projector_hidden_size": 32,
    "deepstack_visual_indexes": [0],
    "downsample_hidden_size": 8,
    "decoder_dim": 32,
    "num_code_groups": 2,
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
    "mistral4",
    "mistral_large4_text",
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
    "dots3_note_text": {
        **_LATENT,
        # of layers with a sliding window
        "swa_num_attention_heads": 2,
        "swa_num_key_value_heads": 2,
        "swa_kv_lora_rank": 24,
        "swa_q_lora_rank": 32,
        "swa_head_dim": 32,
        "swa_qk_nope_head_dim": 24,
        "swa_qk_rope_head_dim": 8,
        "swa_v_head_dim": 16,
    },
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse", "sparse"]},
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
    "ernie4_5_vl_moe_text": {
        "moe_intermediate_size": [32, 16],  # of experts for text, and of those for images
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [3, 3, 2]},
    },
    "glm5_next_text": {**_LATENT, "index_topk": 16, "qk_rope_head_dim": 0, "qk_head_dim": 16},
    "glm4v_moe_text": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}},
    "hy_v4_vl_text": {
        **_LATENT,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]},
    },
    # no rotary embedding in two layers; one attends to another's latents, and one to the keys that another one selects
    "mistral_large4_text": {
        **_LATENT,
        "no_rope_layers": [1, 0, 0],
        "kv_source_layers": [0, 1, 1],
        "indexer_types": ["full", "shared", "full"],
    },
    "dots3_note_vision_encoder": {"mlp_layer_types": ["dense"], "adapter_in_dim": 32},
    "dots3_note_audio_encoder": {"adapter_input_size": 32},
    "muse_spark_audio": {"patch_sizes": [4], "hidden_sizes": [32], "depths": [1]},
    "qwen3_omni_moe_thinker": {"initializer_range": 0.3, "vision_start_token_id": 151652},
    # three of the fields are read by models, and not declared by configurations
    "qwen3_omni_moe_talker_text": {"shared_expert_intermediate_size": 32, "num_experts": 4, "vocab_size": 64},
    "qwen3_omni_moe_talker_code_predictor": {"vocab_size": 64},
    "talker_config": {"spatial_merge_size": 2},
    "code2wav_config": {"codebook_size": 64},
    "step3p5": {
        **_ALTERNATING,
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "num_sliding_attention_heads": 8,
        "share_expert_dim": 32,
        "sliding_window": 8,
    },
    "unlimited_ocr_text": {
        **_ALL_FULL,
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "num_key_value_heads": 4,  # its eager attention, the reference, takes no fewer than heads
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
        overrides: fields that win over the tables; None leaves a field at the family's default. Of a multimodal
            configuration, fields of its language model.
    """
    kind = CONFIG_MAPPING[model_type]
    defaults = kind()
    if text_part.is_multimodal(defaults):
        return _multimodal(defaults, **overrides)
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


def _multimodal(defaults: Any, **overrides: Any) -> Any:
    field = text_part.language_field(type(defaults))
    language = LANGUAGES.get(defaults.model_type, getattr(defaults, field).model_type)
    parts: dict[str, Any] = {field: small_config(language, **overrides)}
    for name in defaults.sub_configs.keys() - parts.keys():
        tower = _tower(defaults, name)
        if tower is not None:
            parts[name] = tower
    tied = getattr(parts[field], "tie_word_embeddings", False)
    return type(defaults)(**parts, tie_word_embeddings=tied, **_PER_TYPE.get(defaults.model_type, {}))


def _tower(whole: Any, name: str) -> Any:
    """A small configuration of another part; None if nothing says what it is."""
    kind = whole.sub_configs[name]
    defaults = getattr(whole, name, None) or (kind() if hasattr(kind, "model_type") else None)
    if defaults is None:
        return None
    values: dict[str, Any] = {field: value for field, value in _TOWER.items() if _has(defaults, field)}
    inner = {field: part for field in defaults.sub_configs if (part := _tower(defaults, field)) is not None}
    values |= {field: part.to_dict() for field, part in inner.items()}  # some take no objects in 5.16
    return type(defaults)(**{**values, **_PER_TYPE.get(defaults.model_type or name, {})})
