"""Rows land in their slots, and nowhere else."""

from __future__ import annotations

import pytest
import torch

from epruntime.ops.attention import write_kv_cache


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_rows_land_in_their_slots(implementation: str, dtype: torch.dtype) -> None:
    x = torch.arange(1, 25).view(4, 2, 3).to(dtype)
    cache = torch.zeros(3, 2, 2, 3, dtype=dtype)
    write_kv_cache(x, cache, torch.tensor([5, -1, 0, 3]))
    assert torch.equal(cache[2, 1], x[0])
    assert torch.equal(cache[0, 0], x[2])
    assert torch.equal(cache[1, 1], x[3])
    assert cache.count_nonzero() == 18


def test_strided_rows_and_cache(implementation: str) -> None:
    """x as the transposed view that a projection gives; the cache as half of a joint one."""
    x = torch.arange(24.0).view(2, 4, 3).transpose(0, 1)
    joint = torch.full((2, 4, 2, 6), -1.0)
    write_kv_cache(x, joint[..., 3:], torch.tensor([7, 6, 1, 0]))
    assert torch.equal(joint[1, 3, :, 3:], x[0])
    assert torch.equal(joint[0, 0, :, 3:], x[3])
    assert (joint[..., :3] == -1.0).all()
    assert (joint == -1.0).sum() == 2 * 4 * 2 * 6 - 24


def test_many_rows_on_threads(implementation: str, threads: None) -> None:
    torch.set_num_threads(4)
    x = torch.randn(1000, 4, 64)
    cache = torch.zeros(100, 16, 4, 64)
    slots = torch.randperm(1600)[:1000]
    write_kv_cache(x, cache, slots)
    assert torch.equal(cache.view(1600, 4, 64)[slots], x)
