"""The kernels under test: each instruction set that this CPU can run, and the plain-torch reference."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from epruntime.ops import attention, combine, dispatch, extension, gemm


@pytest.fixture(params=["avx512_bf16", "avx512", "avx2", "portable", "reference"])
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Makes `epruntime.ops` run one implementation."""
    name = request.param
    if name == "reference":
        for module in (attention, combine, dispatch, gemm):
            monkeypatch.setattr(module, "load", lambda: None)
        yield name
        return
    native = extension.load()
    if native is None:
        pytest.skip(extension.why_absent())
    if name not in native.supported_isas():
        pytest.skip(f"this CPU has no {name}")
    before = native.isa()
    native.select_isa(name)
    yield name
    native.select_isa(before)


@pytest.fixture
def threads() -> Iterator[None]:
    """Puts the number of torch's threads back after a test that changes it."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
