"""The kernels that take rows as they come, at 1 to 70 rows on 1 to 4 threads. Attention: test_attention_rows.py."""

from __future__ import annotations

import pytest
import torch

from epruntime.ops import reference
from epruntime.ops.attention import write_kv_cache
from epruntime.ops.combine import combine_rows
from epruntime.ops.dispatch import pack_rows
from epruntime.ops.gemm import bmm, grouped_matmul, matmul
from tests.kernels.rows_on_threads import BEST, COUNTS, MOST, THREADS, check_rows, counts_of, num_parts
from tests.kernels.test_gemm import DTYPES, LAYOUTS, error_bound, numbers

#: Bytes, or products, from which on another thread is used: csrc/bindings.cpp.
GRAIN = 65_536
#: Products of numbers below which one thread computes a matrix product: csrc/gemm_binding.cpp.
SMALL_PRODUCT = 100_000
#: Moves of rows have one copy for all instruction sets.
MOVES = pytest.mark.parametrize("implementation", [BEST, "reference"], indirect=True)


def shares(size_of_a_row: int) -> list[int]:
    """The rows, of 1 to 70, that so many threads do not get a part of each; by number of threads."""
    grain = max(1, GRAIN // size_of_a_row)
    return [sum(num_parts(rows, grain, threads) < threads for rows in COUNTS) for threads in THREADS]


def test_wide_rows_occupy_all_threads() -> None:
    """Of 70 counts: too few rows, and those that are shared out as 2 + 2 + 1 or the like."""
    assert shares(GRAIN // 2 + 1) == [0, 1, 3, 6]
    assert shares(8 * 130) == [0, 63, 70, 70]


def matrix_size(implementation: str) -> tuple[int, int]:
    """K, N; with the best instruction set one row is enough work for several threads."""
    if implementation == BEST != "reference":
        return 340, 300
    return (33, 20) if implementation == "reference" else (131, 100)


def test_one_row_is_enough_for_several_threads() -> None:
    assert SMALL_PRODUCT <= 340 * 300


@DTYPES
@pytest.mark.parametrize("hidden", [7, 1030, 4200])
def test_combine(implementation: str, hidden: int, dtype: torch.dtype, threads: None) -> None:
    """8 rows of 4,200 are above half a grain: every token may have a thread of its own."""
    x = numbers(90, hidden, dtype=dtype)
    index = torch.randint(-1, 90, (MOST, 8), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    weights = numbers(MOST, 8, dtype=torch.float32, seed=1)
    alone = check_rows(lambda rows: combine_rows(x, index[rows], weights[rows]), counts_of(implementation))
    assert torch.equal(alone, reference.combine_rows(x, index, weights))
    chosen = torch.where(index[..., None] >= 0, x.double()[index.clamp(min=0).long()], 0.0)
    exact = (chosen * weights.double()[..., None]).sum(1)
    torch.testing.assert_close(alone.double(), exact, rtol=2**-8 if dtype == torch.bfloat16 else 1e-6, atol=5e-6)


@DTYPES
@pytest.mark.parametrize("layout", LAYOUTS)
def test_matmul(implementation: str, layout: str, dtype: torch.dtype, threads: None) -> None:
    k, n = matrix_size(implementation)
    a, weight, bias = numbers(MOST, k, dtype=dtype), numbers(n, k, dtype=dtype, seed=1), numbers(n, dtype=dtype, seed=2)
    b = LAYOUTS[layout](weight)
    alone = check_rows(lambda rows: matmul(a[rows], b, bias), counts_of(implementation))
    exact = a.double() @ b.double() + bias.double()
    bound = error_bound(a, b, exact) * (1 + bias.double().abs())
    assert ((alone.double() - exact).abs() <= bound).all()


@DTYPES
@pytest.mark.parametrize("layout", ["column-major", "row-major"])
def test_bmm(implementation: str, layout: str, dtype: torch.dtype, threads: None) -> None:
    k, n = matrix_size(implementation)
    a, weight = numbers(3, MOST, k, dtype=dtype), numbers(3, n, k, dtype=dtype, seed=1)
    b = weight.transpose(1, 2) if layout == "column-major" else weight.transpose(1, 2).contiguous()
    alone = check_rows(lambda rows: bmm(a[:, rows], b).transpose(0, 1), counts_of(implementation))
    exact = a.double() @ b.double()
    assert ((alone.transpose(0, 1).double() - exact).abs() <= error_bound(a, b, exact)).all()


@DTYPES
@pytest.mark.parametrize("layout", ["column-major", "row-major"])
def test_grouped_matmul(implementation: str, layout: str, dtype: torch.dtype, threads: None) -> None:
    """Rows of six groups, some of which are empty where rows are few, and two rows of no group."""
    k, n = matrix_size(implementation)
    x, weight = numbers(MOST, k, dtype=dtype), numbers(6, n, k, dtype=dtype, seed=1)
    matrix = weight.transpose(1, 2) if layout == "column-major" else weight.transpose(1, 2).contiguous()
    group = torch.arange(MOST) * 11 % 17 % 6

    def run(rows: torch.Tensor) -> torch.Tensor:
        order = group[rows].argsort(stable=True)
        ends = group[rows].bincount(minlength=6).cumsum(0).int()
        out = grouped_matmul(torch.cat([x[rows][order], x.new_full((2, k), torch.nan)]), matrix, ends)
        assert not out[len(rows) :].any(), "rows of no group must be zero"
        return out[order.argsort()]

    alone = check_rows(run, counts_of(implementation))
    for s in range(6):
        own, exact = x[group == s], x[group == s].double() @ matrix[s].double()
        assert ((alone[group == s].double() - exact).abs() <= error_bound(own, matrix[s], exact)).all()


@MOVES
@DTYPES
@pytest.mark.parametrize("row_bytes", [64, GRAIN // 2 + 64])
def test_pack_rows(implementation: str, row_bytes: int, dtype: torch.dtype, threads: None) -> None:
    """Every row may have a thread of its own where it has more bytes than half a grain."""
    hidden = (row_bytes - 48) // dtype.itemsize
    x = numbers(40, hidden + 5, dtype=dtype)[:, 3 : 3 + hidden]
    token = torch.randint(40, (MOST,), generator=torch.Generator().manual_seed(0))
    slots = torch.randint(-1, 9, (MOST, 12), generator=torch.Generator().manual_seed(1), dtype=torch.int32)[:, 2:10]
    end = hidden * dtype.itemsize
    alone = check_rows(
        lambda rows: pack_rows(x, token[rows], slots[rows][:, :8], slots_at=end + 8, row_bytes=row_bytes),
        counts_of(implementation),
    )
    assert torch.equal(alone[:, :end].contiguous().view(dtype), x[token])
    assert torch.equal(alone[:, end + 8 : end + 40].contiguous().view(torch.int32), slots)
    assert not alone[:, end : end + 8].any()
    assert not alone[:, end + 40 :].any()


@MOVES
@DTYPES
@pytest.mark.parametrize("size", [5, 2080])
@pytest.mark.parametrize("joint", [False, True], ids=["own cache", "half of a joint one"])
def test_write_kv_cache(implementation: str, joint: bool, size: int, dtype: torch.dtype, threads: None) -> None:
    """Slots of rows that are not there, and the slot of the row that has none, stay as they were."""
    heads = 4 if dtype == torch.float32 else 8
    assert size < 100 or heads * size * dtype.itemsize > GRAIN // 2
    x = numbers(MOST, heads, size, dtype=dtype)
    slots = torch.randperm(80, generator=torch.Generator().manual_seed(0))[:MOST]
    slots[33] = -1
    memory = torch.full((5, 16, heads, size * (2 if joint else 1)), -9.0, dtype=dtype)
    cache = memory[..., size:] if joint else memory
    by_slot = cache.flatten(0, 1)

    def run(rows: torch.Tensor) -> torch.Tensor:
        count, num_threads, own = len(rows), torch.get_num_threads(), x[rows]
        write_kv_cache(own, cache, slots[rows])
        torch.set_num_threads(1)  # what follows is torch's
        kept = slots[rows] >= 0
        out = torch.zeros(count, heads, size, dtype=dtype)
        out[kept] = by_slot[slots[rows][kept]]
        by_slot[slots[rows][kept]] = -9.0
        assert count % 8 or (memory == -9.0).all(), "another slot was written"
        torch.set_num_threads(num_threads)
        return out

    alone = check_rows(run, counts_of(implementation))
    assert (memory == -9.0).all(), "another slot was written"
    x[33] = 0
    assert torch.equal(alone, x)
