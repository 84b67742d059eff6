"""Paged attention with each of its features at 1 to 70 rows on 1 to 4 threads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch

from tests.kernels.paged import PagedCase
from tests.kernels.rows_on_threads import COUNTS, THREADS, counts_of
from tests.kernels.test_paged_attention import OPTIONS, SHAPES

#: Work below which one thread computes all, and rows of a unit of work: csrc/bindings.cpp, csrc/common/types.h.
SMALL, UNIT_ROWS = 200_000, 32
LENGTHS = [200, 70, 90, 20]
Span = tuple[int, int, int]


def with_more_heads(shape: dict[str, Any]) -> dict[str, Any]:
    """So many that one row's work is shared out among threads, if that takes no more than 64 times as many."""
    factor = min(64, -(-1024 // (shape["H"] * (shape["D"] + shape["V"]))))
    return {**shape, "H": factor * shape["H"], "K": factor * shape["K"] if shape["K"] > 1 else 1}


USUAL = {"H": 8, "K": 4, "D": 64, "V": 64}
SINKS = torch.tensor([30.0, -30.0, 0.5, 2.0, 0.0, 1.0, -1.0, 3.0])
FEATURES: dict[str, dict[str, Any]] = {
    **{name: with_more_heads(shape) for name, shape in SHAPES.items()},
    **{name: {**USUAL, "options": options} for name, options in OPTIONS.items()},
    "wide window": {**USUAL, "options": {"window": 140}},
    "wide chunk": {**USUAL, "options": {"chunk": 100}},
    "sinks": {**USUAL, "options": {"sinks_H": SINKS}},
    "sinks and window": {**USUAL, "options": {"sinks_H": SINKS, "window": 40}},
    "all of them": {**USUAL, "options": {"sinks_H": SINKS, "window": 90, "chunk": 120, "softcap": 3.0}},
    "blocks of 3": {**USUAL, "block_size": 3},
}


def spans(case: PagedCase, count: int) -> list[Span]:
    """So many rows of one sequence to four, of the first most; that one so long that threads are used."""
    mates = min(count % 4, count - 1)
    each = max(1, count // 8)
    first = count - mates * each
    least = -(-SMALL // (first * case.H * (case.D + case.V)))
    end = min(LENGTHS[0], max(first, least) + count * 29 % 40)
    found = [(0, end - first, end)]
    for s in range(1, 1 + mates):
        begin = count * 17 * s % (LENGTHS[s] - each)
        found.append((s, begin, begin + each))
    return found[count % len(found) :] + found[: count % len(found)]


def at_work(case: PagedCase, found: list[Span], num_threads: int) -> int:
    """Threads that compute."""
    rows = [(end - begin) * case.H for _, begin, end in found]
    work = sum(n * end for n, (_, _, end) in zip(rows, found, strict=True)) * (case.D + case.V)
    units = sum(case.K * -(-n // (case.K * UNIT_ROWS)) for n in rows)
    return 1 if work < SMALL else min(num_threads, units)


def check_rows(case: PagedCase, counts: Mapping[int, Sequence[int]]) -> None:
    asked = {count: spans(case, count) for some in counts.values() for count in some}
    torch.set_num_threads(1)
    alone = [torch.zeros(length, case.H, case.V, dtype=case.dtype) for length in LENGTHS]
    for s, length in enumerate(LENGTHS):
        used = [
            any(s == n and begin <= at < end for found in asked.values() for n, begin, end in found)
            for at in range(length)
        ]
        for at in range(length):
            if used[at]:
                alone[s][at] = case.run([(s, at, at + 1)])[0][0]
        torch.testing.assert_close(
            alone[s][used].double(),
            case.expected(s)[used],
            rtol=2**-8 if case.dtype == torch.bfloat16 else 1e-6,
            atol=3e-6,
        )
    for num_threads, some in counts.items():
        torch.set_num_threads(num_threads)
        for count in some:
            for out, (s, begin, end) in zip(case.run(asked[count]), asked[count], strict=True):
                assert torch.equal(out, alone[s][begin:end]), (
                    f"{count} rows on {num_threads} threads: sequence {s}, {begin} to {end}"
                )


DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


@DTYPES
@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("implementation", ["avx512_bf16", "avx512", "avx2", "portable"], indirect=True)
def test_rows_1_to_70_on_threads_1_to_4(implementation: str, feature: str, dtype: torch.dtype, threads: None) -> None:
    check_rows(PagedCase(lengths=LENGTHS, dtype=dtype, **FEATURES[feature]), counts_of(implementation))


@DTYPES
@pytest.mark.parametrize("shape", ["gqa", "latent"])
@pytest.mark.parametrize("implementation", ["reference"], indirect=True)
def test_reference(implementation: str, shape: str, dtype: torch.dtype, threads: None) -> None:
    """Slow, and shared out among threads by torch alone."""
    sizes = {"gqa": {"H": 4, "K": 2, "D": 24, "V": 24}, "latent": {"H": 4, "K": 1, "D": 20, "V": 16, "latent": True}}
    options = {"sinks_H": SINKS[:4], "window": 90, "chunk": 120, "softcap": 3.0} if shape == "gqa" else {}
    case = PagedCase(lengths=LENGTHS, dtype=dtype, options=options, **sizes[shape])
    check_rows(case, counts_of(implementation))


@pytest.mark.parametrize("feature", FEATURES)
def test_all_threads_are_at_work(feature: str) -> None:
    """At most counts of rows: few rows of one KV head are no work for four."""
    case = PagedCase(lengths=LENGTHS, **FEATURES[feature])
    for num_threads in THREADS:
        busy = [at_work(case, spans(case, count), num_threads) for count in COUNTS]
        assert sum(n == num_threads for n in busy) >= 40, (num_threads, busy)
