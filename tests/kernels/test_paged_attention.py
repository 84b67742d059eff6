"""Paged attention against the textbook formula in fp64."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.paged import PagedCase

SHAPES = {
    "mha": {"H": 3, "K": 3, "D": 16, "V": 16},
    "gqa": {"H": 8, "K": 2, "D": 64, "V": 64},
    "mqa": {"H": 5, "K": 1, "D": 32, "V": 32},
    "odd sizes": {"H": 6, "K": 2, "D": 20, "V": 13},
    "one element": {"H": 2, "K": 1, "D": 1, "V": 1},
    "values wider": {"H": 4, "K": 4, "D": 24, "V": 72},
    "latent": {"H": 4, "K": 1, "D": 72, "V": 64, "latent": True},
    "latent, odd": {"H": 3, "K": 1, "D": 21, "V": 17, "latent": True},
    "large heads": {"H": 2, "K": 1, "D": 256, "V": 256},
}
OPTIONS = {
    "plain": {},
    "window 1": {"window": 1},
    "window 37": {"window": 37},
    "chunk 50": {"chunk": 50},
    "window and chunk": {"window": 37, "chunk": 50},
    "softcap": {"softcap": 0.5},
}


def check(case: PagedCase, spans: list[tuple[int, int, int]], padding: int = 0) -> None:
    """fp32: a few roundings of numbers around 1. bf16: the one rounding of the result (2^-9), and the same."""
    relative = 2**-8 if case.dtype == torch.bfloat16 else 1e-6
    for (s, begin, end), out in zip(spans, case.run(spans, padding), strict=True):
        torch.testing.assert_close(out.double(), case.expected(s)[begin:end], rtol=relative, atol=3e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("shape", SHAPES)
def test_shapes(implementation: str, shape: str, dtype: torch.dtype) -> None:
    case = PagedCase(lengths=[1, 300, 129, 17], dtype=dtype, **SHAPES[shape])
    check(case, [(0, 0, 1), (1, 290, 300), (2, 0, 129), (3, 16, 17)], padding=3)


@pytest.mark.parametrize("options", OPTIONS)
def test_options(implementation: str, options: str) -> None:
    case = PagedCase(lengths=[300, 70], options=OPTIONS[options])
    check(case, [(0, 0, 300), (1, 60, 70)])


@pytest.mark.parametrize("window", [0, 40])
def test_sinks(implementation: str, window: int) -> None:
    # One sink far above all scores (its head's output nearly vanishes), one far below (it changes nothing).
    sinks = torch.tensor([30.0, -30.0, 0.5, 2.0])
    case = PagedCase(lengths=[200, 5], options={"window": window, "sinks_H": sinks})
    check(case, [(0, 0, 200), (1, 4, 5)])
    assert case.run([(0, 199, 200)])[0][0, 0].abs().max() < 1e-6


@pytest.mark.parametrize("block_size", [1, 3, 16, 128, 256])
def test_block_sizes(implementation: str, block_size: int) -> None:
    check(PagedCase(lengths=[260, 2], block_size=block_size), [(0, 100, 260), (1, 0, 2)])


def test_no_sequences(implementation: str) -> None:
    case = PagedCase(lengths=[4])
    assert case.run([], padding=2) == []


def test_sequence_without_queries(implementation: str) -> None:
    check(PagedCase(lengths=[4, 9]), [(0, 4, 4), (1, 3, 9)])


def test_large_scores_do_not_overflow(implementation: str) -> None:
    case = PagedCase(lengths=[150], D=16)
    case.q[0] *= 300.0
    # Scores reach 1,000, where fp32 steps are 6e-5: so much may a weight be off, in relation.
    torch.testing.assert_close(case.run([(0, 0, 150)])[0].double(), case.expected(0), rtol=2e-4, atol=2e-4)


def test_blocks_before_the_window_may_be_gone(implementation: str) -> None:
    case = PagedCase(lengths=[200], options={"window": 20})
    expected = case.run([(0, 199, 200)])[0]
    case.tables[0, : 180 // 16] = -1
    assert torch.equal(case.run([(0, 199, 200)])[0], expected)


def test_strided_queries(implementation: str) -> None:
    """The usual caller holds q as a transposed view [1, H, T, D]."""
    case = PagedCase(lengths=[40])
    expected = case.run([(0, 0, 40)])[0]
    case.q[0] = case.q[0].transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.equal(case.run([(0, 0, 40)])[0], expected)
