"""Matrix products: right against fp64, and every element's bits depend on its row, its column and K alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from epruntime.ops.gemm import bmm, grouped_matmul, matmul
from tests.kernels.rows_on_threads import counts_of

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])

#: b[K, N] from weight[N, K], as it may lie in memory.
LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "column-major": lambda weight: weight.t(),
    "row-major": lambda weight: weight.t().contiguous(),
    "column-major, strided": lambda weight: torch.cat([weight, weight.flip(1)], 1)[:, : weight.shape[1]].t(),
    "row-major, strided": lambda weight: torch.cat([weight, weight]).t().contiguous()[:, : weight.shape[0]],
    "neither": lambda weight: weight.repeat_interleave(2, 0).repeat_interleave(3, 1)[::2, ::3].t(),
}

#: (M, N, K): tiles and their edges, columns of several units, K of no step, of a part of one, of several chunks.
SIZES = [
    (1, 1, 1),
    (2, 3, 15),
    (3, 5, 31),
    (5, 7, 33),
    (4, 6, 512),
    (9, 13, 1037),
    (13, 49, 64),
    (33, 193, 70),
    (140, 50, 96),
    (7, 12, 2100),
]


def numbers(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def error_bound(a: torch.Tensor, b: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """Of a sum of K products in fp32, in any order, each rounded twice, and of the result's own rounding.

    Higham, Accuracy and Stability of Numerical Algorithms, section 3.1: |error| <= n u / (1 - n u) * sum |a| |b| for n
    roundings of unit u = 2^-24; K + 2 products, sums and the bias. Then the unit of the dtype: 2^-24 or 2^-8.
    """
    n = a.shape[-1] + 2
    inner = n * 2**-24 / (1 - n * 2**-24) * (a.double().abs() @ b.double().abs() + 1)
    unit = 2**-8 if a.dtype == torch.bfloat16 else 2**-24
    return inner + unit * (exact.abs() + inner)


@DTYPES
@pytest.mark.parametrize("layout", LAYOUTS)
def test_against_fp64(implementation: str, layout: str, dtype: torch.dtype) -> None:
    for m, n, k in SIZES:
        a, weight = numbers(m, k, dtype=dtype), numbers(n, k, dtype=dtype, seed=1)
        b, bias = LAYOUTS[layout](weight), numbers(n, dtype=dtype, seed=2).clamp(-1, 1)
        for extra in (None, bias, bias.float()):
            out = matmul(a, b, extra)
            exact = a.double() @ weight.double().t()
            if extra is not None:
                exact += extra.double()
            assert out.shape == (m, n)
            assert out.dtype == dtype
            assert out.is_contiguous()
            assert ((out.double() - exact).abs() <= error_bound(a, b, exact)).all(), (m, n, k)


@DTYPES
def test_how_the_factors_lie_in_memory_changes_nothing(implementation: str, dtype: torch.dtype) -> None:
    for m, n, k in SIZES:
        a, weight = numbers(m, k, dtype=dtype), numbers(n, k, dtype=dtype, seed=1)
        want = matmul(a, weight.t())
        for name, lay in LAYOUTS.items():
            assert torch.equal(matmul(a, lay(weight)), want), (name, m, n, k)
        assert torch.equal(matmul(a.t().contiguous().t(), weight.t()), want)
        assert torch.equal(matmul(torch.cat([a, a], 1)[:, :k], weight.t()), want)
        if m > 1:  # and as columns: (b^T a^T)^T
            assert torch.equal(matmul(weight, a.t()).t(), want)


@DTYPES
@pytest.mark.parametrize("num_threads", [1, 2, 3, 4])
def test_rows_1_to_70_on_threads_1_to_4(
    implementation: str, dtype: torch.dtype, num_threads: int, threads: None
) -> None:
    """The row alone on one thread, and in every batch, at another place, on any number of threads.

    Where one row is enough for several threads: test_rows_on_threads.py.
    """
    shapes = ((64, 200, "column-major"), (131, 96, "row-major"), (96, 5, "row-major"), (1100, 29, "column-major"))
    if implementation == "reference":
        shapes = ((33, 20, "column-major"),)
    for k, n, layout in shapes:  # 70 x 64 x 200 and the like are above the size from which threads are used
        a, b = numbers(70, k, dtype=dtype), LAYOUTS[layout](numbers(n, k, dtype=dtype, seed=1))
        bias = numbers(n, dtype=dtype, seed=2)
        torch.set_num_threads(1)
        alone = torch.cat([matmul(a[i : i + 1], b, bias) for i in range(70)])
        torch.set_num_threads(num_threads)
        for rows in counts_of(implementation)[num_threads]:
            first = 70 - rows if rows % 2 else 0
            part = slice(first, first + rows)
            assert torch.equal(matmul(a[part], b, bias), alone[part]), f"{rows} rows from {first} of {k} x {n}"
        order = torch.randperm(70, generator=torch.Generator().manual_seed(3))
        assert torch.equal(matmul(a[order], b, bias), alone[order])


@DTYPES
def test_a_column_s_bits_depend_on_the_column_alone(implementation: str, dtype: torch.dtype) -> None:
    a, weight = numbers(6, 77, dtype=dtype), numbers(203, 77, dtype=dtype, seed=1)
    for lay in (LAYOUTS["column-major"], LAYOUTS["row-major"]):
        want = matmul(a, lay(weight))
        for first, last in ((0, 1), (1, 2), (3, 16), (150, 203), (202, 203)):
            assert torch.equal(matmul(a, lay(weight[first:last])), want[:, first:last]), (first, last)


@DTYPES
@pytest.mark.parametrize("rows", [2, 70, 300])
def test_large_products_on_several_threads(implementation: str, dtype: torch.dtype, rows: int, threads: None) -> None:
    """Several units of columns and of rows; more chunks of k than one."""
    if implementation in ("reference", "portable"):
        pytest.skip("slow, and cut alike")
    for n in (40, 520):
        a, weight = numbers(rows, 2080, dtype=dtype), numbers(n, 2080, dtype=dtype, seed=1)
        torch.set_num_threads(1)
        want = matmul(a, weight.t())
        for count in (1, 2, 3, 4):
            torch.set_num_threads(count)
            assert torch.equal(matmul(a, weight.t()), want), count
            assert torch.equal(matmul(a, weight.t().contiguous()), want), count
            assert torch.equal(matmul(a[rows // 2 :], weight.t()), want[rows // 2 :]), count


@DTYPES
def test_nan_and_infinity_stay_in_their_row_and_column(implementation: str, dtype: torch.dtype) -> None:
    for k in (16, 45):
        a, weight = numbers(11, k, dtype=dtype), numbers(9, k, dtype=dtype, seed=1)
        for lay in (LAYOUTS["column-major"], LAYOUTS["row-major"]):
            want = matmul(a, lay(weight))
            spoilt, column = a.clone(), weight.clone()
            spoilt[2, k - 1], spoilt[7, 0] = torch.nan, torch.inf
            column[4, 3] = -torch.inf
            out = matmul(spoilt, lay(column))
            clean_M = torch.tensor([m not in (2, 7) for m in range(11)])
            clean_N = torch.tensor([n != 4 for n in range(9)])
            assert torch.equal(out[clean_M][:, clean_N], want[clean_M][:, clean_N])
            assert out[2].isnan().all()
            assert not out[7].isfinite().any()
            assert not out[:, 4].isfinite().any()


def test_subnormal_numbers(implementation: str) -> None:
    """fp32 keeps them; bf16 does but where the instruction takes them for zero, which is said."""
    tiny = torch.full((1, 1), 2.0**-130)
    assert matmul(tiny, torch.ones(1, 1)).item() == 2.0**-130
    product = matmul(tiny.bfloat16(), torch.ones(1, 1).bfloat16()).item()
    assert product == (0.0 if implementation == "avx512_bf16" else 2.0**-130)


def test_sums_in_fp32_and_rounds_once(implementation: str) -> None:
    """In bf16, 256 + 1 is 256; its fp32 sum with the bias, 256 + 1 + 1, is 258, which bf16 holds."""
    a = torch.tensor([[256.0, 1.0]], dtype=torch.bfloat16)
    b, bias = torch.ones(2, 1, dtype=torch.bfloat16), torch.ones(1, dtype=torch.bfloat16)
    assert matmul(a, b, bias).item() == 258.0


@DTYPES
def test_nothing_to_add_or_to_compute(implementation: str, dtype: torch.dtype) -> None:
    bias = numbers(3, dtype=dtype)
    assert torch.equal(
        matmul(torch.ones(2, 0, dtype=dtype), torch.ones(0, 3, dtype=dtype)), torch.zeros(2, 3).to(dtype)
    )
    assert torch.equal(matmul(torch.ones(2, 0, dtype=dtype), torch.ones(0, 3, dtype=dtype), bias), bias.expand(2, 3))
    assert matmul(torch.ones(0, 4, dtype=dtype), torch.ones(4, 3, dtype=dtype), bias).shape == (0, 3)
    assert matmul(torch.ones(2, 4, dtype=dtype), torch.ones(4, 0, dtype=dtype)).shape == (2, 0)
    assert bmm(torch.ones(0, 2, 4, dtype=dtype), torch.ones(0, 4, 3, dtype=dtype)).shape == (0, 2, 3)
    assert bmm(torch.ones(2, 2, 0, dtype=dtype), torch.ones(2, 0, 3, dtype=dtype)).sum() == 0
    ends = torch.zeros(2, dtype=torch.int32)
    x, matrix = torch.ones(3, 4, dtype=dtype), torch.ones(2, 4, 5, dtype=dtype)
    assert torch.equal(grouped_matmul(x, matrix, ends), torch.zeros(3, 5, dtype=dtype))
    assert grouped_matmul(x, matrix[:0], ends[:0]).tolist() == [[0.0] * 5] * 3
    assert grouped_matmul(x[:0], matrix, ends).shape == (0, 5)


@DTYPES
def test_batches_are_their_products(implementation: str, dtype: torch.dtype, threads: None) -> None:
    a, b = numbers(5, 3, 40, dtype=dtype), numbers(5, 40, 30, dtype=dtype, seed=1)
    want = torch.stack([matmul(a[i], b[i]) for i in range(5)])
    shared = torch.stack([matmul(a[i], b[2]) for i in range(5)])
    for count in (1, 2, 3, 4):
        torch.set_num_threads(count)
        assert torch.equal(bmm(a, b), want)
        assert torch.equal(bmm(a, b.transpose(1, 2).contiguous().transpose(1, 2)), want)
        assert torch.equal(bmm(a.transpose(0, 1).contiguous().transpose(0, 1), b), want)
        assert torch.equal(bmm(a[3:4], b[3:4]), want[3:4])
        assert torch.equal(bmm(a, b[2].expand(5, 40, 30)), shared)
        assert torch.equal(bmm(a, b.repeat_interleave(2, 2)[..., ::2]), want)


@DTYPES
@pytest.mark.parametrize("num_threads", [1, 2, 3, 4])
def test_groups_are_their_products(implementation: str, dtype: torch.dtype, num_threads: int, threads: None) -> None:
    """Groups of 0, 1, many and 0 rows; rows past the last group are zero, whatever x has there."""
    sizes = [0, 1, 37, 0, 2, 8, 0]
    size_in, size_out = (70, 90) if implementation != "reference" else (20, 10)
    ends = torch.tensor(sizes, dtype=torch.int32).cumsum(0, dtype=torch.int32)
    x = numbers(sum(sizes) + 3, size_in, dtype=dtype)
    x[-3:] = torch.nan
    weight = numbers(len(sizes), size_out, size_in, dtype=dtype, seed=1)
    torch.set_num_threads(1)
    rows = [matmul(x[m : m + 1], weight[s].t()) for s, m in enumerate_rows(sizes)]
    want = torch.cat([*rows, torch.zeros(3, size_out, dtype=dtype)])
    torch.set_num_threads(num_threads)
    for matrix in (weight.transpose(1, 2), weight.transpose(1, 2).contiguous()):
        assert torch.equal(grouped_matmul(x, matrix, ends), want)
        tail = torch.tensor([0, 0, 5, 5, 7, 15, 15], dtype=torch.int32)  # the same rows, fewer beside them
        assert torch.equal(grouped_matmul(x[33:48], matrix, tail), want[33:48])
    assert torch.equal(grouped_matmul(x, weight.transpose(1, 2).repeat_interleave(2, 1)[:, ::2], ends), want)


def enumerate_rows(sizes: list[int]) -> list[tuple[int, int]]:
    """(group, row) of every row."""
    groups = [s for s, size in enumerate(sizes) for _ in range(size)]
    return [(s, m) for m, s in enumerate(groups)]
