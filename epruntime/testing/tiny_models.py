"""Tiny random models of every Mixture-of-Experts architecture that transformers has, for tests and benchmarks.

A fresh model of the library would hide mistakes: its weights are so small that logits are flat, and its biases, sinks
and correction biases are zero. Here weights are drawn wide and everything else is random too.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from epruntime.models import adapter
from epruntime.models.conformance import SINCE

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
    "first_k_dense_replace": 1,
    "moe_layer_start_index": 1,
    "num_dense_layers": 1,
    "mlp_only_layers": [],
    "sliding_window": 8,
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
_ALTERNATING = {"layer_types": ["sliding_attention", "full_attention", "full_attention"]}
_PER_TYPE: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("axk1", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "sarvam_mla"), _LATENT),
    "gpt_oss": _ALTERNATING,
    "beam": {"mlp_layer_types": ["dense", "sparse", "sparse"]},
    "gemma4_text": {
        **_ALTERNATING,
        "enable_moe_block": True,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 128,
        "num_kv_shared_layers": 0,
        "global_head_dim": 32,
    },
}


def _has(config: Any, name: str) -> bool:
    try:
        return hasattr(config, name)
    except Exception:  # noqa: BLE001  a property that needs other fields first: the name exists
        return True


def available(model_types: Iterable[str]) -> list[str]:
    """Of covered model types, those that the installed transformers has in the tested form, sorted."""
    return sorted(t for t in model_types if adapter.version() >= SINCE.get(t, (0, 0)))


def make_config(model_type: str, **overrides: Any) -> Any:
    """A tiny configuration. `overrides` win; an override of None leaves the field at the family's default."""
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
    return kind(**{name: value for name, value in values.items() if value is not None})


def build(
    model_type: str, seed: int = 0, *, dtype: torch.dtype = torch.float32, **overrides: Any
) -> tuple[Any, transformers.PreTrainedModel]:
    """A tiny random model in evaluation mode.

    Args:
        overrides: configuration fields, for example `sliding_window=6`; `initializer_range` is 0.3 by default.

    Returns:
        (configuration, model)
    """
    config = make_config(model_type, **overrides)
    generator_state = torch.random.get_rng_state()
    try:
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
        with torch.no_grad():
            for name, tensor in (*model.named_parameters(), *model.named_buffers()):
                std = _spread(name)
                if std is not None and tensor.is_floating_point():
                    tensor.normal_(std=std)
                elif "norm" in name and name.endswith("weight"):
                    tensor.add_(torch.randn_like(tensor) * 0.1)
    finally:
        torch.random.set_rng_state(generator_state)
    return config, model


def _spread(name: str) -> float | None:
    short = name.rpartition(".")[2]
    if "correction" in name or "expert_bias" in name:
        return 0.1
    if "sink" in short:
        return 1.0
    return 0.1 if "bias" in short else None


def save(model: transformers.PreTrainedModel, path: str | Path, *, max_shard_size: str = "5GB") -> Path:
    """Writes config.json and safetensors in the layout of published checkpoints. Returns the directory."""
    model.save_pretrained(str(path), max_shard_size=max_shard_size)
    return Path(path)
