"""The negative control: a layer that depends on the number of rows of the step, one row included."""

from __future__ import annotations

import pytest
import torch

from epruntime.models import adapter
from epruntime.moe.types import StepContext
from epruntime.worker.batch_dependent import make_batch_dependent


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_number_of_rows_has_its_own_bits(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    layers = {index: torch.nn.Identity() for index in range(3)}
    monkeypatch.setattr(adapter, "decoder_layers", lambda module: layers)
    context = StepContext()
    assert make_batch_dependent(torch.nn.Module(), context) == 1
    row_1H = torch.randn(1, 64).to(dtype)

    def bits(num_rows: int) -> torch.Tensor:
        context.num_tokens = num_rows
        out_TH = layers[1](row_1H.expand(num_rows, 64))
        assert torch.equal(layers[0](row_1H), row_1H)
        assert (out_TH == out_TH[0]).all()
        return out_TH[0].view({4: torch.int32, 2: torch.int16}[dtype.itemsize])

    for one in range(1, 20):
        assert torch.equal(bits(one), bits(one))
        for other in range(one + 1, 20):
            differing = bits(one) ^ bits(other)
            assert set(differing.tolist()) == {0, 1}  # in the last bit alone
            assert 10 < int(differing.sum()) < 54
