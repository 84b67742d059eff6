"""Dispatch: the rows of a message, gathered in one pass."""

from __future__ import annotations

import torch

from epruntime.ops import checks, reference
from epruntime.ops.extension import load


def pack_rows(
    x_TH: torch.Tensor, token_N: torch.Tensor, slots_NK: torch.Tensor, *, slots_at: int, row_bytes: int
) -> torch.Tensor:
    """Row n = the bytes of x[token[n]], zeros up to `slots_at`, the K slots as int32, zeros up to `row_bytes`.

    T tokens, N rows, H hidden, K choices a token.

    Args:
        x_TH: fp32 or bf16, last dimension contiguous.
        token_N: int64, row of x for each message row.
        slots_NK: int32, last dimension contiguous.
        slots_at: byte offset of the slots in a row, at least the bytes of a hidden row and a multiple of 4.
        row_bytes: bytes of a message row, at least slots_at + 4 K.

    Returns:
        uint8 [N, row_bytes], contiguous.

    Raises:
        ValueError: a shape, dtype, stride, offset or index is wrong.
    """
    extension = load()
    if extension is not None and x_TH.device.type == "cpu":
        result: torch.Tensor = extension.pack_rows(x_TH, token_N, slots_NK, slots_at, row_bytes)
        return result
    checks.pack_rows(x_TH, token_N, slots_NK, slots_at, row_bytes)
    return reference.pack_rows(x_TH, token_N, slots_NK, slots_at, row_bytes)
