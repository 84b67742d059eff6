"""Experts backends: right against fp64, and, but for grouped_mm, a row's bits depend on the row alone."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch

from epruntime.errors import ConfigError
from epruntime.moe.experts import BACKENDS, select_backend
from epruntime.moe.experts import native as native_module
from epruntime.moe.experts.base import ExpertsBackend, group_rows
from epruntime.moe.types import ExpertRows, ExpertWeights
from epruntime.ops import batch_invariant, extension
from epruntime.testing.experts import dense_row, random_experts, silu_gate

STRICT = [name for name in BACKENDS if name != "grouped_mm"]


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture
def invariant() -> Iterator[None]:
    """Torch as a rank under invariance=strict has it."""
    batch_invariant.install()
    yield
    batch_invariant.uninstall()


def make(backend: str, weights: ExpertWeights) -> ExpertsBackend:
    if backend == "native" and extension.load() is None:
        pytest.skip(extension.why_absent())
    return select_backend(backend, weights, strict=backend in STRICT)


LAYOUTS = {
    "plain": {},
    "transposed": {"transposed": True},
    "biased": {"bias": True, "transposed": True, "activation": "interleaved"},
    "no_gate": {"activation": "relu2"},
    "post": {"post": True},
}


@pytest.mark.parametrize("backend", list(BACKENDS))
@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_experts_equal_fp64(backend: str, layout: str) -> None:
    weights = random_experts(5, 24, 40, **LAYOUTS[layout])
    x = torch.randn(50, 24, generator=torch.Generator().manual_seed(1))
    slots = torch.randint(-1, 4, (50, 3), generator=torch.Generator().manual_seed(2), dtype=torch.int32)  # slot 4 idle
    slots[0], slots[1] = -1, 2  # a row with nothing to do, a row with one slot three times
    got = make(backend, weights).forward(ExpertRows(x_NH=x, slots_NK=slots), weights)
    want = torch.stack([dense_row(x[n], weights, int(s)) for n in range(50) for s in slots[n] if s >= 0])
    assert got.shape == want.shape
    assert got.dtype == torch.float32
    assert (got.double() - want).abs().max() < 3e-6 * want.abs().max()


@pytest.mark.parametrize("backend", list(BACKENDS))
def test_no_rows_and_no_experts(backend: str) -> None:
    for num_slots, num_rows in ((3, 0), (0, 0), (3, 4)):
        weights = random_experts(num_slots, 8, 16)
        rows = ExpertRows(x_NH=torch.randn(num_rows, 8), slots_NK=torch.full((num_rows, 2), -1, dtype=torch.int32))
        assert make(backend, weights).forward(rows, weights).shape == (0, 8)


def test_groups_hold_the_rows_of_their_slots_and_no_others() -> None:
    x = torch.randn(6, 8)
    slots = torch.tensor([[2, 0], [-1, -1], [2, 2], [-1, 3], [0, -1], [2, 0]], dtype=torch.int32)
    groups = group_rows(ExpertRows(x_NH=x, slots_NK=slots), 5)
    assert groups.ends_S.tolist() == [3, 3, 7, 8, 8]
    assert groups.slot_M.tolist() == [0, 0, 0, 2, 2, 2, 2, 3]
    assert torch.equal(groups.x_MH, x[[0, 4, 5, 0, 2, 2, 5, 3]])
    assert groups.place_M.tolist() == [3, 0, 4, 5, 7, 1, 6, 2]  # (row, k) by (row, k): 2 0 | 2 2 | 3 | 0 | 2 0


@pytest.mark.parametrize("backend", STRICT)
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
        ("relu2", 63, 55, {}),
        ("tanh_exp", 64, 24, {"post": True}),
        ("gelu_no_gate", 31, 41, {}),
    ],
)
def test_a_rows_bits_depend_on_the_row_alone(
    threads: int,
    invariant: None,
    backend: str,
    dtype: torch.dtype,
    activation: str,
    hidden: int,
    inner: int,
    options: dict[str, bool],
) -> None:
    weights = random_experts(2, hidden, inner, activation=activation, dtype=dtype, **options)
    experts = make(backend, weights)
    x = torch.randn(301, hidden, generator=torch.Generator().manual_seed(3)).to(dtype)

    def run(rows: torch.Tensor) -> torch.Tensor:
        slots = torch.tensor([[0, 1]], dtype=torch.int32).expand(len(rows), 2)
        return experts.forward(ExpertRows(x_NH=rows, slots_NK=slots), weights).view(len(rows), 2, hidden)

    want = run(x)
    counts = (*range(1, 71), 129, 300) if hidden * inner < 10_000 else (1, 2, 3, 31, 32, 33, 70, 300)
    for count in counts:
        part = slice(count) if count % 2 else slice(-count, None)  # the same row at another place
        assert torch.equal(run(x[part]), want[part]), count
    torch.set_num_threads(3 - threads)  # on one thread as on two
    assert torch.equal(run(x[:33]), want[:33])


def test_native_and_reference_give_equal_bits(invariant: None) -> None:
    """One multiplies group by group in one call, the other in a loop."""
    weights = random_experts(4, 40, 56)
    slots = torch.randint(-1, 4, (23, 3), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    rows = ExpertRows(x_NH=torch.randn(23, 40), slots_NK=slots)
    assert torch.equal(
        make("native", weights).forward(rows, weights), make("reference", weights).forward(rows, weights)
    )


@pytest.mark.parametrize("backend", STRICT)
def test_a_non_finite_row_stays_alone(backend: str, invariant: None) -> None:
    weights = random_experts(2, 16, 16)
    x = torch.randn(9, 16)
    rows = ExpertRows(x_NH=x, slots_NK=torch.tensor([[0, 1]] * 9, dtype=torch.int32))
    experts = make(backend, weights)
    want = experts.forward(rows, weights).clone()
    x[4], x[5] = math.nan, math.inf
    got = experts.forward(rows, weights)
    others = [m for m in range(18) if m // 2 not in (4, 5)]
    assert torch.equal(got[others], want[others])
    assert not got[8:12].isfinite().any()


def test_selection(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = random_experts(2, 16, 16)
    if extension.load() is not None:
        assert select_backend("auto", weights, strict=True).name == "native"
        assert select_backend("auto", weights, strict=False).name == "native"
    monkeypatch.setattr(native_module, "load", lambda: None)
    monkeypatch.setattr(native_module, "why_absent", lambda: "no compiler")
    assert select_backend("auto", weights, strict=True).name == "reference"
    assert select_backend("auto", weights, strict=False).name == "grouped_mm"
    with pytest.raises(ConfigError, match=r"native: the C\+\+ kernels are absent: no compiler"):
        select_backend("native", weights, strict=True)
    with pytest.raises(ConfigError, match="grouped_mm: invariance=strict: its kernel, and a row's bits, depend on"):
        select_backend("grouped_mm", weights, strict=True)
    odd = random_experts(2, 6, 16)  # 24-byte rows
    assert select_backend("auto", odd, strict=False).name == "reference"
    with pytest.raises(ConfigError, match="grouped_mm: hidden size 6 x 4 bytes is not a multiple of 16"):
        select_backend("grouped_mm", odd, strict=False)
    with pytest.raises(ConfigError, match="must be auto or one of native, grouped_mm, reference"):
        select_backend("fast", odd, strict=True)
    with pytest.raises(ConfigError, match=r"reference: up weights are torch\.float64, not torch\.float32 or"):
        select_backend("reference", random_experts(2, 16, 16, dtype=torch.float64), strict=True)
    strided = ExpertWeights(
        up_SIH=torch.randn(2, 16, 32).transpose(1, 2),
        down_SHI=torch.randn(2, 16, 16),
        up_bias_SI=None,
        down_bias_SH=None,
        transposed=False,
        activation=silu_gate,
    )
    with pytest.raises(ConfigError, match="up weights are strided"):
        select_backend("grouped_mm", strided, strict=False)
