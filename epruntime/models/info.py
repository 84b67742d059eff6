"""ModelInfo: what the rest of the runtime needs to know about a checkpoint, as plain data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True, kw_only=True)
class KVLayerInfo:
    """What one attention layer keeps per token.

    Attributes:
        num_heads: key/value heads; 1 for a latent layer.
        key_dim: elements of a key row per head; for a latent layer the latent and the rotary key together.
        value_dim: elements of a value row per head.
        latent: True where values are a leading part of the key row (multi-head latent attention), so
            that only `key_dim` elements are kept.
        index_dim, index_dtype: elements of the key by which an indexer finds this token, and how it is kept; 0, "" for
            none.
    """

    num_heads: int
    key_dim: int
    value_dim: int
    latent: bool = False
    index_dim: int = 0
    index_dtype: str = ""

    @property
    def elements_per_token(self) -> int:
        return self.num_heads * (self.key_dim + (0 if self.latent else self.value_dim))


@dataclass(frozen=True, kw_only=True)
class RopeLengths:
    """How rotary frequencies, and with them keys, depend on the length of a sequence; by default they do not.

    Attributes:
        longest_original: longest sequence, in tokens, with the frequencies of short ones; 0: all have the same.
        every_length: beyond it each length has frequencies of its own (dynamic NTK); else all share one set (longrope).
        recompute: a sequence that grows beyond it is computed anew, so that all its keys have the same frequencies;
            else keys keep those that they were written with.
    """

    longest_original: int = 0
    every_length: bool = False
    recompute: bool = False

    def beyond(self, num_tokens: int) -> bool:
        """Does a sequence of so many tokens have other frequencies than a short one?"""
        return 0 < self.longest_original < num_tokens


LENGTH_HAS_NO_EFFECT = RopeLengths()


@dataclass(frozen=True, kw_only=True)
class ModelInfo:
    """A checkpoint that was inspected and not refused.

    Attributes:
        architecture: class name in transformers, for example "MixtralForCausalLM".
        model_type: the configuration's model_type.
        dtype: "float32" or "bfloat16", of weights and activations.
        max_position_embeddings: longest sequence the checkpoint was made for, tokens.
        num_experts: routed experts per MoE layer (the largest, where layers differ).
        top_k: experts per token.
        moe_layers: indices of the layers with routed experts, ascending.
        eos_token_ids: union of config's and generation_config's, of those that the vocabulary has, ascending.
        kv_layers: one entry per attention layer, in layer order.
        num_parameters: elements of all tensors in the checkpoint.
        checkpoint_bytes: bytes of all tensors in the checkpoint files.
        default_sampling: SamplingParams field -> value, as generation_config.json says.
        ignored_sampling: field of generation_config.json -> why its value makes no sense.
        shared_bytes: of the parameters that every rank holds, as they are kept in memory.
        expert_bytes: (number of experts, bytes of one) of each MoE layer.
        rope: how keys depend on the length of their sequence.
        index_heads: of the indexers that select the keys which layers attend to; 0: there are none.
        eos_warning: what is wrong with end-of-sequence ids that the files name and the vocabulary lacks; "": nothing.
    """

    architecture: str
    model_type: str
    dtype: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    max_position_embeddings: int
    num_experts: int
    top_k: int
    moe_layers: tuple[int, ...]
    eos_token_ids: tuple[int, ...]
    kv_layers: tuple[KVLayerInfo, ...]
    num_parameters: int
    checkpoint_bytes: int
    default_sampling: dict[str, Any] = field(default_factory=dict)
    ignored_sampling: dict[str, str] = field(default_factory=dict)
    shared_bytes: int = 0
    expert_bytes: tuple[tuple[int, int], ...] = ()
    rope: RopeLengths = LENGTH_HAS_NO_EFFECT
    index_heads: int = 0
    eos_warning: str = ""

    @property
    def dtype_bytes(self) -> int:
        return _BYTES[self.dtype]

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of KV cache that one token takes, all layers."""
        index_bytes = sum(layer.index_dim * _BYTES[layer.index_dtype] for layer in self.kv_layers if layer.index_dim)
        return self.dtype_bytes * sum(layer.elements_per_token for layer in self.kv_layers) + index_bytes

    def kv_bytes_per_block(self, block_size: int) -> int:
        return block_size * self.kv_bytes_per_token

    def weight_bytes(self, num_local: Callable[[int], int]) -> int:
        """Bytes of one rank's weights. `num_local`: number of experts of a layer -> how many physical ones it holds."""
        return self.shared_bytes + sum(num_local(experts) * size for experts, size in self.expert_bytes)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for msgpack."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> ModelInfo:
        values = dict(data)
        values["rope"] = RopeLengths(**values["rope"])
        values["kv_layers"] = tuple(KVLayerInfo(**layer) for layer in values["kv_layers"])
        for name in ("moe_layers", "eos_token_ids"):
            values[name] = tuple(values[name])
        values["expert_bytes"] = tuple(tuple(pair) for pair in values["expert_bytes"])
        return cls(**values)
