"""LoadedModel.logits: the head on more rows of the last forward gives what the forward itself gives for them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from epruntime.models.batch import ForwardBatch
from epruntime.models.conformance import COVERED
from epruntime.models.loader import load_model
from epruntime.testing import tiny_models
from epruntime.testing.ragged import local_runtime

#: families whose heads scale or cap the logits, with values that show
OVERRIDES: dict[str, dict[str, Any]] = {
    "granitemoe": {"logits_scaling": 4.0},
    "gemma4_text": {"final_logit_softcapping": 3.0},
}


def _batch(rows: list[int]) -> ForwardBatch:
    return ForwardBatch(
        input_ids_T=torch.arange(3, 3 + 64),
        positions_T=torch.arange(64),
        slots_T=torch.arange(64),
        query_starts_S1=torch.tensor([0, 64], dtype=torch.int32),
        seq_lens_S=torch.tensor([64], dtype=torch.int32),
        block_tables_SB=torch.arange(16, dtype=torch.int32)[None],
        logits_rows_N=torch.tensor(rows),
        num_tokens=64,
    )


@pytest.mark.parametrize("model_type", tiny_models.distinct(COVERED))
def test_logits_of_more_rows(model_type: str, tmp_path: Path) -> None:
    _, reference = tiny_models.build(model_type, **OVERRIDES.get(model_type, {}))
    tiny_models.save(reference, tmp_path)
    model = load_model(tmp_path, dtype="float32", moe=local_runtime())
    model.allocate_kv(16, 4)
    whole = model.forward(_batch(list(range(64))))
    assert whole.shape == (64, model.info.vocab_size)
    steps = []
    for layer in model.layers:
        layer.attend = lambda *a, **k: steps.append(1)  # type: ignore[method-assign]  # no layer may run
    odd = torch.arange(1, 64, 2)
    assert torch.equal(model.logits(odd), whole[odd])
    assert torch.equal(model.logits(torch.full((32,), 7)), whole[7].expand(32, -1))
    assert not steps


def test_it_is_the_last_forward_that_counts(tmp_path: Path) -> None:
    _, reference = tiny_models.build("mixtral")
    tiny_models.save(reference, tmp_path)
    model = load_model(tmp_path, dtype="float32", moe=local_runtime())
    model.allocate_kv(16, 4)
    with pytest.raises(AssertionError, match="a forward comes first"):
        model.logits(torch.zeros(32, dtype=torch.int64))
    first = model.forward(_batch(list(range(64))))
    other = replace(_batch(list(range(64))), input_ids_T=torch.arange(40, 104))
    second = model.forward(other)
    assert not torch.equal(first, second)
    assert torch.equal(model.logits(torch.arange(32)), second[:32])
    model.close()
    with pytest.raises(AssertionError, match="a forward comes first"):
        model.logits(torch.zeros(32, dtype=torch.int64))
