"""Which dense models can be upcycled, and the Mixtral config that each becomes.

A Mixtral decoder layer is a Llama decoder layer whose MLP is a router and experts of that MLP's shape. Whatever of a
dense model Mixtral has no place for is refused here, by name.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from epruntime.errors import CheckpointError, UnsupportedModelError
from epruntime.models.checkpoint import read_raw_config

if TYPE_CHECKING:
    from epruntime.models.upcycle_source import TensorInfo

#: Dense architectures whose decoder layer is Mixtral's but for the experts.
LLAMA_LIKE = ("llama", "mistral")

#: Rotary embeddings that are a function of the position alone. "dynamic" and "longrope" depend on the longest
#: sequence in the batch, so the upcycled model could not be held to the dense one's tokens.
ROPE_TYPES = ("default", "linear", "llama3", "yarn")

#: Names that older checkpoints carry and transformers recomputes.
RECOMPUTED = re.compile(r"\.rotary_emb\.inv_freq$")

LAYER_TENSORS = (
    "input_layernorm.weight",
    "self_attn.q_proj.weight",
    "self_attn.k_proj.weight",
    "self_attn.v_proj.weight",
    "self_attn.o_proj.weight",
    "post_attention_layernorm.weight",
    "mlp.gate_proj.weight",
    "mlp.up_proj.weight",
    "mlp.down_proj.weight",
)

_REASONS = (
    (re.compile(r"\.(q|k)_norm\."), "normalises queries and keys (qk-norm), which Mixtral does not"),
    (re.compile(r"\.bias$"), "adds a bias, which Mixtral has no place for"),
    (re.compile(r"\.(experts|block_sparse_moe|router)\b"), "is a mixture of experts already"),
    (re.compile(r"(weight_scale|qweight|qzeros|scales|absmax)"), "is quantised; dequantise it first"),
)


def read_dense_config(directory: Path) -> Any:
    """The transformers config of a dense checkpoint directory.

    Raises:
        CheckpointError: no readable config.json.
        UnsupportedModelError: not Llama-like, quantised, or in need of code of its own.
    """
    raw = read_raw_config(directory)
    if raw.get("auto_map"):
        raise UnsupportedModelError(f"{directory}: the model brings its own code (auto_map), which is never run")
    if raw.get("quantization_config"):
        method = raw["quantization_config"].get("quant_method", "unknown method")
        raise UnsupportedModelError(f"{directory}: the checkpoint is quantised ({method}); dequantise it first")
    model_type = raw.get("model_type")
    if model_type not in LLAMA_LIKE:
        raise UnsupportedModelError(
            f"{directory}: model_type {model_type!r} is not Llama-like; {', '.join(LLAMA_LIKE)} can be upcycled"
        )
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(directory)
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{directory}: transformers refuses its config.json: {error}") from error
    check_dense_config(config, str(directory))
    return config


def check_dense_config(config: Any, where: str) -> None:
    """Refuses what Mixtral has no place for.

    Raises:
        UnsupportedModelError: with the config key, its value and the reason.
    """
    if config.model_type not in LLAMA_LIKE:
        raise UnsupportedModelError(
            f"{where}: model_type {config.model_type!r} is not Llama-like; {', '.join(LLAMA_LIKE)} can be upcycled"
        )
    for key in ("attention_bias", "mlp_bias"):
        if getattr(config, key, False):
            raise UnsupportedModelError(f"{where}: {key}=true, and Mixtral has no biases")
    if config.hidden_act not in ("silu", "swish"):
        raise UnsupportedModelError(f"{where}: hidden_act={config.hidden_act!r}; Llama-like models use 'silu'")
    rope = dict(config.rope_parameters or {})
    kind = rope.get("rope_type", "default")
    if kind not in ROPE_TYPES:
        raise UnsupportedModelError(
            f"{where}: rope_type={kind!r}; only {', '.join(ROPE_TYPES)} depend on the position alone"
        )
    if float(rope.get("partial_rotary_factor", 1.0)) != 1.0:
        raise UnsupportedModelError(
            f"{where}: partial_rotary_factor={rope['partial_rotary_factor']}; Mixtral rotates the whole head"
        )


def expected_shapes(config: Any) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor that the dense checkpoint must hold (lm_head too unless tied)."""
    hidden, inner = config.hidden_size, config.intermediate_size
    head = head_dim(config)
    queries, keys = config.num_attention_heads * head, config.num_key_value_heads * head
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    of_layer = dict(
        zip(
            LAYER_TENSORS,
            (
                (hidden,),
                (queries, hidden),
                (keys, hidden),
                (keys, hidden),
                (hidden, queries),
                (hidden,),
                (inner, hidden),
                (inner, hidden),
                (hidden, inner),
            ),
            strict=True,
        )
    )
    for layer in range(config.num_hidden_layers):
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in of_layer.items()}
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


def check_tensors(config: Any, infos: dict[str, TensorInfo], where: str) -> None:
    """Holds the checkpoint's tensors against the config.

    Raises:
        UnsupportedModelError: a tensor that a Llama-like model does not have.
        CheckpointError: a missing or misshapen tensor.
    """
    expected = expected_shapes(config)
    allowed_extra = {"lm_head.weight"} if config.tie_word_embeddings else set()
    for name in sorted(infos.keys() - expected.keys() - allowed_extra):
        if RECOMPUTED.search(name):
            continue
        for pattern, reason in _REASONS:
            if pattern.search(name):
                raise UnsupportedModelError(f"{where}: tensor {name}: the model {reason}")
        raise UnsupportedModelError(f"{where}: tensor {name} is not part of a Llama-like model")
    missing = sorted(expected.keys() - infos.keys())
    if missing:
        raise CheckpointError(f"{where}: {len(missing)} tensors are missing, the first is {missing[0]}")
    for name, shape in expected.items():
        if infos[name].shape != shape:
            raise CheckpointError(f"{where}: tensor {name} has shape {infos[name].shape}, its config says {shape}")


def head_dim(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def mixtral_config(dense: Any, *, num_experts: int, top_k: int, dtype: str) -> Any:
    """The MixtralConfig of the upcycled model: the dense one's values, and the experts'."""
    from transformers import MixtralConfig

    return MixtralConfig(
        architectures=["MixtralForCausalLM"],
        vocab_size=dense.vocab_size,
        hidden_size=dense.hidden_size,
        intermediate_size=dense.intermediate_size,
        num_hidden_layers=dense.num_hidden_layers,
        num_attention_heads=dense.num_attention_heads,
        num_key_value_heads=dense.num_key_value_heads,
        head_dim=head_dim(dense),
        hidden_act="silu",
        max_position_embeddings=dense.max_position_embeddings,
        initializer_range=dense.initializer_range,
        rms_norm_eps=dense.rms_norm_eps,
        rope_parameters=dict(dense.rope_parameters),
        # Llama attends to everything, whatever a stray key in its config says.
        sliding_window=dense.sliding_window if dense.model_type == "mistral" else None,
        tie_word_embeddings=dense.tie_word_embeddings,
        bos_token_id=dense.bos_token_id,
        eos_token_id=dense.eos_token_id,
        pad_token_id=dense.pad_token_id,
        num_local_experts=num_experts,
        num_experts_per_tok=top_k,
        dtype=dtype,
    )
