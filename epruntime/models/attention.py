"""Attention layers over the paged KV cache, bound to transformers' attention modules at load.

module forward -> [latents -> LatentCache.update -> write] -> registered function -> layer.attend
               -> write new keys and values to their slots -> attend over the block tables

Shape letters: T rows of the flat batch, H query heads, K key/value heads, D key dim, V value dim, N blocks,
B block size, C latent dim (kv_lora_rank), R rotary dim, P non-rotary dim.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

import torch

from epruntime.comm.progress import Stamps
from epruntime.errors import UnsupportedModelError
from epruntime.models import sparse
from epruntime.models.batch import ForwardBatch
from epruntime.models.families import llama4
from epruntime.models.info import KVLayerInfo
from epruntime.models.probe import AttentionCall
from epruntime.ops.attention import paged_attention, write_kv_cache


@dataclass(kw_only=True)
class StepState:
    """The running batch, shared by all layers of a rank, set before each forward; and where they say how far it is."""

    batch: ForwardBatch | None = None
    stamps: Stamps = field(default_factory=Stamps)

    @property
    def current(self) -> ForwardBatch:
        assert self.batch is not None, "no forward is running"
        return self.batch


class PagedLayer(ABC):
    """One attention layer's cache and arithmetic. `index`: its place among the decoder's layers."""

    index = -1

    def __init__(self, call: AttentionCall, kv: KVLayerInfo, state: StepState) -> None:
        self.call, self.kv, self.state = call, kv, state
        self.k_cache_NBKD = torch.empty(0)
        self.v_cache_NBKV = torch.empty(0)
        self.index_cache_NBI = torch.empty(0)

    def allocate(self, num_blocks: int, block_size: int, *, dtype: torch.dtype, device: str) -> None:
        """Makes room for `num_blocks` blocks. Contents are left as they come: unwritten slots are never read."""
        key = (num_blocks, block_size, self.kv.num_heads, self.kv.key_dim)
        value = (num_blocks, block_size, self.kv.num_heads, self.kv.value_dim)
        self.k_cache_NBKD = torch.empty(key, dtype=dtype, device=device)
        if self.kv.latent:
            self.v_cache_NBKV = self.k_cache_NBKD[..., : self.kv.value_dim]
        else:
            self.v_cache_NBKV = torch.empty(value, dtype=dtype, device=device)

        if self.kv.index_dim:
            shape = (num_blocks, block_size, self.kv.index_dim)
            self.index_cache_NBI = torch.empty(shape, dtype=getattr(torch, self.kv.index_dtype), device=device)

    @abstractmethod
    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scaling: float | None,
        sinks_H: torch.Tensor | None,
        selected_TW: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """query [1, H, T, D], key and value [1, K, T, D] of the new tokens -> [1, T, H, V]."""

    def _attend_cache(self, q_THD: torch.Tensor, scale: float, sinks_H: torch.Tensor | None) -> torch.Tensor:
        self.state.stamps.at_layer(self.index)
        batch, view = self.state.current, self.call.visibility
        return paged_attention(
            q_THD,
            self.k_cache_NBKD,
            self.v_cache_NBKV,
            block_tables_SB=batch.block_tables_SB,
            query_starts_S1=batch.query_starts_S1,
            seq_lens_S=batch.seq_lens_S,
            scale=scale,
            window=view.window,
            chunk=view.chunk,
            softcap=self.call.softcap,
            sinks_H=sinks_H,
        )


class KeyValueLayer(PagedLayer):
    """Keys and values are cached as the module computes them.

    Args:
        temperatures_N, floor_scale: factor on a query by floor((position + 1) / floor_scale); None for none.
    """

    def __init__(
        self,
        call: AttentionCall,
        kv: KVLayerInfo,
        state: StepState,
        *,
        temperatures_N: torch.Tensor | None = None,
        floor_scale: float = 1.0,
    ) -> None:
        super().__init__(call, kv, state)
        self._temperatures_N, self._floor_scale = temperatures_N, floor_scale

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scaling: float | None,
        sinks_H: torch.Tensor | None,
        selected_TW: torch.Tensor | None = None,
    ) -> torch.Tensor:
        slots_T = self.state.current.slots_T
        write_kv_cache(key[0].transpose(0, 1), self.k_cache_NBKD, slots_T)
        write_kv_cache(value[0].transpose(0, 1), self.v_cache_NBKV, slots_T)
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        if self._temperatures_N is not None:
            index_T = torch.floor((self.state.current.positions_T.float() + 1.0) / self._floor_scale).long()
            query = (query * self._temperatures_N[index_T][:, None]).to(query.dtype)
        return self._attend_cache(query[0].transpose(0, 1), scale, sinks_H)[None]


class LatentLayer(PagedLayer):
    """Multi-head latent attention in absorbed form (DeepSeek-V2, arXiv:2405.04434, section 2.1.2).

    The cache holds, per token, the latent c (C) and the rotary key r (R) that all heads share. With
    W_UK, W_UV the key and value halves of kv_b_proj, per head: q_nope . (W_UK c) = (W_UK^T q_nope) . c,
    so queries go to the latent space, attention runs there with one key/value head of dim C + R whose
    values are its first C elements, and W_UV takes the result back. The same form serves every
    query, prefill and decode alike.

    A layer that attends to the latents of another one (`call.shares`) keeps a copy of them.
    """

    def __init__(self, call: AttentionCall, kv: KVLayerInfo, state: StepState, module: Any) -> None:
        super().__init__(call, kv, state)
        self._module = module
        # The module would expand the latents of the new tokens for nothing: attend() needs them no more.
        if hasattr(module, "expand_kv"):
            module.expand_kv = lambda latent, rotary: (latent, rotary)

    def write(self, latent: torch.Tensor, rotary: torch.Tensor) -> None:
        """latent [1, 1, T, C] and rotary [1, 1, T, R] of the new tokens."""
        row_T1D = torch.cat((latent[0, 0], rotary[0, 0]), dim=-1)[:, None]
        write_kv_cache(row_T1D, self.k_cache_NBKD, self.state.current.slots_T)

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scaling: float | None,
        sinks_H: torch.Tensor | None,
        selected_TW: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if self.call.shares >= 0:
            self.write(key, value)  # unexpanded, as `expand_kv` hands them on
        module = self._module
        num_heads, nope = query.shape[1], int(module.qk_nope_head_dim)
        up_HXC = module.kv_b_proj.weight.view(num_heads, -1, self.kv.value_dim)
        q_HTP, q_HTR = query[0, :, :, :nope], query[0, :, :, nope:]
        q_HTC = torch.bmm(q_HTP, up_HXC[:, :nope])
        q_THD = torch.cat((q_HTC, q_HTR), dim=-1).transpose(0, 1)
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        if selected_TW is None:
            latent_THC = self._attend_cache(q_THD, scale, sinks_H)
        else:
            latent_THC = self._attend_selected(q_THD, scale, sinks_H, selected_TW)
        out_HTV = torch.bmm(latent_THC.transpose(0, 1), up_HXC[:, nope:].transpose(1, 2))
        return out_HTV.transpose(0, 1)[None]

    def _attend_selected(
        self, q_THD: torch.Tensor, scale: float, sinks_H: torch.Tensor | None, selected_TW: torch.Tensor
    ) -> torch.Tensor:
        """Each row over its own keys, which are copied together: to the kernel it is the last row of a sequence."""
        self.state.stamps.at_layer(self.index)
        size = self.kv.value_dim
        out_THC = q_THD.new_zeros((*q_THD.shape[:2], size))
        for rows, kept_tWKD, count_t in sparse.gathered(self.k_cache_NBKD[:, :, 0], selected_TW, self.state.current):
            number = len(count_t)
            out_THC[rows] = paged_attention(
                q_THD[rows],
                kept_tWKD,
                kept_tWKD[..., :size],
                block_tables_SB=torch.arange(number, dtype=torch.int32)[:, None],
                query_starts_S1=torch.arange(number + 1, dtype=torch.int32),
                seq_lens_S=count_t,
                scale=scale,
                softcap=self.call.softcap,
                sinks_H=sinks_H,
            )
        return out_THC


class LatentCache:
    """What a model with latent attention is given as its cache: `update` writes latents to their slots."""

    is_compileable = False

    def __init__(self, layers: dict[int, LatentLayer]) -> None:
        self._layers = layers

    def get_seq_length(self, *_: Any, **__: Any) -> int:
        return 0  # positions are always passed

    def update(
        self, latent: torch.Tensor, rotary: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._layers[layer_idx].write(latent, rotary)
        return latent, rotary

    def select(self, indexer: Any, rows: sparse.Rows) -> torch.Tensor:
        """Key positions that each row attends to, by the indexer of a layer: [T, W], -1 for none."""
        layer = self._layers[indexer.layer_idx]
        return sparse.select(indexer, rows, layer.state.current, layer.index_cache_NBI)


_LATENT_ATTRIBUTES = ("kv_b_proj", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


def kv_layer_of(call: AttentionCall, module: torch.nn.Module) -> KVLayerInfo:
    """What the layer caches, told from what it handed to the cache in the probe.

    Raises:
        UnsupportedModelError: it caches neither its keys and values nor latents of the known form.
    """
    _check_source(call, module)
    groups = int(getattr(module, "num_key_value_groups", 1))
    plain = ((call.num_kv_heads, call.key_dim), (call.num_kv_heads, call.value_dim))
    cached = (call.cached_key, call.cached_value)
    if cached == plain and not call.sparse:
        return KVLayerInfo(num_heads=call.num_kv_heads, key_dim=call.key_dim, value_dim=call.value_dim)
    if all(hasattr(module, name) for name in _LATENT_ATTRIBUTES):
        latent, rotary, nope, value = (
            int(getattr(module, n)) for n in ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
        )
        projection: Any = module.kv_b_proj
        fits = (
            cached == ((1, latent), (1, rotary))
            and (call.key_dim, call.value_dim, call.num_kv_heads) == (nope + rotary, value, call.num_heads)
            and isinstance(projection, torch.nn.Linear)
            and getattr(projection, "bias", None) is None
            and tuple(projection.weight.shape) == (call.num_heads * (nope + value), latent)
        )
        # With more of them than heads (the default of DeepSeek-V3's class, in a small model) there are no groups, and
        # transformers runs it.
        if fits and groups > 1:
            raise UnsupportedModelError(
                f"config.json says num_key_value_heads={call.num_heads // groups} for {call.num_heads} heads, but of "
                "latents every head has keys of its own; transformers does not run it either"
            )
        if fits:
            return KVLayerInfo(
                num_heads=1,
                key_dim=latent + rotary,
                value_dim=latent,
                latent=True,
                index_dim=call.index_dim,
                index_dtype=call.index_dtype,
            )
    raise UnsupportedModelError(
        f"attention of {call.module_name} attends over keys and values {plain} (heads, dim) but caches {cached}: "
        "neither the same nor the latents of multi-head latent attention"
    )


def _check_source(call: AttentionCall, module: Any) -> None:
    """Refuses latents of another layer than the configuration says: transformers keeps the last ones of each kind."""
    sources = getattr(module.config, "kv_source_layers", None)
    if call.shares < 0 or sources is None or sources[module.layer_idx] == call.shares:
        return
    raise UnsupportedModelError(
        f"config.json says that layer {module.layer_idx} attends to the latents of layer {sources[module.layer_idx]} "
        f"(kv_source_layers), but transformers gives it those of layer {call.shares}, the last layer of its kind that "
        "keeps some for others"
    )


def make_layer(call: AttentionCall, kv: KVLayerInfo, state: StepState, module: torch.nn.Module) -> PagedLayer:
    if kv.latent:
        return LatentLayer(call, kv, state, module)
    temperatures_N = getattr(module, llama4.TEMPERATURES, None)
    if temperatures_N is None:
        return KeyValueLayer(call, kv, state)
    floor_scale = float(getattr(module, llama4.FLOOR_SCALE))
    return KeyValueLayer(call, kv, state, temperatures_N=temperatures_N, floor_scale=floor_scale)
