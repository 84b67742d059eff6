"""Hashes of hidden states: one bit tells, the place does not; on families whose layers return other things, too."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from epruntime.models.loader import load_model
from epruntime.testing.ragged import RaggedDriver, local_runtime, strict_ops
from epruntime.testing.tiny_models import build, save
from epruntime.worker.batch_dependent import make_batch_dependent
from epruntime.worker.layer_trace import LayerTrace


class _Layer(torch.nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.attention: Any = torch.nn.Module()
        self.attention._epruntime_attention = None
        self.index = index

    def forward(self, hidden_1TH: torch.Tensor) -> torch.Tensor:
        return hidden_1TH + self.index


def _batch(rows: int, *, first: int = 0) -> Any:
    forward = SimpleNamespace(
        num_tokens=rows,
        query_starts_S1=torch.tensor([0, rows], dtype=torch.int32),
        seq_lens_S=torch.tensor([first + rows], dtype=torch.int32),
        positions_T=torch.arange(first, first + rows),
    )
    return SimpleNamespace(forward=forward, scheduled=[SimpleNamespace(rid=7)])


def _hashes(told: dict[str, Any]) -> np.ndarray:
    return np.frombuffer(told["hashes"], np.int64).reshape(-1, len(told["layers"]))


def _traced(hidden_TH: torch.Tensor) -> np.ndarray:
    layers = [_Layer(0), _Layer(1)]
    module: Any = torch.nn.Module()
    module.layers = torch.nn.ModuleList(layers)
    trace, rows = LayerTrace(module), len(hidden_TH)
    trace.on_batch(_batch(rows, first=4))
    padded_1TH = torch.cat([hidden_TH, torch.zeros(3, hidden_TH.shape[1], dtype=hidden_TH.dtype)])[None]
    for layer in layers:
        padded_1TH = layer(padded_1TH)
    told = trace.take()
    assert told["layers"] == ["input", "0", "1"]
    assert np.frombuffer(told["rids"], np.int64).tolist() == [7] * rows
    assert np.frombuffer(told["positions"], np.int64).tolist() == list(range(4, 4 + rows))
    assert trace.take()["hashes"] == b""
    return _hashes(told)


def test_rows_are_numbered_by_their_place_in_the_history_whatever_positions_the_model_is_told() -> None:
    module: Any = torch.nn.Module()
    module.layers = torch.nn.ModuleList([_Layer(0)])
    trace = LayerTrace(module)
    forward = SimpleNamespace(
        num_tokens=6,
        query_starts_S1=torch.tensor([0, 3, 4, 6], dtype=torch.int32),
        seq_lens_S=torch.tensor([9, 5, 2], dtype=torch.int32),
        positions_T=torch.full((6,), 77),
    )
    batch: Any = SimpleNamespace(forward=forward, scheduled=[SimpleNamespace(rid=rid) for rid in (7, 8, 9)])
    trace.on_batch(batch)
    told = trace.take()
    assert np.frombuffer(told["rids"], np.int64).tolist() == [7, 7, 7, 8, 9, 9]
    assert np.frombuffer(told["positions"], np.int64).tolist() == [6, 7, 8, 4, 0, 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_hash_tells_one_bit_and_not_the_place(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    rows_TH = torch.randn(5, 24).to(dtype)
    hashes = _traced(rows_TH)
    assert np.array_equal(_traced(rows_TH[[3, 1]]), hashes[[3, 1]])
    assert np.array_equal(hashes[:, 0], hashes[:, 1])  # layer 0 adds nothing
    assert not (hashes[:, 1] == hashes[:, 2]).any()
    changed = rows_TH.clone()
    changed[2].view({4: torch.int32, 2: torch.int16}[changed.element_size()])[17] ^= 1
    assert (_traced(changed)[:, 0] != hashes[:, 0]).tolist() == [False, False, True, False, False]


# several streams per token; several attention layers in a decoder layer; layers of several kinds
@pytest.mark.parametrize("model_type", ["deepseek_v4", "longcat_flash", "llama4_text"])
def test_families(model_type: str, tmp_path: Path) -> None:
    path = save(build(model_type)[1], tmp_path)
    runtime = local_runtime()
    model = load_model(path, dtype="auto", moe=runtime)
    driver = RaggedDriver(model)
    changed_layer = make_batch_dependent(model.module, runtime.context)
    trace = LayerTrace(model.module)

    def hashes(name: str, ids: list[int]) -> np.ndarray:
        trace.on_batch(_batch(len(ids)))
        with strict_ops():
            driver.step([(name, torch.tensor(ids))])
        return _hashes(trace.take())

    # the same first token, alone and with others: equal up to the layer that is made to depend on the batch
    alone, crowd = hashes("a", [5]), hashes("b", [5, 6, 7, 8, 9])
    assert all(len(set(column.tolist())) == 5 for column in crowd.T)
    parting = np.flatnonzero(alone[0] != crowd[0])
    assert len(parting) > 0
    assert trace.layers[parting[0]] == str(changed_layer)
