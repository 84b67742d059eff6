"""Attention over keys that an indexer selects: DeepSeek sparse attention (arXiv:2512.02556, section 2.1).

attention module -> its indexer (wrapped here) -> cache.select -> per sequence: transformers' own indexer on the rows
of one sequence and the index keys of its whole history -> positions [T, W] -> the attention function's `indices`

The indexer's formula stays transformers' own, which differs in details between families, and so does what it is given:
its own signature says which arguments it takes. Three things are ours: index keys live in the paged cache beside the
latents, equal scores go to the earliest keys (torch's top-k names any), and a sequence is worked on by itself.

Shape letters: T rows of the flat batch, W selected keys of a row, L keys of a sequence, I index key size, D row size.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from types import MethodType, SimpleNamespace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from epruntime.models.batch import ForwardBatch
from epruntime.ops.attention import write_kv_cache

_ORIGINAL = "_epruntime_forward"
#: Arguments of an indexer that have an entry for each row of the batch -> the dimension in which they have it.
_BY_ROW = {"hidden_states": 1, "q_resid": 1, "position_embeddings": 1, "position_ids": -1}
#: Arguments that every indexer has. One that takes anything else is of no known form.
_ALL_HAVE = frozenset({"hidden_states", "attention_mask", "cache"})

#: What one is called with, by name, but for its mask and its cache.
Rows = dict[str, Any]


class _NoMask:
    """Stands where such a family slices its mask, in serving, where there is none."""

    def __getitem__(self, _: Any) -> _NoMask:
        return self


class _EarliestFirst(TorchFunctionMode):
    """Top-k that gives equal scores to the lower index."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func not in (torch.topk, torch.Tensor.topk):
            return func(*args, **(kwargs or {}))
        k = args[1] if len(args) > 1 else (kwargs or {})["k"]
        values, indices = args[0].sort(dim=-1, descending=True, stable=True)
        return SimpleNamespace(values=values[..., :k], indices=indices[..., :k])


def adapt(model: torch.nn.Module) -> None:
    """Wraps the indexers of a model, if it has some of the known form."""
    for module in list(model.modules()):
        indexer = getattr(module, "indexer", None)
        if not isinstance(indexer, torch.nn.Module):
            continue
        names = _signature(type(indexer).forward).parameters.keys() - {"self"}
        if names >= _ALL_HAVE and names <= _ALL_HAVE | _BY_ROW.keys():
            object.__setattr__(indexer, _ORIGINAL, indexer.forward)
            indexer.forward = MethodType(_forward, indexer)
            module.register_forward_pre_hook(_give_a_mask, with_kwargs=True)


@functools.cache
def _signature(forward: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(inspect.unwrap(forward))


def _give_a_mask(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if kwargs.get("attention_mask", 0) is None:
        kwargs = {**kwargs, "attention_mask": _NoMask()}
    return args, kwargs


def _forward(indexer: Any, *args: Any, **kwargs: Any) -> Any:
    given = _signature(type(indexer).forward).bind(indexer, *args, **kwargs).arguments
    return given["cache"].select(indexer, {name: given[name] for name in _BY_ROW if name in given})


def _rows_of(value: Any, dim: int, first: int, count: int) -> Any:
    if isinstance(value, torch.Tensor):
        return value.narrow(dim, first, count)
    return None if value is None else tuple(_rows_of(part, dim, first, count) for part in value)


def run(indexer: Any, rows: Rows, mask_1TL: torch.Tensor, keys: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """transformers' own indexer. `keys`: the rows' index keys [1, T, I] -> those to score [1, L, I]."""
    cache = SimpleNamespace(update_indexer=lambda key, *_, **__: keys(key))
    with _EarliestFirst():
        found: torch.Tensor = getattr(indexer, _ORIGINAL)(**rows, attention_mask=mask_1TL, cache=cache)
    return found


def select(indexer: Any, rows: Rows, batch: ForwardBatch, index_cache_NBI: torch.Tensor) -> torch.Tensor:
    """Selected key positions of every row, ascending, -1 where there are fewer: int64 [T, W].

    Writes the rows' index keys to their slots of `index_cache_NBI` [N, B, I] first.
    """
    selected: list[torch.Tensor] = []
    starts = batch.query_starts_S1.tolist()
    for s, length in enumerate(batch.seq_lens_S.tolist()):
        part = slice(starts[s], starts[s + 1])
        count = starts[s + 1] - starts[s]

        def keys(key_1TI: torch.Tensor, s: int = s, part: slice = part, length: int = length) -> torch.Tensor:
            write_kv_cache(key_1TI[0, :, None], index_cache_NBI[:, :, None], batch.slots_T[part])
            table = batch.block_tables_SB[s, : -(-length // index_cache_NBI.shape[1])].long()
            return index_cache_NBI[table].flatten(0, 1)[None, :length]

        position_T = torch.arange(length - count, length)
        mask_TL = torch.arange(length) <= position_T[:, None]
        own = {name: _rows_of(value, _BY_ROW[name], starts[s], count) for name, value in rows.items()}
        index_TW = run(indexer, own, mask_TL[None], keys)[0].long()
        beyond = length  # sorts behind every position
        index_TW = index_TW.masked_fill(index_TW > position_T[:, None], beyond).sort(dim=-1).values
        selected.append(index_TW.masked_fill(index_TW == beyond, -1))
    width = max((index.shape[1] for index in selected), default=1)
    total = len(batch.input_ids_T)
    out_TW = torch.full((total, width), -1)
    for s, index_TW in enumerate(selected):
        out_TW[starts[s] : starts[s + 1], : index_TW.shape[1]] = index_TW
    return out_TW


#: Bytes of gathered rows that are held at once.
_GATHER_BYTES = 32 << 20


def gathered(
    cache_NBD: torch.Tensor, selected_TW: torch.Tensor, batch: ForwardBatch
) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
    """Selected rows of the cache, some batch rows at a time: (rows, cache rows [t, W, 1, D], valid ones [t])."""
    starts = batch.query_starts_S1.long()
    sequence_T = torch.repeat_interleave(torch.arange(len(starts) - 1), starts.diff())
    block_size, width = cache_NBD.shape[1], selected_TW.shape[1]
    step = max(1, _GATHER_BYTES // (width * cache_NBD.shape[2] * cache_NBD.element_size()))
    flat_XD = cache_NBD.flatten(0, 1)
    for first in range(0, batch.num_tokens, step):
        rows = slice(first, min(first + step, batch.num_tokens))
        index_tW = selected_TW[rows]
        safe_tW = index_tW.clamp(min=0)
        block_tW = batch.block_tables_SB.long()[sequence_T[rows]].gather(1, safe_tW // block_size)
        kept = flat_XD[block_tW * block_size + safe_tW % block_size]
        yield rows, kept[:, :, None], (index_tW >= 0).sum(1, dtype=torch.int32)
