"""Indexers that select keys: what each form of them is given, and which models with one are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from epruntime.errors import UnsupportedModelError
from epruntime.models import adapter, sparse
from epruntime.models.loader import features_of_model, load_model
from epruntime.models.small_config import small_config
from epruntime.testing import tiny_models
from epruntime.testing.ragged import RaggedDriver, local_runtime

WITH = {"mistral_large4": {"position_ids"}, "glm_moe_dsa": {"q_resid", "position_ids"}}


@pytest.mark.parametrize("model_type", tiny_models.available(WITH))
def test_an_indexer_is_given_what_it_asks_for_of_one_sequence(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny_models.save(tiny_models.build(model_type)[1], tmp_path)
    driver = RaggedDriver(load_model(path, dtype="float32", moe=local_runtime()))
    driver.step([("a", torch.arange(3, 8)), ("b", torch.arange(3, 6))])
    calls: list[tuple[sparse.Rows, torch.Size]] = []
    run = sparse.run

    def watched(indexer: Any, rows: sparse.Rows, mask_1TL: torch.Tensor, keys: Any) -> torch.Tensor:
        calls.append((rows, mask_1TL.shape))
        return run(indexer, rows, mask_1TL, keys)

    monkeypatch.setattr(sparse, "run", watched)
    driver.step([("b", torch.arange(6, 10)), ("a", torch.arange(8, 10))])
    for (rows, shape), positions in zip(calls[:2], ([3, 4, 5, 6], [5, 6]), strict=True):
        assert rows.keys() == {"hidden_states", "position_embeddings", *WITH[model_type]}
        assert rows["position_ids"].tolist() == [positions]
        assert {len(part[0]) for part in (rows["hidden_states"], *rows["position_embeddings"])} == {len(positions)}
        assert shape == (1, len(positions), positions[-1] + 1)


class _Indexer(torch.nn.Module):
    def forward(self, hidden_states: Any, attention_mask: Any, cache: Any, gates: Any = None) -> None: ...


def test_an_indexer_that_takes_something_unknown_is_left_alone() -> None:
    """Then the model asks its cache for what it does not have, and is refused."""
    layer: Any = torch.nn.Module()
    layer.indexer = _Indexer()
    sparse.adapt(layer)
    assert "forward" not in vars(layer.indexer)


@pytest.mark.parametrize("model_type", tiny_models.available(WITH))
def test_an_indexer_that_selects_no_key_is_refused(model_type: str) -> None:
    config = small_config(model_type, index_topk=0)
    with pytest.raises(UnsupportedModelError, match="selects no key"):
        features_of_model(adapter.build_meta_model(config, torch.float32), config)
