"""One forward on the meta device that asks a model what its attention and experts do.

The probe runs before any weight is read. It finds, for every layer: shapes of queries, keys and values; what the
layer hands to the cache (latents, in multi-head latent attention); the window or chunk, which some families tell
only to the mask; softcap and sinks. Whatever it does not understand is refused by name.
"""

from __future__ import annotations

import dataclasses
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from epruntime.errors import UnsupportedModelError
from epruntime.models import adapter, sparse, text_part
from epruntime.models.latents import Latents
from epruntime.models.replay import LastHidden
from epruntime.models.visibility import Visibility, visibility_of

#: Arguments of attention functions that do not change what is computed in evaluation mode, or that
#: the mask tells as well (`sliding_window`: eager attention, the reference, follows the mask alone).
_NO_EFFECT = frozenset(
    {
        "dropout",
        "sliding_window",
        "position_ids",
        "use_cache",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "return_dict",
        "cache_position",
        "cache",
        "past_key_values",
        "position_embeddings",
    }
)
#: Stands in a feature's name between features that a model cannot be told apart by: a test of either one covers it.
OR = " or "
#: Types of layers whose mask depends on positions alone, in all of transformers.
_FIXED_MASKS = frozenset({"full_attention", "sliding_attention", "chunked_attention"})
_PROBE_TOKENS = 5
#: Registered functions are global to the process.
_ONE_PROBE = threading.Lock()


@dataclass(frozen=True, kw_only=True)
class AttentionCall:
    """What one layer's attention was called with.

    Attributes:
        num_heads, key_dim, value_dim: of the queries, keys and values handed to attention.
        num_kv_heads: key/value heads handed to attention.
        cached_key, cached_value: (heads, dim) of what the layer handed to the cache, if it did, or of latents that it
            shares.
        scaling: factor on the scores; None means key_dim ** -0.5.
        softcap: 0.0 for none.
        sinks: one extra logit per head takes part in the softmax.
        index_dim, index_dtype: size and dtype of the index keys by which the layer selects what it attends to; 0 and
            "" if it has none of its own.
        sparse: it attends to selected keys only.
        shares: layer_idx of the layer whose latents it attends to, if it hands none to the cache; else -1.
    """

    module_name: str
    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    cached_key: tuple[int, int] | None
    cached_value: tuple[int, int] | None
    scaling: float | None
    softcap: float
    sinks: bool
    visibility: Visibility
    index_dim: int = 0
    index_dtype: str = ""
    sparse: bool = False
    shares: int = -1


@dataclass(frozen=True, kw_only=True)
class Probe:
    """Result of the probe: attention calls in layer order, and top-k per experts module."""

    attention: tuple[AttentionCall, ...]
    top_k: dict[str, int]


class _Recorder:
    """Collects the calls of one probe forward, and stands in for the cache."""

    is_compileable = False
    is_initialized = False

    def __init__(self, model: torch.nn.Module) -> None:
        self.names = {id(module): name for name, module in model.named_modules()}
        self.attention: list[AttentionCall] = []
        self.top_k: dict[str, int] = {}
        self.expert_calls: Counter[str] = Counter()
        self.updates: dict[int, tuple[tuple[int, int], tuple[int, int]]] = {}
        self.index_keys: dict[int, tuple[int, str]] = {}
        self.latents = Latents()
        self.asked_for_layers = False

    @property
    def layers(self) -> tuple[()]:
        """Layers of a cache that has seen nothing. Some masks depend on what these keep (`_check_masks`)."""
        self.asked_for_layers = True
        return ()

    # What a model asks of a cache that has seen nothing.
    def get_seq_length(self, *_: Any, **__: Any) -> int:
        return 0

    def get_query_offset(self, *_: Any, **__: Any) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, *_: Any, **__: Any) -> tuple[int, int]:
        return query_length, 0

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        for tensor in (key, value):
            if tensor.dim() != 4 or tensor.shape[2] != _PROBE_TOKENS:
                raise UnsupportedModelError(
                    f"layer {layer_idx} caches something of shape {tuple(tensor.shape)}, not "
                    "keys and values of [batch, heads, tokens, dim]"
                )
        self.updates[layer_idx] = ((key.shape[1], key.shape[3]), (value.shape[1], value.shape[3]))
        self.latents.given(layer_idx, key, value)
        return key, value

    def select(self, indexer: Any, rows: sparse.Rows) -> torch.Tensor:
        def keys(key: torch.Tensor) -> torch.Tensor:
            if key.dim() != 3 or key.shape[1] != _PROBE_TOKENS:
                raise UnsupportedModelError(f"an indexer caches keys of shape {tuple(key.shape)}, not [1, tokens, dim]")
            self.index_keys[indexer.layer_idx] = (key.shape[2], str(key.dtype).removeprefix("torch."))
            return key

        mask = torch.ones(1, _PROBE_TOKENS, _PROBE_TOKENS, dtype=torch.bool, device=rows["hidden_states"].device)
        return sparse.run(indexer, rows, mask, keys)

    def on_attention(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any,
        scaling: float | None = None,
        softcap: float | None = None,
        s_aux: torch.Tensor | None = None,
        is_causal: bool | None = None,
        indices: torch.Tensor | None = None,
        **others: Any,
    ) -> tuple[torch.Tensor, None]:
        name = self.names[id(module)]
        if any(call.module_name == name for call in self.attention):
            raise UnsupportedModelError(f"{name} attends more than once in one forward")
        unknown = sorted(k for k, v in others.items() if v is not None and k not in _NO_EFFECT)
        if unknown:
            raise UnsupportedModelError(f"attention of {name} uses {', '.join(unknown)}, which is not supported")
        if is_causal is False:
            raise UnsupportedModelError(f"attention of {name} is not causal")
        if not isinstance(attention_mask, _Mask):
            raise UnsupportedModelError(
                f"attention of {name} gets no mask of transformers' own making: what it may see cannot be told"
            )
        if query.shape[2] != _PROBE_TOKENS or key.shape[2] != _PROBE_TOKENS or query.shape[1] % key.shape[1]:
            raise UnsupportedModelError(
                f"attention of {name} has query {tuple(query.shape)}, key {tuple(key.shape)}: "
                "not one key per token and heads in groups"
            )
        if s_aux is not None and s_aux.numel() != query.shape[1]:
            raise UnsupportedModelError(f"attention of {name} has {s_aux.numel()} sinks for {query.shape[1]} heads")
        if indices is not None and attention_mask.visibility != Visibility():
            raise UnsupportedModelError(f"attention of {name} selects keys within a window, which is not supported")
        if indices is not None and indices.shape[-1] < 1:
            raise UnsupportedModelError(f"attention of {name} selects no key: config.json says index_topk 0")
        index_key = self.index_keys.pop(getattr(module, "layer_idx", -1), (0, ""))
        cached = self.updates.pop(getattr(module, "layer_idx", -1), (None, None))
        shared = self.latents.of_another(module) if cached[0] is None else None
        if shared is not None:
            cached = (shared.latent, shared.rotary)
        self.attention.append(
            AttentionCall(
                module_name=name,
                num_heads=query.shape[1],
                num_kv_heads=key.shape[1],
                key_dim=key.shape[3],
                value_dim=value.shape[3],
                cached_key=cached[0],
                cached_value=cached[1],
                scaling=None if scaling is None else float(scaling),
                softcap=float(softcap or 0.0),
                sinks=s_aux is not None,
                visibility=attention_mask.visibility,
                index_dim=index_key[0],
                index_dtype=index_key[1],
                sparse=indices is not None,
                shares=-1 if shared is None else shared.layer_idx,
            )
        )
        shape = (query.shape[0], _PROBE_TOKENS, query.shape[1], value.shape[3])
        return torch.empty(shape, dtype=query.dtype, device=query.device), None

    def on_experts(
        self,
        module: torch.nn.Module,
        hidden_states: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
    ) -> torch.Tensor:
        name = self.names[id(module)]
        self.expert_calls[name] += 1
        if self.expert_calls[name] > getattr(module, "calls_per_forward", 1):
            raise UnsupportedModelError(f"{name} is called more than once in one forward")
        if hidden_states.dim() != 2 or top_k_index.shape != top_k_weights.shape or top_k_index.dim() != 2:
            raise UnsupportedModelError(
                f"{name} is called with hidden states {tuple(hidden_states.shape)}, ids {tuple(top_k_index.shape)} and "
                f"weights {tuple(top_k_weights.shape)}, not [T, H], [T, K], [T, K]"
            )
        if top_k_index.shape[1] < 1:
            raise UnsupportedModelError(f"{name} is called with no expert for a token: config.json says top-k 0")
        self.top_k[name] = self.top_k.get(name, 0) + top_k_index.shape[1]
        return torch.empty_like(hidden_states)


class _NoPadding(TorchFunctionMode):
    """Padding on a sequence's left, which masks of chunked attention count on the model's device: there is none."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        return func(*(_counted(a) for a in args), **(kwargs or {}))


def _counted(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.device.type == "meta" and value.shape == (1,):
        return torch.zeros(1, dtype=value.dtype)
    return value


class _Mask:
    """What the probe's mask function returns in place of a mask. Looked into only if a layer uses it."""

    def __init__(self, mask_function: Callable[..., torch.Tensor], **_: Any) -> None:
        self._function = mask_function

    @cached_property
    def visibility(self) -> Visibility:
        return visibility_of(self._sees)

    def __getitem__(self, _: Any) -> _Mask:
        return self  # a family with an indexer hands it a slice, and the indexer is given another mask

    def _sees(self, q: int, k: int) -> bool:
        zero = torch.tensor(0)
        with _NoPadding():
            return bool(self._function(zero, zero, torch.tensor(q), torch.tensor(k)))


def run_probe(model: torch.nn.Module) -> Probe:
    """Runs the probe on a model that is on the meta device.

    Raises:
        UnsupportedModelError: anything that the serving hooks could not do alike.
    """
    with _ONE_PROBE:
        return _run(model)


def _run(model: torch.nn.Module) -> Probe:
    recorder = _Recorder(model)
    adapter.register(adapter.PROBE, attention=recorder.on_attention, experts=recorder.on_experts, mask=_Mask)
    kind = type(model).__name__
    try:
        adapter.use_hooks(model, adapter.PROBE)
        with torch.inference_mode(), recorder.latents.watch(model):
            ids = torch.zeros(1, _PROBE_TOKENS, dtype=torch.int64, device="meta")
            positions = torch.zeros_like(ids)
            arguments = {"input_ids": ids, "position_ids": positions, adapter.cache_keyword(model): recorder}
            if adapter.takes_rows(model):
                model(**arguments)
            else:
                _run_on_rows(model, arguments)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{kind}: {error}") from error
    except AttributeError as error:
        if error.obj is not recorder:
            raise _does_not_run(kind, error) from error
        raise UnsupportedModelError(
            f"{kind}: it asks its cache for {error.name}, which one of keys and values alone does not have"
        ) from error
    except Exception as error:  # a foreign forward raises what it likes
        raise _does_not_run(kind, error) from error
    _check_masks(model, recorder)
    if recorder.updates:
        raise UnsupportedModelError(
            f"{kind}: layers {sorted(recorder.updates)} cache keys and values but do not "
            "attend through the attention interface"
        )
    return Probe(attention=tuple(recorder.attention), top_k=dict(recorder.top_k))


def _check_masks(model: Any, recorder: _Recorder) -> None:
    """Refuses masks that may change once a cache has layers."""
    if not recorder.asked_for_layers:
        return
    kinds = getattr(text_part.language_config(model.config), "layer_types", None) or ["unknown"]
    others = sorted(set(kinds) - _FIXED_MASKS)
    if others:
        raise UnsupportedModelError(
            f"{type(model).__name__}: masks depend on what its cache holds, in layers of type {', '.join(others)}"
        )


def _run_on_rows(model: Any, arguments: dict[str, Any]) -> None:
    """Runs the model as it is served where its forward is not told of which rows logits are wanted."""
    hidden = LastHidden(model)
    try:
        hidden.run(torch.arange(_PROBE_TOKENS - 1, device="meta"), **arguments)
    finally:
        hidden.unwrap()


def _does_not_run(kind: str, error: Exception) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{kind}: its forward does not run with attention over keys and values and routed experts alone. It needs more "
        f"(for example recurrent state), or the values of config.json do not fit each other: {type(error).__name__}: "
        f"{error}"
    )


def features_of(probe: Probe) -> frozenset[str]:
    """Features of attention that a conformance test must cover, by name."""
    found = set()
    for call in probe.attention:
        if call.visibility == Visibility(window=1):
            found.add(f"window{OR}chunk")
        else:
            found |= {name for name, size in dataclasses.asdict(call.visibility).items() if size}
        if call.sinks:
            found.add("sinks")
        if call.sparse:
            found.add("sparse")
        if call.shares >= 0:
            found.add("shared")
        if call.softcap:
            found.add("softcap")
    return frozenset(found)
