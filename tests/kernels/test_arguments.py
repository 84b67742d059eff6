"""Wrong arguments are refused in the same words by the binding and by the plain-torch path."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from epruntime.ops.attention import paged_attention, write_kv_cache
from epruntime.ops.combine import combine_rows
from epruntime.ops.dispatch import pack_rows
from epruntime.ops.gemm import bmm, grouped_matmul, matmul


def attention_arguments() -> dict[str, Any]:
    return {
        "q_THD": torch.zeros(3, 4, 8),
        "k_cache_NBKD": torch.zeros(5, 2, 2, 8),
        "v_cache_NBKV": torch.zeros(5, 2, 2, 6),
        "block_tables_SB": torch.zeros(2, 3, dtype=torch.int32),
        "query_starts_S1": torch.tensor([0, 2, 3], dtype=torch.int32),
        "seq_lens_S": torch.tensor([4, 6], dtype=torch.int32),
        "scale": 1.0,
    }


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


ATTENTION = [
    ({"q_THD": torch.zeros(3, 4, 8, dtype=torch.float64)}, "q is torch.float64, must be torch.float32 or torch.bfloat"),
    ({"k_cache_NBKD": torch.zeros(5, 2, 2, 8).bfloat16()}, "k_cache is torch.bfloat16, must be torch.float32"),
    ({"q_THD": torch.zeros(3, 32)}, "q has 2 dimensions, must have 3"),
    ({"q_THD": torch.zeros(3, 8, 4).transpose(1, 2)}, "last dimension of q is not contiguous (stride 4)"),
    ({"v_cache_NBKV": torch.zeros(5, 2, 1, 6)}, "blocks, slots and heads must agree"),
    ({"q_THD": torch.zeros(3, 4, 7)}, "q has head size 7, k_cache 8"),
    ({"q_THD": torch.zeros(3, 3, 8)}, "3 query heads are not a multiple of 2 KV heads"),
    ({"seq_lens_S": torch.tensor([4, 6])}, "seq_lens is torch.int64, must be torch.int32"),
    ({"query_starts_S1": int32(0, 3)}, "2 query_starts for 2 seq_lens"),
    ({"block_tables_SB": torch.zeros(1, 3, dtype=torch.int32)}, "1 block_tables for 2 seq_lens"),
    ({"query_starts_S1": int32(1, 2, 3)}, "query_starts[0] = 1, must be 0"),
    ({"query_starts_S1": int32(0, 2, 4)}, "query_starts[2] = 4, but q has 3 rows"),
    ({"query_starts_S1": int32(0, 3, 2)}, "query_starts[2] = 2 is less than the one before, 3"),
    ({"seq_lens_S": int32(1, 6)}, "seq_lens[0] = 1, but the sequence has 2 queries"),
    ({"seq_lens_S": int32(4, 7)}, "seq_lens[1] = 7 needs 4 blocks, block_tables has 3 columns"),
    (
        {"block_tables_SB": int32(0, 0, 0, 1, 5, 0).view(2, 3)},
        "block_tables[1, 1] = 5 is outside the cache of 5 blocks",
    ),
    ({"block_tables_SB": int32(0, -1, 0, 1, 1, 0).view(2, 3)}, "block_tables[0, 1] = -1 is outside the cache"),
    ({"window": -1}, "window = -1 is negative"),
    ({"chunk": -2}, "chunk = -2 is negative"),
    ({"softcap": -1.0}, "softcap = -1"),
    ({"sinks_H": torch.zeros(2)}, "2 sinks for 4 query heads"),
]


@pytest.mark.parametrize(("change", "words"), ATTENTION, ids=[words for _, words in ATTENTION])
def test_paged_attention(implementation: str, change: dict[str, Any], words: str) -> None:
    paged_attention(**attention_arguments())
    with pytest.raises(ValueError, match="paged_attention: .*" + re.escape(words)):
        paged_attention(**{**attention_arguments(), **change})


OTHERS: list[tuple[Callable[..., Any], tuple[torch.Tensor, ...], str]] = [
    (
        write_kv_cache,
        (torch.zeros(2, 1, 4), torch.zeros(3, 2, 1, 4), torch.tensor([5, 6])),
        "write_kv_cache: slots[1] = 6 is outside the cache of 6 slots",
    ),
    (
        write_kv_cache,
        (torch.zeros(2, 1, 4), torch.zeros(3, 2, 1, 4), torch.tensor([5, -2])),
        "write_kv_cache: slots[1] = -2 is outside the cache of 6 slots",
    ),
    (
        write_kv_cache,
        (torch.zeros(2, 1, 4), torch.zeros(3, 2, 1, 5), torch.tensor([0, 1])),
        "write_kv_cache: rows of x are [1, 4], of cache [1, 5]",
    ),
    (
        write_kv_cache,
        (torch.zeros(2, 1, 4), torch.zeros(3, 2, 1, 4), torch.tensor([0])),
        "write_kv_cache: x has 2 rows, slots 1",
    ),
    (
        combine_rows,
        (torch.zeros(2, 4), int32(0, 2).view(1, 2), torch.zeros(1, 2)),
        "combine_rows: index[0, 1] = 2 is outside the 2 rows",
    ),
    (
        combine_rows,
        (torch.zeros(2, 4), int32(0, 1).view(1, 2), torch.zeros(2, 1)),
        "combine_rows: index is [1, 2], weights [2, 1]",
    ),
    (
        combine_rows,
        (torch.zeros(2, 4), int32(0, 1).view(1, 2), torch.zeros(1, 2, dtype=torch.float64)),
        "combine_rows: weights is torch.float64, must be torch.float32",
    ),
    (matmul, (torch.zeros(2, 4).double(), torch.zeros(4, 3)), "matmul: a is torch.float64, must be torch.float32 or"),
    (matmul, (torch.zeros(2, 4), torch.zeros(4, 3).bfloat16()), "matmul: b is torch.bfloat16, must be torch.float32"),
    (matmul, (torch.zeros(2, 4), torch.zeros(3, 4)), "matmul: a is [2, 4], b [3, 4]"),
    (matmul, (torch.zeros(4), torch.zeros(4, 3)), "matmul: a has 1 dimensions, must have 2"),
    (matmul, (torch.zeros(2, 4), torch.zeros(4, 3), torch.zeros(2)), "matmul: bias has 2 elements for 3 columns"),
    (
        matmul,
        (torch.zeros(2, 4), torch.zeros(4, 3), torch.zeros(3).bfloat16()),
        "matmul: bias is torch.bfloat16, must be torch.float32",
    ),
    (bmm, (torch.zeros(2, 1, 4), torch.zeros(1, 4, 3)), "bmm: a is [2, 1, 4], b [1, 4, 3]"),
    (
        grouped_matmul,
        (torch.zeros(2, 4), torch.zeros(2, 4, 3), int32(2)),
        "grouped_matmul: 1 ends for 2 matrices",
    ),
    (
        grouped_matmul,
        (torch.zeros(2, 4), torch.zeros(2, 4, 3), int32(1, 0)),
        "grouped_matmul: ends[1] = 0 is less than the one before, 1",
    ),
    (
        grouped_matmul,
        (torch.zeros(2, 4), torch.zeros(2, 4, 3), int32(1, 3)),
        "grouped_matmul: ends[1] = 3, but x has 2 rows",
    ),
    (
        grouped_matmul,
        (torch.zeros(2, 4), torch.zeros(1, 4, 3), torch.tensor([2])),
        "grouped_matmul: ends is torch.int64, must be torch.int32",
    ),
]


PACK = [
    ({"slots_at": 14}, "slots_at = 14 must be a multiple of 4 and leave room for 16 bytes of x"),
    ({"slots_at": 18}, "slots_at = 18 must be a multiple of 4"),
    ({"row_bytes": 20}, "row_bytes = 20, but the slots end at 24"),
    ({"token_N": torch.tensor([0, 2])}, "token[1] = 2 is outside the 2 rows of x"),
    ({"token_N": torch.tensor([-1, 1])}, "token[0] = -1 is outside the 2 rows of x"),
    ({"token_N": torch.tensor([0])}, "1 tokens for 2 rows of slots"),
]


@pytest.mark.parametrize(("change", "words"), PACK, ids=[words for _, words in PACK])
def test_pack_rows(implementation: str, change: dict[str, Any], words: str) -> None:
    arguments = {
        "x_TH": torch.zeros(2, 4),
        "token_N": torch.tensor([1, 0]),
        "slots_NK": torch.zeros(2, 2, dtype=torch.int32),
        "slots_at": 16,
        "row_bytes": 32,
    }
    pack_rows(**arguments)
    with pytest.raises(ValueError, match=re.escape("pack_rows: " + words)):
        pack_rows(**{**arguments, **change})


@pytest.mark.parametrize(("op", "arguments", "words"), OTHERS, ids=[words for _, _, words in OTHERS])
def test_others(implementation: str, op: Callable[..., Any], arguments: tuple[torch.Tensor, ...], words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        op(*arguments)
