"""A message row, byte for byte."""

from __future__ import annotations

import pytest
import torch

from epruntime.ops.dispatch import pack_rows


def test_on_paper(implementation: str) -> None:
    x = torch.tensor([[1.0], [2.0]], dtype=torch.bfloat16)  # 0x3f80, 0x4000
    slots = torch.tensor([[7, -1], [-1, 258]], dtype=torch.int32)
    message = pack_rows(x, torch.tensor([1, 0]), slots, slots_at=4, row_bytes=16)
    assert message.tolist() == [
        [0x00, 0x40, 0, 0, 7, 0, 0, 0, 255, 255, 255, 255, 0, 0, 0, 0],
        [0x80, 0x3F, 0, 0, 255, 255, 255, 255, 2, 1, 0, 0, 0, 0, 0, 0],
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_many_strided_rows_on_threads(implementation: str, dtype: torch.dtype, threads: None) -> None:
    torch.set_num_threads(4)
    x = torch.randn(200, 600).to(dtype)[:, 100:400]
    token = torch.randint(200, (700,))
    slots = torch.randint(-1, 9, (700, 12), dtype=torch.int32)[:, 2:10]
    end = 300 * dtype.itemsize
    message = pack_rows(x, token, slots, slots_at=end + 8, row_bytes=end + 48)
    assert torch.equal(message[:, :end].contiguous().view(dtype), x[token])
    assert torch.equal(message[:, end + 8 : end + 40].contiguous().view(torch.int32), slots)
    assert not message[:, end : end + 8].any()
    assert not message[:, end + 40 :].any()


def test_no_rows(implementation: str) -> None:
    none = torch.zeros(0, 2, dtype=torch.int32)
    message = pack_rows(torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64), none, slots_at=16, row_bytes=32)
    assert message.shape == (0, 32)
