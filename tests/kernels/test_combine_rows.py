"""Combine against sums worked out on paper and in fp64."""

from __future__ import annotations

import pytest
import torch

from epruntime.ops import reference
from epruntime.ops.combine import combine_rows


def test_on_paper(implementation: str) -> None:
    rows = torch.tensor([[1.0, 2.0], [10.0, 20.0], [torch.nan, torch.inf]])
    index = torch.tensor([[0, 1], [-1, 0], [1, 1], [-1, -1]], dtype=torch.int32)
    weights = torch.tensor([[0.5, 0.25], [torch.nan, 2.0], [1.0, -1.0], [1.0, 1.0]])
    expected = torch.tensor([[3.0, 6.0], [2.0, 4.0], [0.0, 0.0], [0.0, 0.0]])
    assert torch.equal(combine_rows(rows, index, weights), expected)


def test_adds_in_k_order(implementation: str) -> None:
    """2^24 + 1 is 2^24 in fp32: from the left 2^24 + 1 - 2^24 is 0, in the order of the last row it is 1."""
    rows = torch.tensor([[2.0**24], [1.0], [-(2.0**24)]])
    index = torch.tensor([[0, 1, 2], [0, 2, 1]], dtype=torch.int32)
    assert combine_rows(rows, index, torch.ones(2, 3)).flatten().tolist() == [0.0, 1.0]


def test_sums_in_fp32_and_rounds_once(implementation: str) -> None:
    """1 + 2^-8 is a tie that bf16 rounds down to 1; two of them add up to 1 + 2^-7, which bf16 holds."""
    rows = torch.tensor([[1.0], [2.0**-8]], dtype=torch.bfloat16)
    index = torch.tensor([[0, 1, 1], [0, 1, -1]], dtype=torch.int32)
    out = combine_rows(rows, index, torch.ones(2, 3))
    assert out.dtype == torch.bfloat16
    assert out.flatten().tolist() == [1.0 + 2.0**-7, 1.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("hidden", [1, 7, 512, 1030])
def test_against_fp64_and_equal_to_the_reference(implementation: str, hidden: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(hidden)
    rows = torch.randn(40, hidden, generator=generator).to(dtype)
    index = torch.randint(-1, 40, (33, 6), generator=generator, dtype=torch.int32)
    weights = torch.rand(33, 6, generator=generator)
    out = combine_rows(rows, index, weights)
    chosen = torch.where(index[..., None] >= 0, rows.double()[index.clamp(min=0).long()], 0.0)
    expected = (chosen * weights.double()[..., None]).sum(1)
    torch.testing.assert_close(out.double(), expected, rtol=2**-8 if dtype == torch.bfloat16 else 1e-6, atol=2e-6)
    assert torch.equal(out, reference.combine_rows(rows, index, weights))


def test_strided_rows_and_no_rows(implementation: str) -> None:
    rows = torch.arange(12.0).view(3, 4)
    index = torch.tensor([[2]], dtype=torch.int32)
    assert combine_rows(rows[:, :2], index, torch.ones(1, 1)).tolist() == [[8.0, 9.0]]
    none = torch.full((2, 3), -1, dtype=torch.int32)
    assert combine_rows(rows[:0], none, torch.ones(2, 3)).tolist() == [[0.0] * 4] * 2
    assert combine_rows(rows, none[:0], torch.ones(0, 3)).shape == (0, 4)
