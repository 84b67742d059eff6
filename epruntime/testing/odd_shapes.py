"""Configurations of tiny models in which no dimension is a round number, for any served type.

Hidden sizes are no multiple of 4, inner sizes, vocabulary, numbers of heads and of experts are odd, and heads are as
odd as rotary embedding allows (it turns pairs).
"""

from __future__ import annotations

from typing import Any

from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from epruntime.models import text_part
from epruntime.models.small_config import small_config

VOCABULARY = 131
_HIDDEN, _HEADS = 54, 3
_BASE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": _HIDDEN,
    "num_attention_heads": _HEADS,
    "num_key_value_heads": 1,
    "head_dim": 18,
    "intermediate_size": 37,
    "moe_intermediate_size": 29,
    "shared_expert_intermediate_size": 27,
    "shared_intermediate_size": 27,
    "n_group": 1,
    "topk_group": 1,
    "num_expert_group": 1,
    "q_lora_rank": 23,
    "kv_lora_rank": 15,
    "qk_nope_head_dim": 9,
    "qk_rope_head_dim": 6,
    "v_head_dim": 13,
    "qk_head_dim": 15,
    "index_head_dim": 14,
    "index_n_heads": 3,
    "index_topk": 5,
}
_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_CHOICES = ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "top_k_experts")
#: What a type needs beyond it, or otherwise.
_PER_TYPE: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"qk_nope_head_dim": 10, "kv_lora_rank": 14},  # turns pairs in place: they begin at even offsets
    "deepseek_v4": {"num_attention_heads": 3, "o_groups": 3},
    "granitemoehybrid": {"mamba_d_head": 27},  # no Mamba layer is in it, but its sizes are checked
    "dots3_note": {"hidden_size": 64},  # towers have it, too, in their configurations
    "muse_spark": {"hidden_size": 64, "num_attention_heads": 4},  # the same
    "glm4v_moe_text": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 2, 1]}},
    "ernie4_5_vl_moe_text": {
        "moe_intermediate_size": [29, 15],
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [3, 3, 3]},
    },
    "hy_v4_vl_text": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 1]}},
    "mimo_v2_flash": {"num_attention_heads": 6, "num_key_value_heads": 3},  # has twice as many in windowed layers
}


def odd_shape(model_type: str, *, num_experts: int = 7, top_k: int = 3) -> dict[str, Any]:
    """Overrides for `tiny_models.build`."""
    if model_type == "dbrx":
        return {
            "vocab_size": VOCABULARY,
            "hidden_size": _HIDDEN,
            "d_model": _HIDDEN,
            "num_attention_heads": _HEADS,
            "n_heads": _HEADS,
            "attn_config": {"kv_n_heads": 1, "clip_qkv": 8.0, "rope_theta": 1e4},
            "ffn_config": {"ffn_hidden_size": 37, "moe_num_experts": num_experts, "moe_top_k": top_k},
        }
    language: str = text_part.language_config(small_config(model_type)).model_type
    defaults = CONFIG_MAPPING[language]()
    values = {**_BASE, **dict.fromkeys(_COUNTS, num_experts), **dict.fromkeys(_CHOICES, top_k)}
    chosen = {name: value for name, value in values.items() if _has(defaults, name)}
    if "kv_lora_rank" in chosen:
        chosen |= {"num_key_value_heads": _HEADS, "head_dim": chosen["qk_rope_head_dim"]}
        if getattr(defaults, "q_lora_rank", None) is None:
            chosen.pop("q_lora_rank", None)
    return chosen | _PER_TYPE.get(language, {}) | _PER_TYPE.get(model_type, {})


def _has(config: Any, name: str) -> bool:
    try:
        return hasattr(config, name)
    except Exception:  # noqa: BLE001  a property that needs other fields first: the name exists
        return True
