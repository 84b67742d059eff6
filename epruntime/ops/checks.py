"""Argument checks of the plain-torch path; the C++ bindings (`csrc/*bind*`) make the same ones."""

from __future__ import annotations

import torch

FLOATS = (torch.float32, torch.bfloat16)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _tensor(op: str, name: str, x: torch.Tensor, dtypes: tuple[torch.dtype, ...], dim: int, like: torch.Tensor) -> None:
    names = " or ".join(str(dtype) for dtype in dtypes)
    _require(x.dtype in dtypes, f"{op}: {name} is {x.dtype}, must be {names}")
    _require(x.dim() == dim, f"{op}: {name} has {x.dim()} dimensions, must have {dim}")
    _require(x.device == like.device, f"{op}: {name} is on {x.device}, must be on {like.device}")
    contiguous = x.shape[-1] <= 1 or x.stride(-1) == 1
    _require(contiguous, f"{op}: the last dimension of {name} is not contiguous (stride {x.stride(-1)})")


def write_kv_cache(x: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
    op = "write_kv_cache"
    _tensor(op, "x", x, FLOATS, 3, x)
    _tensor(op, "cache", cache, (x.dtype,), 4, x)
    _tensor(op, "slots", slots, (torch.int64,), 1, x)
    _require(
        x.shape[1:] == cache.shape[2:], f"{op}: rows of x are {list(x.shape[1:])}, of cache {list(cache.shape[2:])}"
    )
    _require(slots.shape[0] == x.shape[0], f"{op}: x has {x.shape[0]} rows, slots {slots.shape[0]}")
    size = cache.shape[0] * cache.shape[1]
    wrong = ((slots < -1) | (slots >= size)).nonzero().flatten()
    if len(wrong):
        t = int(wrong[0])
        raise ValueError(f"{op}: slots[{t}] = {int(slots[t])} is outside the cache of {size} slots")


def combine_rows(rows: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> None:
    op = "combine_rows"
    _tensor(op, "rows", rows, FLOATS, 2, rows)
    _tensor(op, "index", index, (torch.int32,), 2, rows)
    _tensor(op, "weights", weights, (torch.float32,), 2, rows)
    _require(index.shape == weights.shape, f"{op}: index is {list(index.shape)}, weights {list(weights.shape)}")
    wrong = ((index < -1) | (index >= rows.shape[0])).nonzero()
    if len(wrong):
        t, k = wrong[0].tolist()
        raise ValueError(f"{op}: index[{t}, {k}] = {int(index[t, k])} is outside the {rows.shape[0]} rows")


def pack_rows(x: torch.Tensor, token: torch.Tensor, slots: torch.Tensor, slots_at: int, row_bytes: int) -> None:
    op = "pack_rows"
    _tensor(op, "x", x, FLOATS, 2, x)
    _tensor(op, "token", token, (torch.int64,), 1, x)
    _tensor(op, "slots", slots, (torch.int32,), 2, x)
    _require(token.shape[0] == slots.shape[0], f"{op}: {token.shape[0]} tokens for {slots.shape[0]} rows of slots")
    hidden_bytes, end = x.shape[1] * x.element_size(), slots_at + 4 * slots.shape[1]
    _require(
        slots_at >= hidden_bytes and slots_at % 4 == 0,
        f"{op}: slots_at = {slots_at} must be a multiple of 4 and leave room for {hidden_bytes} bytes of x",
    )
    _require(row_bytes >= end, f"{op}: row_bytes = {row_bytes}, but the slots end at {end}")
    wrong = ((token < 0) | (token >= x.shape[0])).nonzero().flatten()
    if len(wrong):
        n = int(wrong[0])
        raise ValueError(f"{op}: token[{n}] = {int(token[n])} is outside the {x.shape[0]} rows of x")


def _product(op: str, names: tuple[str, str], a: torch.Tensor, b: torch.Tensor, dims: tuple[int, int]) -> None:
    """Dtypes and dimensions of a product's two factors; its strides are free."""
    for name, x, dtypes, dim in ((names[0], a, FLOATS, dims[0]), (names[1], b, (a.dtype,), dims[1])):
        wanted = " or ".join(str(dtype) for dtype in dtypes)
        _require(x.dtype in dtypes, f"{op}: {name} is {x.dtype}, must be {wanted}")
        _require(x.dim() == dim, f"{op}: {name} has {x.dim()} dimensions, must have {dim}")
        _require(x.device == a.device, f"{op}: {name} is on {x.device}, must be on {a.device}")
    _require(a.shape[-1] == b.shape[-2], f"{op}: {names[0]} is {list(a.shape)}, {names[1]} {list(b.shape)}")


def matmul(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None) -> None:
    op = "matmul"
    _product(op, ("a", "b"), a, b, (2, 2))
    if bias is not None:
        dtypes = (a.dtype,) if a.dtype == torch.float32 else (a.dtype, torch.float32)
        wanted = " or ".join(str(dtype) for dtype in dtypes)
        _require(bias.dtype in dtypes, f"{op}: bias is {bias.dtype}, must be {wanted}")
        _require(bias.dim() == 1, f"{op}: bias has {bias.dim()} dimensions, must have 1")
        _require(bias.device == a.device, f"{op}: bias is on {bias.device}, must be on {a.device}")
        _require(bias.shape[0] == b.shape[1], f"{op}: bias has {bias.shape[0]} elements for {b.shape[1]} columns")


def bmm(a: torch.Tensor, b: torch.Tensor) -> None:
    _product("bmm", ("a", "b"), a, b, (3, 3))
    _require(a.shape[0] == b.shape[0], f"bmm: a is {list(a.shape)}, b {list(b.shape)}")


def grouped_matmul(x: torch.Tensor, matrix: torch.Tensor, ends: torch.Tensor) -> None:
    op = "grouped_matmul"
    _product(op, ("x", "matrix"), x, matrix, (2, 3))
    _tensor(op, "ends", ends, (torch.int32,), 1, x)
    _require(ends.shape[0] == matrix.shape[0], f"{op}: {ends.shape[0]} ends for {matrix.shape[0]} matrices")
    before = 0
    for s, end in enumerate(ends.tolist()):
        _require(before <= end, f"{op}: ends[{s}] = {end} is less than the one before, {before}")
        before = end
    _require(before <= x.shape[0], f"{op}: ends[{ends.shape[0] - 1}] = {before}, but x has {x.shape[0]} rows")


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_starts: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    window: int,
    chunk: int,
    softcap: float,
    sinks: torch.Tensor | None,
) -> None:
    op = "paged_attention"
    _tensor(op, "q", q, FLOATS, 3, q)
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        _tensor(op, name, cache, (q.dtype,), 4, q)
    _tensor(op, "block_tables", block_tables, (torch.int32,), 2, q)
    _tensor(op, "query_starts", query_starts, (torch.int32,), 1, q)
    _tensor(op, "seq_lens", seq_lens, (torch.int32,), 1, q)
    _require(
        k_cache.shape[:3] == v_cache.shape[:3],
        f"{op}: k_cache is {list(k_cache.shape)}, v_cache {list(v_cache.shape)}; blocks, slots and heads must agree",
    )
    _require(q.shape[2] == k_cache.shape[3], f"{op}: q has head size {q.shape[2]}, k_cache {k_cache.shape[3]}")
    num_blocks, block_size, num_kv_heads, _ = k_cache.shape
    _require(
        num_kv_heads > 0 and q.shape[1] % num_kv_heads == 0,
        f"{op}: {q.shape[1]} query heads are not a multiple of {num_kv_heads} KV heads",
    )
    _require(window >= 0, f"{op}: window = {window} is negative")
    _require(chunk >= 0, f"{op}: chunk = {chunk} is negative")
    _require(softcap >= 0, f"{op}: softcap = {softcap} is negative")
    if sinks is not None:
        _tensor(op, "sinks", sinks, (torch.float32,), 1, q)
        _require(sinks.shape[0] == q.shape[1], f"{op}: {sinks.shape[0]} sinks for {q.shape[1]} query heads")
    num_seqs = seq_lens.shape[0]
    _require(
        query_starts.shape[0] == num_seqs + 1, f"{op}: {query_starts.shape[0]} query_starts for {num_seqs} seq_lens"
    )
    _require(block_tables.shape[0] == num_seqs, f"{op}: {block_tables.shape[0]} block_tables for {num_seqs} seq_lens")
    starts, lens = query_starts.tolist(), seq_lens.tolist()
    _require(starts[0] == 0, f"{op}: query_starts[0] = {starts[0]}, must be 0")
    _require(starts[-1] <= q.shape[0], f"{op}: query_starts[{num_seqs}] = {starts[-1]}, but q has {q.shape[0]} rows")
    for s, length in enumerate(lens):
        queries = starts[s + 1] - starts[s]
        _require(
            queries >= 0, f"{op}: query_starts[{s + 1}] = {starts[s + 1]} is less than the one before, {starts[s]}"
        )
        if queries == 0:
            continue
        _require(length >= queries, f"{op}: seq_lens[{s}] = {length}, but the sequence has {queries} queries")
        position = length - queries
        first = max(0, position - window + 1 if window else 0, position // chunk * chunk if chunk else 0)
        needed = (length - 1) // block_size + 1
        _require(
            needed <= block_tables.shape[1],
            f"{op}: seq_lens[{s}] = {length} needs {needed} blocks, block_tables has {block_tables.shape[1]} columns",
        )
        for b, block in enumerate(block_tables[s, :needed].tolist()):
            if b >= first // block_size:
                _require(
                    0 <= block < num_blocks,
                    f"{op}: block_tables[{s}, {b}] = {block} is outside the cache of {num_blocks} blocks",
                )
