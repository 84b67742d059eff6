"""The probe: which keys a query sees, told from the model's own mask function."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from epruntime.errors import UnsupportedModelError
from epruntime.models import adapter
from epruntime.models.probe import features_of, run_probe
from epruntime.models.small_config import small_config
from epruntime.models.visibility import Visibility, first_visible, visibility_of


@pytest.mark.parametrize("size", [1, 2, 3, 6, 8, 128, 4096, 131072])
def test_windows_and_chunks_are_recognised(size: int) -> None:
    assert visibility_of(lambda q, k: q - size < k <= q) == Visibility(window=size)
    if size > 1:  # a window of one key and chunks of one key are the same thing
        assert visibility_of(lambda q, k: k <= q and k // size == q // size) == Visibility(chunk=size)


def test_full_causal() -> None:
    assert visibility_of(lambda q, k: k <= q) == Visibility()


@pytest.mark.parametrize(
    "sees",
    [
        lambda q, k: True,  # not causal
        lambda q, k: k < q,  # not itself
        lambda q, k: q - k < 0 and k <= q,  # a window of 0
        lambda q, k: k <= q and (k < 4 or k > q - 8),  # a window with sinks kept in the cache
        lambda q, k: k <= q and (q - k) % 2 == 0,  # dilated
        lambda q, k: k <= q and k >= q // 8 * 8 - 4,  # overlapping chunks
    ],
)
def test_other_masks_are_refused(sees: Any) -> None:
    with pytest.raises(UnsupportedModelError, match="neither full, nor a window, nor chunks"):
        visibility_of(sees)


def test_first_visible() -> None:
    assert [first_visible(Visibility(window=3), p) for p in range(5)] == [0, 0, 0, 1, 2]
    assert [first_visible(Visibility(chunk=3), p) for p in range(7)] == [0, 0, 0, 3, 3, 3, 6]
    assert first_visible(Visibility(), 1000) == 0


def _probe(model_type: str, **overrides: Any) -> Any:
    config = small_config(model_type, **overrides)
    return run_probe(adapter.build_meta_model(config, torch.float32))


def test_windows_that_only_the_mask_knows() -> None:
    overrides = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 3}
    kinds = small_config("qwen2_moe", **overrides).layer_types
    expected = [Visibility(window=6) if kind == "sliding_attention" else Visibility() for kind in kinds]
    assert len(set(kinds)) == 2
    assert [c.visibility for c in _probe("qwen2_moe", **overrides).attention] == expected
    assert {c.visibility for c in _probe("phimoe", sliding_window=5).attention} == {Visibility(window=5)}
    assert {c.visibility for c in _probe("qwen2_moe").attention} == {Visibility()}


@pytest.mark.parametrize(
    ("model_type", "field", "name"),
    [("llama4_text", "attention_chunk_size", "chunk"), ("phimoe", "sliding_window", "window")],
)
def test_a_window_of_one_key_is_a_feature_of_either_name(model_type: str, field: str, name: str) -> None:
    assert features_of(_probe(model_type, **{field: 2})) == {name}
    assert features_of(_probe(model_type, **{field: 1})) == {"window or chunk"}


def test_sinks_latents_and_top_k() -> None:
    probe = _probe("gpt_oss", num_experts_per_tok=3)
    assert all(c.sinks for c in probe.attention)
    assert set(probe.top_k.values()) == {3}
    latent = _probe("deepseek_v3").attention[0]
    assert (latent.cached_key, latent.cached_value) == ((1, 16), (1, 8))


@pytest.mark.parametrize(
    ("model_type", "overrides", "words"),
    [
        ("minimax_m3_vl_text", {"layer_types": ["minimax_m3_sparse", "full_attention", "full_attention"]}, "."),
        ("mixtral", {"is_causal": False}, "."),
    ],
)
def test_attention_that_the_hook_does_not_cover(model_type: str, overrides: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedModelError, match=words):
        _probe(model_type, **overrides)


def test_serving_name_builds_no_mask() -> None:
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    assert adapter.SERVE not in ALL_MASK_ATTENTION_FUNCTIONS
