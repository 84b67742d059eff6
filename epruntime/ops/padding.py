"""How many rows a batch is padded to, so that library GEMMs give a row the same bits whatever its batch-mates.

Measured on torch 2.13, CPU: `F.linear` and `grouped_mm` choose another kernel, and other bits for the same row, when
there are few rows (1 to 3 in fp32 on one thread, most counts below 12 on two). From 16 rows up, in multiples of 16,
every count gave equal bits on 1 to 16 threads; 32 leaves a margin. `tests/kernels/test_row_independence.py` checks it.

Padding does not help where fp32 rows are no multiple of 16 bytes and the product is 2 to 11 columns wide, as a
router's is: there a row's bits depend on its place (measured with 65, 66, 70, 130 and 1030 elements; all multiples of
4 that were tried are steady, and bf16 is at any length). No published model has such a hidden size.
`steady_rows` tells.
"""

from __future__ import annotations

ROW_MULTIPLE = 32


_STEADY_FP32 = 4


def steady_rows(row_elements: int, dtype: str) -> bool:
    """Whether padding alone makes products of rows of this length independent of the row's place, however narrow."""
    return dtype != "float32" or row_elements % _STEADY_FP32 == 0


def padded_rows(n: int, *, strict: bool) -> int:
    """Rows to compute for `n` valid ones.

    Args:
        n: valid rows, at least 0.
        strict: the invariance contract holds: round up to a multiple of `ROW_MULTIPLE`. Otherwise `n` itself.

    Returns:
        The padded count; 0 stays 0.
    """
    if n < 0:
        raise ValueError(f"padded_rows: n={n} is negative")
    return -(-n // ROW_MULTIPLE) * ROW_MULTIPLE if strict else n
