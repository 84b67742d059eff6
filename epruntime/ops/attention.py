"""Paged attention, one arithmetic for prefill, chunk, decode and recompute.

A query row's bits depend on its own query, keys, values and position, and on nothing else in the batch: keys are
worked on in partitions at absolute positions, each partition's softmax parts are computed on their own, and they are
merged in ascending order (Dao et al., FlashAttention, arXiv:2205.14135, with a fixed split). Accumulation is fp32.

Shape letters: T rows of the flat batch, S sequences, H query heads, K KV heads, N blocks in the cache, B slots a
block (in `block_tables_SB`: table entries), D key size, V value size.
"""

from __future__ import annotations

import torch

from epruntime.ops import checks, reference
from epruntime.ops.extension import load


def write_kv_cache(x_TKD: torch.Tensor, cache_NBKD: torch.Tensor, slots_T: torch.Tensor) -> None:
    """Writes each row's keys (or values) to its slot of the paged cache.

    Args:
        x_TKD: fp32 or bf16, last dimension contiguous.
        cache_NBKD: same dtype; changed in place. May be strided, last dimension contiguous.
        slots_T: int64, block * block_size + offset; -1 skips the row. Slots that are not -1 are distinct.

    Raises:
        ValueError: a shape, dtype, stride or slot is wrong.
    """
    extension = load()
    if extension is not None and x_TKD.device.type == "cpu":
        extension.write_kv_cache(x_TKD, cache_NBKD, slots_T)
    else:
        checks.write_kv_cache(x_TKD, cache_NBKD, slots_T)
        reference.write_kv_cache(x_TKD, cache_NBKD, slots_T)


def paged_attention(
    q_THD: torch.Tensor,
    k_cache_NBKD: torch.Tensor,
    v_cache_NBKV: torch.Tensor,
    *,
    block_tables_SB: torch.Tensor,
    query_starts_S1: torch.Tensor,
    seq_lens_S: torch.Tensor,
    scale: float,
    window: int = 0,
    chunk: int = 0,
    softcap: float = 0.0,
    sinks_H: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of ragged queries over a paged cache that already holds this step's keys and values.

    Sequence s owns the rows `query_starts_S1[s] : query_starts_S1[s + 1]`; they are its last positions. The query at
    position p sees the keys from max(0, p - window + 1, p // chunk * chunk) to p. Query head h reads KV head
    h * K // H. Slots that no query sees may hold anything, NaN included.

    Args:
        q_THD: fp32 or bf16, last dimension contiguous. T may exceed the last query start: such rows are padding.
        k_cache_NBKD, v_cache_NBKV: same dtype, last dimension contiguous, other strides free (for a latent cache the
            values are a view of the keys).
        block_tables_SB: int32. Block numbers of each sequence in order; entries that no query reaches are not read.
        query_starts_S1: int32, ascending from 0, S + 1 long. S may be 0.
        seq_lens_S: int32, keys of each sequence, this step's included.
        scale: factor on the dot products.
        window, chunk: in positions; 0 for none.
        softcap: scores become softcap * tanh(score / softcap); 0 for none (Gemma 2, arXiv:2408.00118, section 2).
        sinks_H: one more logit per head in the softmax's denominator (gpt-oss); None for none.

    Returns:
        [T, H, V] in the dtype of `q_THD`; padding rows are zero.

    Raises:
        ValueError: a shape, dtype, stride, length or block number is wrong.
    """
    if sinks_H is not None:
        sinks_H = sinks_H.detach().float()
    arguments = (
        q_THD,
        k_cache_NBKD,
        v_cache_NBKV,
        block_tables_SB,
        query_starts_S1,
        seq_lens_S,
        float(scale),
        window,
        chunk,
        float(softcap),
        sinks_H,
    )
    extension = load()
    if extension is not None and q_THD.device.type == "cpu":
        result: torch.Tensor = extension.paged_attention(*arguments)
        return result
    checks.paged_attention(*arguments)
    return reference.paged_attention(*arguments)
