"""Faults in what keeps a row's bits its own on any number of threads; not in the compiled kernels."""

from __future__ import annotations

from faults import Fault

_ROWS = "epruntime/ops/row_independent.py"
_TEST = "tests/kernels/test_batch_invariant.py::test_rows_1_to_70_on_threads_1_to_4"

KERNELS = (
    Fault(
        id="padded-for-three-threads",
        words="a fourth thread's part need not be whole vector steps",
        file=_ROWS,
        old="        parts = (min(threads, max(1,",
        new="        parts = (min(threads, 3, max(1,",
        test=_TEST + "[mish-fp32]",
    ),
    Fault(
        id="one-grain-forgotten",
        words="padding counts the threads of ops that are shared out finely, and not of the others",
        file=_ROWS,
        old="for grain in GRAINS)",
        new="for grain in GRAINS[:1])",
        test=_TEST + "[mish-fp32]",
    ),
)
