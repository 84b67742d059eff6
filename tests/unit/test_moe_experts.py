"""Experts backends: right against fp64, and a row's bits depend on the row alone."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch

from epruntime.errors import ConfigError
from epruntime.moe.experts import BACKENDS, select_backend
from epruntime.moe.experts.activation import rows_for_activation
from epruntime.moe.experts.base import group_rows
from epruntime.moe.types import ExpertRows, ExpertWeights
from epruntime.testing.experts import ACTIVATIONS, dense_row, random_experts, silu_gate


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


LAYOUTS = {
    "plain": {},
    "transposed": {"transposed": True},
    "biased": {"bias": True, "transposed": True, "activation": "interleaved"},
    "no_gate": {"activation": "relu2"},
    "post": {"post": True},
}


@pytest.mark.parametrize("backend", list(BACKENDS))
@pytest.mark.parametrize("layout", list(LAYOUTS))
@pytest.mark.parametrize("strict", [True, False])
def test_experts_equal_fp64(backend: str, layout: str, strict: bool) -> None:
    weights = random_experts(5, 24, 40, **LAYOUTS[layout])
    x = torch.randn(50, 24, generator=torch.Generator().manual_seed(1))
    slots = torch.randint(-1, 4, (50, 3), generator=torch.Generator().manual_seed(2), dtype=torch.int32)  # slot 4 idle
    slots[0], slots[1] = -1, 2  # a row with nothing to do, a row with one slot three times
    got = select_backend(backend, weights).forward(ExpertRows(x_NH=x, slots_NK=slots), weights, strict=strict)
    want = torch.stack([dense_row(x[n], weights, int(s)) for n in range(50) for s in slots[n] if s >= 0])
    assert got.shape == want.shape
    assert got.dtype == torch.float32
    assert (got.double() - want).abs().max() < 3e-6 * want.abs().max()


@pytest.mark.parametrize("backend", list(BACKENDS))
def test_no_rows_and_no_experts(backend: str) -> None:
    for num_slots, num_rows in ((3, 0), (0, 0), (3, 4)):
        weights = random_experts(num_slots, 8, 16)
        rows = ExpertRows(x_NH=torch.randn(num_rows, 8), slots_NK=torch.full((num_rows, 2), -1, dtype=torch.int32))
        assert select_backend(backend, weights).forward(rows, weights, strict=True).shape == (0, 8)


def test_groups_are_padded_with_zeros() -> None:
    weights = random_experts(3, 8, 64)
    x = torch.randn(40, 8)
    slots = torch.tensor([[2, 0]] * 33 + [[2, -1]] * 7, dtype=torch.int32)
    groups = group_rows(ExpertRows(x_NH=x, slots_NK=slots), weights, strict=True)
    assert groups.ends_S.tolist() == [64, 64, 128]  # 33 -> 64, 0 -> 0, 40 -> 64
    assert torch.equal(groups.x_PH[groups.place_M], x[[n for n in range(40) for s in slots[n] if s >= 0]])
    padding = torch.ones(groups.x_PH.shape[0], dtype=torch.bool)
    padding[groups.place_M] = False
    assert int(padding.sum()) == groups.x_PH.shape[0] - 73
    assert not groups.x_PH[padding].any()


@pytest.mark.parametrize("backend", list(BACKENDS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("activation", "hidden", "inner", "options"),
    [
        ("silu", 64, 32, {}),
        ("silu", 576, 1536, {}),
        ("silu", 1024, 512, {}),
        ("interleaved", 64, 96, {"transposed": True, "bias": True}),
        ("gelu", 96, 72, {}),
        ("gelu_tanh", 64, 40, {"transposed": True}),
        ("relu2", 64, 56, {}),
        ("tanh_exp", 64, 24, {"post": True}),
        ("gelu_no_gate", 32, 40, {}),
    ],
)
def test_a_rows_bits_depend_on_the_row_alone(
    threads: int, backend: str, dtype: torch.dtype, activation: str, hidden: int, inner: int, options: dict[str, bool]
) -> None:
    weights = random_experts(2, hidden, inner, activation=activation, dtype=dtype, **options)
    experts = select_backend(backend, weights)
    x = torch.randn(301, hidden, generator=torch.Generator().manual_seed(3)).to(dtype)

    def run(rows: torch.Tensor) -> torch.Tensor:
        slots = torch.tensor([[0, 1]], dtype=torch.int32).expand(len(rows), 2)
        return experts.forward(ExpertRows(x_NH=rows, slots_NK=slots), weights, strict=True).view(len(rows), 2, hidden)

    want = run(x)
    counts = (*range(1, 71), 129, 300) if hidden * inner < 10_000 else (1, 2, 3, 31, 32, 33, 70, 300)
    for count in counts:
        assert torch.equal(run(x[:count]), want[:count]), count
        assert torch.equal(run(x[-count:]), want[-count:]), count  # the same row at another place
    torch.set_num_threads(3 - threads)  # on one thread as on two
    assert torch.equal(run(x[:33]), want[:33])


@pytest.mark.parametrize("num_threads", [1, 2, 3, 4])
def test_the_activations_row_count_is_what_it_rests_on(num_threads: int) -> None:
    """At other row counts some activation gives equal rows unequal bits; at `rows_for_activation`'s none does."""
    cases = []
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        for function, fan in ACTIVATIONS.values():
            for dtype in (torch.float32, torch.bfloat16):
                for inner in (15, 20, 1536):
                    row = torch.randn(1, fan * inner, generator=torch.Generator().manual_seed(inner)).to(dtype)
                    cases.append((function, inner, row, function(row.repeat(64, 1))[0]))
        torch.set_num_threads(num_threads)
        differ = 0
        for function, inner, row, want in cases:
            for least in (32, 33 * 32):
                count = rows_for_activation(least, inner)
                assert count >= least
                assert count % num_threads == 0
                assert (count // num_threads * inner) % 64 == 0
                out = function(row.repeat(count, 1))
                assert torch.equal(out, want.expand_as(out)), (function, row.dtype, inner, count)
            for count in (1, 7, 33, 1101):
                out = function(row.repeat(count, 1))
                differ += not torch.equal(out, want.expand_as(out))
        assert differ, "every row count is alike: the padding guards against nothing"
    finally:
        torch.set_num_threads(before)


def test_rows_for_activation_on_paper() -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert [rows_for_activation(n, 512) for n in (0, 32, 96)] == [0, 32, 96]
        assert rows_for_activation(32, 15) == 64  # 64 x 15 elements are whole steps of 64
        torch.set_num_threads(2)
        assert rows_for_activation(32, 512) == 128  # 2 threads x 32768 elements / 512
        assert rows_for_activation(160, 512) == 160
    finally:
        torch.set_num_threads(before)


def test_a_non_finite_row_stays_alone() -> None:
    weights = random_experts(2, 16, 16)
    x = torch.randn(9, 16)
    rows = ExpertRows(x_NH=x, slots_NK=torch.tensor([[0, 1]] * 9, dtype=torch.int32))
    experts = select_backend("auto", weights)
    want = experts.forward(rows, weights, strict=True).clone()
    x[4], x[5] = math.nan, math.inf
    got = experts.forward(rows, weights, strict=True)
    others = [m for m in range(18) if m // 2 not in (4, 5)]
    assert torch.equal(got[others], want[others])
    assert not got[8:12].isfinite().any()


def test_selection() -> None:
    assert select_backend("auto", random_experts(2, 16, 16)).name == "grouped_mm"
    odd = random_experts(2, 6, 16)  # 24-byte rows
    assert select_backend("auto", odd).name == "reference"
    with pytest.raises(ConfigError, match="grouped_mm: hidden size 6 x 4 bytes is not a multiple of 16"):
        select_backend("grouped_mm", odd)
    with pytest.raises(ConfigError, match="must be auto or one of grouped_mm, reference"):
        select_backend("fast", odd)
    strided = ExpertWeights(
        up_SIH=torch.randn(2, 16, 32).transpose(1, 2),
        down_SHI=torch.randn(2, 16, 16),
        up_bias_SI=None,
        down_bias_SH=None,
        transposed=False,
        activation=silu_gate,
    )
    with pytest.raises(ConfigError, match="up weights are strided"):
        select_backend("grouped_mm", strided)
