"""Matrix products whose rows do not know one another ("batch-invariant").

Every element of a result is one sum over k in one fixed order, in fp32, rounded once to the result's dtype. The order
depends on the dtype, K and the instruction set alone: not on the number of rows or columns, not on a row's place, not
on how b lies in memory, and not on the number of threads, which share out columns and rows and never k. So a row has
the same bits alone and among any others, and NaN or infinity in one row never reaches another.

Bits differ between instruction sets (`kernel_signature` names the one in use), and between the C++ kernels and the
reference. bf16 on `avx512_bf16` takes subnormal numbers (below 2^-126) for zero, as the instruction does.

Shape letters: M rows, N columns, K summed over, B matrices of a batch; P rows in groups, S groups, I = K, O = N.
"""

from __future__ import annotations

import torch

from epruntime.ops import checks, reference
from epruntime.ops.extension import load


def matmul(a_MK: torch.Tensor, b_KN: torch.Tensor, bias_N: torch.Tensor | None = None) -> torch.Tensor:
    """a @ b + bias, row-independent.

    Args:
        a_MK: fp32 or bf16, any strides; copied unless its rows are contiguous. M, K may be 0.
        b_KN: same dtype, any strides. Column-major (`linear.weight.t()`) is read where it lies, row-major through
            small transposed pieces; others are copied.
        bias_N: same dtype or fp32; added in fp32 before the one rounding. None for none.

    Returns:
        [M, N] in the dtype of `a_MK`, contiguous; zeros (or the bias) where K is 0.

    Raises:
        ValueError: a shape or dtype is wrong.
    """
    extension = load()
    if extension is not None and a_MK.device.type == "cpu":
        result: torch.Tensor = extension.matmul(a_MK, b_KN, bias_N)
        return result
    checks.matmul(a_MK, b_KN, bias_N)
    return reference.matmul(a_MK, b_KN, bias_N)


def bmm(a_BMK: torch.Tensor, b_BKN: torch.Tensor) -> torch.Tensor:
    """a[i] @ b[i] for every i < B: the bits of `matmul` of each pair.

    Args:
        a_BMK: fp32 or bf16, any strides.
        b_BKN: same dtype, any strides (0 where a matrix is shared).

    Returns:
        [B, M, N] in the dtype of `a_BMK`, contiguous.

    Raises:
        ValueError: a shape or dtype is wrong.
    """
    extension = load()
    if extension is not None and a_BMK.device.type == "cpu":
        result: torch.Tensor = extension.bmm(a_BMK, b_BKN)
        return result
    checks.bmm(a_BMK, b_BKN)
    return reference.bmm(a_BMK, b_BKN)


def grouped_matmul(x_PI: torch.Tensor, matrix_SIO: torch.Tensor, ends_S: torch.Tensor) -> torch.Tensor:
    """Rows of group s times matrix s, without padding: the bits of `matmul` of each group.

    Args:
        x_PI: fp32 or bf16, any strides.
        matrix_SIO: same dtype, any strides, as `b_KN` of `matmul`.
        ends_S: int32, end of each group, not descending; group s has the rows `ends_S[s - 1] : ends_S[s]`, the first
            begins at 0. Groups may be empty.

    Returns:
        [P, O] in the dtype of `x_PI`, contiguous; rows from `ends_S[-1]` on are zero.

    Raises:
        ValueError: a shape or dtype is wrong, or the ends descend or exceed P.
    """
    extension = load()
    if extension is not None and x_PI.device.type == "cpu":
        result: torch.Tensor = extension.grouped_matmul(x_PI, matrix_SIO, ends_S)
        return result
    checks.grouped_matmul(x_PI, matrix_SIO, ends_S)
    return reference.grouped_matmul(x_PI, matrix_SIO, ends_S)
