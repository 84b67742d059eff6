"""Row count at which torch's elementwise kernels treat every row alike.

Torch computes silu, gelu, exp and the like with vector instructions, and the last few elements of each run with scalar
ones that give other bits. A run is the whole tensor, or, above some number of elements, one thread's part of it,
which may begin in the middle of a row. So a row's bits could depend on how many rows there are. They do not if

* every thread's part is a whole number of rows, and
* it is a whole number of vector steps long (at most 64 elements, two 512-bit vectors of bf16).

The number of threads that torch uses is fixed here from both sides: on one thread there is one part; on more, the
tensor is made large enough that every elementwise kernel uses all threads (their grain sizes are at most 32,768
elements), and its rows a multiple of the thread count. `tests/unit/test_moe_experts.py` checks what this rests on.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

#: Largest grain size of torch's elementwise CPU kernels (at::internal::GRAIN_SIZE), in elements.
_GRAIN = 32_768
#: Longest vector step: two 512-bit registers of 2-byte elements.
_STEP = 64


def rows_for_activation(num_rows: int, intermediate_size: int) -> int:
    """Least number of rows, `num_rows` or more, at which no row is treated unlike another; 0 stays 0.

    Args:
        num_rows: rows of all padded groups: at least two if any. (Half the columns of one row are a contiguous tensor,
            of more rows a strided one, and gelu takes another path for each.)
        intermediate_size: columns of the smallest tensor that the activation computes on.
    """
    if num_rows == 0:
        return 0
    threads = torch.get_num_threads()
    # (rows / threads) x columns is a multiple of the vector step:
    multiple = threads * (_STEP // math.gcd(_STEP, intermediate_size))
    if threads > 1:
        num_rows = max(num_rows, -(-threads * _GRAIN // intermediate_size))
    return -(-num_rows // multiple) * multiple


def apply_activation(
    activation: Callable[[torch.Tensor], torch.Tensor], h_PI: torch.Tensor, *, strict: bool
) -> torch.Tensor:
    """The family's own gate function on all rows at once.

    Raises:
        AssertionError: `strict`, and the rows are not a count that `rows_for_activation` gives.
    """
    a_PI = activation(h_PI)
    assert not strict or a_PI.shape[0] == rows_for_activation(a_PI.shape[0], a_PI.shape[1]), tuple(a_PI.shape)
    return a_PI
