"""Every op of the table at 1 to 70 rows on 1 to 4 threads, in several layouts, against the same rows elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from epruntime.ops import batch_invariant, row_independent
from tests.kernels import batch_invariant_cases as cases
from tests.kernels.batch_invariant_cases import Case
from tests.kernels.rows_on_threads import num_parts

DTYPES = [pytest.param(torch.float32, id="fp32"), pytest.param(torch.bfloat16, id="bf16")]
TOTAL, MOST = 150, 70


@pytest.fixture
def installed(threads: None) -> Iterator[None]:
    batch_invariant.install()
    yield
    batch_invariant.uninstall()


def _data(case: Case, width: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(width)
    if case.complex:
        return torch.randn(TOTAL, width, dtype=torch.complex64, generator=generator)
    x = torch.randn(TOTAL, width, generator=generator)
    return (x.abs() + 0.1 if case.positive else x).to(dtype)


def _own(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


def _within(x: torch.Tensor) -> torch.Tensor:
    return x  # rows that begin in the middle of a tensor, wherever that is in memory


def _half(x: torch.Tensor) -> torch.Tensor:
    return torch.cat((x, x), -1).chunk(2, dim=-1)[1]


def _transposed(x: torch.Tensor) -> torch.Tensor:
    return x.t().contiguous().t()


LAYOUTS = (_own, _within, _half, _transposed)


def _several(found: Any) -> tuple[torch.Tensor, ...]:
    return (found,) if isinstance(found, torch.Tensor) else tuple(found)


#: (threads, width, rows, in every layout). Torch uses another thread from 2,048 elements on in some ops, from 32,768 in
#: most: of 130 every row count, and of WIDE a few, whose parts are no whole vector steps by themselves.
ALL_ROWS = range(1, MOST + 1)
SOME_ROWS = (1, 2, 16, 17, 31, 32, 33, 45, 64, 70)
WIDE, WIDE_ROWS = 6607, (1, 5, 6, 10, 11, 15, 16)
ON_ONE_THREAD = [(1, width, ALL_ROWS, True) for width in (1, 7, 33, 64, 130)] + [(1, 1030, SOME_ROWS, True)]
ON_THREADS = [
    entry
    for num_threads in (2, 3, 4)
    for entry in (
        (num_threads, 33, SOME_ROWS, False),
        (num_threads, 130, ALL_ROWS, False),
        (num_threads, WIDE, WIDE_ROWS, False),
    )
]
EVERYTHING = ON_ONE_THREAD + ON_THREADS
LIGHTER = [entry for entry in ON_ONE_THREAD if entry[1] != 130] + ON_THREADS
NARROW = [(n, w, rows, every) for n, w, rows, every in EVERYTHING if w < 1030 and not (every and w == 130)]


def test_all_threads_get_elements() -> None:
    """Of both grains, on every number of threads; of the smaller one at many counts of rows."""
    for num_threads in (2, 3, 4):
        for grain in row_independent.GRAINS:
            busy = {
                count
                for n, width, counts, _ in LIGHTER
                for count in counts
                if n == num_threads and num_parts(count * width, grain, n) == n
            }
            assert len(busy & set(ALL_ROWS)) >= (23 if grain == row_independent.GRAINS[0] else 2), (num_threads, grain)


def check(case: Case, dtype: torch.dtype, schedule: list[tuple[int, int, Sequence[int], bool]]) -> None:
    wholes: dict[int, tuple[torch.Tensor, tuple[torch.Tensor, ...]]] = {}
    for num_threads, width, counts, every_layout in schedule:
        if width not in wholes:
            torch.set_num_threads(1)
            x = _data(case, width, dtype)[: 2 * max(counts) + 10]
            wholes[width] = (x, _several(case.run(x)))
        x, whole = wholes[width]
        few = any(len(out) < len(x) for out in whole)  # a case that looks at some rows only, row by row
        torch.set_num_threads(num_threads)
        for count in counts:
            first = 0 if few else count * 37 % (len(x) - count)
            for layout in LAYOUTS if every_layout else (LAYOUTS[(count + num_threads) % 4],):
                found = _several(case.run(layout(x[first : first + count])))
                for out, expected in zip(found, whole, strict=True):
                    assert torch.equal(out, expected[first : first + len(out)]), (
                        f"{case.name}: {count} rows of {width} from {first}, {layout.__name__}, {num_threads} threads"
                    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", [*cases.REPLACED, *cases.ROW_LOCAL], ids=lambda case: case.name)
def test_rows_1_to_70_on_threads_1_to_4(case: Case, dtype: torch.dtype, installed: None) -> None:
    check(case, dtype, EVERYTHING)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", [*cases.IN_PLACE, *cases.EXACT], ids=lambda case: case.name)
def test_lighter_ones(case: Case, dtype: torch.dtype, installed: None) -> None:
    check(case, dtype, LIGHTER)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", cases.PRODUCTS, ids=lambda case: case.name)
def test_products(case: Case, dtype: torch.dtype, installed: None) -> None:
    check(case, dtype, NARROW)


@pytest.mark.parametrize("case", cases.COMPLEX, ids=lambda case: case.name)
def test_complex_products(case: Case, threads: None) -> None:
    batch_invariant.install(complex_products=True)
    try:
        check(case, torch.float32, EVERYTHING)
    finally:
        batch_invariant.uninstall()


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_longer_than_a_thread_s_share(dtype: torch.dtype, installed: None) -> None:
    """Torch shares out one such row among threads, and its sum with it."""
    width = 3 * row_independent.GRAINS[1] + 7
    x = torch.randn(5, width, generator=torch.Generator().manual_seed(0)).to(dtype)
    for name in ("sum.dim_IntList", "mean.dim", "linalg_vector_norm", "_softmax", "_log_softmax", "argmax", "cumsum"):
        (case,) = [c for c in (*cases.REPLACED, *cases.ROW_LOCAL) if c.name == name]
        torch.set_num_threads(1)
        whole = case.run(x)
        for num_threads in (1, 2, 3, 4):
            torch.set_num_threads(num_threads)
            for rows in (slice(0, 1), slice(3, 4), slice(1, 3), slice(0, 5)):
                assert torch.equal(case.run(x[rows]), whole[rows]), f"{name}, rows {rows} on {num_threads} threads"


def test_every_op_has_a_case() -> None:
    def ops(*lists: list[Case]) -> set[str]:
        return {case.op for group in lists for case in group}

    assert ops(cases.REPLACED, cases.IN_PLACE, cases.PRODUCTS) == set(batch_invariant.REPLACED)
    assert ops(cases.COMPLEX) == set(batch_invariant.COMPLEX)
    assert ops(cases.ROW_LOCAL) == batch_invariant.ROW_LOCAL
    assert ops(cases.EXACT) == batch_invariant.EXACT


EVERY = [*cases.REPLACED, *cases.IN_PLACE, *cases.PRODUCTS, *cases.ROW_LOCAL, *cases.EXACT]


def test_cases_reach_their_op() -> None:
    """The name in the table is what the CPU is asked for."""
    from epruntime.ops.census import Census

    for case in [*EVERY, *cases.COMPLEX]:
        with Census() as census, torch.inference_mode():
            case.run(_data(case, 7, torch.float32)[:3])
        assert case.op in census.ops, f"{case.name}: {sorted(census.ops)}"


@pytest.mark.parametrize(
    "case", [c for c in EVERY if c.op not in ("empty.memory_format", "empty_like")], ids=lambda case: case.name
)
def test_values_are_torch_s(case: Case) -> None:
    """In fp32 against torch's own in fp64."""
    x = _data(case, 33, torch.float32)[:9]
    expected = _several(case.run(x))
    exact = _several(case.run(x.double())) if case.op in batch_invariant.REPLACED else expected
    batch_invariant.install()
    try:
        found = _several(case.run(x))
    finally:
        batch_invariant.uninstall()
    for out, own, wide in zip(found, expected, exact, strict=True):
        assert (out.shape, out.dtype) == (own.shape, own.dtype)
        assert torch.allclose(out.double(), wide.double(), rtol=2e-5, atol=1e-5)


def test_install_and_uninstall() -> None:
    x = torch.randn(3, 33, generator=torch.Generator().manual_seed(0)).double()
    own = torch.exp(x)
    calls: list[str] = []
    assert not batch_invariant.installed()
    batch_invariant.uninstall()
    before = dict(batch_invariant.REPLACED)
    try:
        batch_invariant.REPLACED["exp"] = lambda x: calls.append("exp") or before["exp"](x)
        batch_invariant.install()
        batch_invariant.install()
        assert batch_invariant.installed()
        assert torch.equal(torch.exp(x), own)
        assert calls == ["exp"]
        batch_invariant.uninstall()
        assert not batch_invariant.installed()
        assert torch.equal(torch.exp(x), own)
        assert calls == ["exp"]
    finally:
        batch_invariant.REPLACED.update(before)
        batch_invariant.uninstall()


@pytest.mark.parametrize("num_threads", [1, 2, 3, 4, 7, 16])
def test_every_thread_s_part_is_whole_vector_steps(num_threads: int) -> None:
    for n in (0, 1, 63, 64, 65, 2048, 2049, 6000, 32_768, 32_769, 70_000, 1_000_001):
        padded = row_independent.padded_elements(n, num_threads)
        assert n <= padded <= n + 64 * 16 * 16
        for grain in row_independent.GRAINS:
            parts = max(1, min(num_threads, -(-padded // grain)))
            assert padded % (parts * row_independent.STEP) == 0, (n, grain)


#: Ops whose cases make ids of values, which NaN has none of.
IDS_FROM_VALUES = {"_to_copy", "embedding", "gather", "bincount", "index.Tensor", "nonzero"} | {
    f"scatter{suffix}" for suffix in (".value", "_.value", ".src", "_.src")
}


def test_nan_stays_in_its_row(installed: None) -> None:
    """NaN and infinity of one row change no other row."""
    others = torch.tensor([0, 1, 3, 5])
    for case in (c for c in EVERY if c.op not in IDS_FROM_VALUES):
        x = _data(case, 33, torch.float32)[:6]
        bad = x.clone()
        bad[2], bad[4] = float("nan"), float("inf")
        for out, expected in zip(_several(case.run(bad)), _several(case.run(x)), strict=True):
            assert torch.equal(out[others], expected[others]), case.name


def test_what_torch_itself_does_is_caught() -> None:
    """Negative control: without `install` the same check fails."""
    (case,) = [c for c in cases.REPLACED if c.name == "silu"]
    with pytest.raises(AssertionError, match=r"silu: .* rows of 33"):
        check(case, torch.float32, [(1, 33, range(1, 20), True)])


@pytest.mark.parametrize("num_threads", [2, 3, 4])
def test_what_torch_does_on_one_more_thread_is_caught(num_threads: int, threads: None) -> None:
    """Negative control: it cuts rows of WIDE in so many parts, whose last elements are computed in scalar form."""
    x = torch.randn(18, WIDE, generator=torch.Generator().manual_seed(0))
    found = []
    for n in (num_threads - 1, num_threads):
        torch.set_num_threads(n)
        found.append([F.mish(x[:count]) for count in (15, 16, 17, 18)])
    assert not all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("name", ["sum", "mean", "vector_norm"])
def test_reductions_of_nothing_and_of_one_number(name: str, installed: None) -> None:
    """A rank may have no row; values from arithmetic on paper."""
    op = torch.linalg.vector_norm if name == "vector_norm" else getattr(torch, name)
    assert op(torch.empty(0, 5, 8), dim=1).shape == (0, 8)
    assert op(torch.empty(0, 5), dim=-1, keepdim=True).shape == (0, 1)
    assert op(torch.empty(0, 5, 8), dim=(0, 1)).shape == (8,)
    assert op(torch.tensor(2.0), dim=-1).item() == 2.0
    if name == "sum":
        assert torch.equal(op(torch.empty(0, 5), dim=0), torch.zeros(5))


def test_other_dtypes_and_devices() -> None:
    x = torch.arange(-6, 6).view(3, 4)
    cpu = [lambda y: torch.exp(y), lambda y: y.double() @ y.double().t(), lambda y: y @ y.t(), lambda y: y.sum(-1)]
    expected = [run(x) for run in cpu]
    batch_invariant.install()
    try:
        for run, own in zip(cpu, expected, strict=True):
            assert torch.equal(run(x), own)
        half = x.half() / 7
        assert torch.allclose(F.linear(half, half).float(), half.float() @ half.float().t(), atol=1e-3)
        meta = torch.empty(3, 4, device="meta")
        assert F.silu(F.linear(meta, meta)).shape == (3, 3)
    finally:
        batch_invariant.uninstall()
