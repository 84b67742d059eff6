"""Layers that attend to the latents of another layer (mistral_large4): whose they are, and which models are refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from epruntime.errors import CheckpointError, UnsupportedModelError
from epruntime.models import adapter
from epruntime.models.latents import Latents
from epruntime.models.loader import features_of_model, inspect_model, load_model
from epruntime.models.probe import run_probe
from epruntime.models.small_config import small_config
from epruntime.testing import tiny_models
from epruntime.testing.ragged import RaggedDriver, local_runtime

TYPE = "mistral_large4"
pytestmark = pytest.mark.skipif(not tiny_models.available([TYPE]), reason="this transformers has no such type")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.save(tiny_models.build(TYPE)[1], tmp_path_factory.mktemp(TYPE))


def _features(**fields: Any) -> frozenset[str]:
    config = small_config(TYPE, **fields)
    return features_of_model(adapter.build_meta_model(config, torch.float32), config)


def test_the_probe_tells_whose_latents_a_layer_attends_to() -> None:
    model = adapter.build_meta_model(small_config(TYPE), torch.float32)
    calls = run_probe(model).attention
    assert [call.shares for call in calls] == [-1, -1, 1]
    assert calls[2].cached_key == calls[1].cached_key == (1, 16)
    assert "expand_kv" not in vars(model.get_decoder().layers[0].self_attn), "the probe leaves nothing behind"
    assert "shared" in _features()
    assert "shared" not in _features(kv_source_layers=None)


def test_latents_of_nobody_are_not_taken_for_shared_ones() -> None:
    class Layer(torch.nn.Module):
        def expand_kv(self, latent: torch.Tensor, rotary: torch.Tensor) -> None: ...

    layer, latents, cached = Layer(), Latents(), torch.zeros(1, 1, 5, 16)
    latents.given(0, cached, cached)
    with latents.watch(layer):
        layer.expand_kv(cached.clone(), cached)
    assert latents.of_another(layer) is None
    with latents.watch(layer):
        layer.expand_kv(cached, cached)
    assert latents.of_another(layer) is not None


def test_a_layer_keeps_a_copy_of_the_latents_that_it_shares(saved: Path) -> None:
    model = load_model(saved, dtype="float32", moe=local_runtime())
    driver = RaggedDriver(model)
    driver.step([("a", torch.arange(3, 9)), ("b", torch.arange(20, 25))])
    driver.step([("b", torch.arange(25, 28))])
    source, reader = (model.layers[i].k_cache_NBKD for i in (1, 2))
    assert int((~source.isnan()).all(-1).sum()) == 14
    assert torch.equal(source.nan_to_num(), reader.nan_to_num())
    without_index = dataclasses.replace(model.info.kv_layers[2], index_dim=0, index_dtype="")
    assert model.info.kv_layers[1] == without_index, "the copy takes room, too"


def test_latents_of_another_layer_than_config_json_says_are_refused() -> None:
    """transformers keeps one set of latents for layers with rotary embedding, and one for those without."""
    fields = {"num_hidden_layers": 4, "no_rope_layers": [0] * 4, "indexer_types": ["full"] * 4}
    with pytest.raises(UnsupportedModelError, match=r"latents of layer 0 .* gives it those of layer 1"):
        _features(**fields, kv_source_layers=[0, 1, 0, 1])
    assert "shared" in _features(**fields, kv_source_layers=[0, 0, 2, 2])


def test_heads_that_share_keys_are_refused() -> None:
    """Latents are expanded to every head's own keys; transformers then has twice as many as there are queries."""
    with pytest.raises(UnsupportedModelError, match="num_key_value_heads=2 for 4 heads"):
        _features(num_key_value_heads=2)


def test_a_soft_cap_of_zero_is_refused(saved: Path, tmp_path: Path) -> None:
    for file in saved.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    config["text_config"]["final_logit_softcapping"] = 0.0
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="final_logit_softcapping=0"):
        inspect_model(tmp_path)
