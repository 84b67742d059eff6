"""Combine: a token's K expert outputs become one row, the same bits whichever ranks computed them."""

from __future__ import annotations

import torch

from epruntime.ops import checks, reference
from epruntime.ops.extension import load


def combine_rows(rows_MH: torch.Tensor, index_TK: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
    """out[t] = sum over k, in k order, of weights[t, k] * rows[index[t, k]], in fp32, cast once.

    T tokens, K choices a token, M rows as they came back, H hidden. The C++ kernel and the reference give equal bits:
    each product is rounded before it is added.

    Args:
        rows_MH: fp32 or bf16, last dimension contiguous.
        index_TK: int32 row of each choice; -1 for an absent one, which adds nothing.
        weights_TK: fp32.

    Returns:
        [T, H] in the dtype of `rows_MH`.

    Raises:
        ValueError: a shape, dtype, stride or index is wrong.
    """
    extension = load()
    if extension is not None and rows_MH.device.type == "cpu":
        result: torch.Tensor = extension.combine_rows(rows_MH, index_TK, weights_TK)
        return result
    checks.combine_rows(rows_MH, index_TK, weights_TK)
    return reference.combine_rows(rows_MH, index_TK, weights_TK)
