"""Long sequences, in parts over the paged cache, equal transformers: rotary embeddings, windows, chunks, selection.

Some thousand tokens on tiny models: positions far beyond the original length that a rotary embedding was made for,
windows and chunks that are passed many times, an indexer that leaves out most keys. The oracle is eager transformers in
fp64 on the whole sequence at once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from epruntime.models.loader import load_model
from epruntime.testing import tiny_models
from epruntime.testing.ragged import compare, local_runtime

_SCALED = {"rope_theta": 1e4, "original_max_position_embeddings": 256}
_YARN = {"rope_type": "yarn", "factor": 16.0, **_SCALED}
_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **_SCALED}
_LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 16.0}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "yarn": ("qwen3_moe", {"rope_parameters": _YARN}),
    "yarn latent": ("deepseek_v3", {"rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0}}),
    "llama3": ("mixtral", {"rope_parameters": _LLAMA3}),
    "linear": ("mixtral", {"rope_parameters": _LINEAR}),
    "window": ("mixtral", {"sliding_window": 300}),
    "window and sinks": ("gpt_oss", {"sliding_window": 128}),
    "chunks and temperature": ("llama4_text", {"attention_chunk_size": 512, "floor_scale": 256}),
    # of few index heads all may say 0, and of keys that tie torch's top-k names any: 32 leave no ties
    "sparse": ("deepseek_v32", {"index_topk": 128, "index_n_heads": 32}),
}
#: Sequences of 2,500 and 300 tokens, which share steps.
SCHEDULE = (
    (("long", 700), ("short", 90)),
    (("short", 200), ("long", 900)),
    (("long", 877), ("short", 9)),
    *((("long", 1), ("short", 1)),) * 3,
    (("long", 20),),
)
TIMES_EAGER, SHARE = 3.0, 2e-6


#: What `make test` runs; the others take longer, and `make test-all` runs them.
SLICE = ("yarn", "yarn latent", "llama3")


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in SLICE else pytest.mark.full) for n in CASES])
def test_long_sequences_equal_transformers(name: str, tmp_path: Path) -> None:
    model_type, overrides = CASES[name]
    layers = {"num_hidden_layers": 4 if model_type == "llama4_text" else 2}
    if model_type == "gpt_oss":
        layers["layer_types"] = ["sliding_attention", "full_attention"]  # type: ignore[assignment]
    _, reference = tiny_models.build(model_type, max_position_embeddings=4096, **{**layers, **overrides})
    tiny_models.save(reference, tmp_path)
    model = load_model(tmp_path, dtype="float32", moe=local_runtime())
    found = compare(reference, model, schedule=SCHEDULE, num_blocks=190, block_size=16)
    assert found.largest_logit > 0.5
    assert found.error <= TIMES_EAGER * found.eager_error + SHARE * found.largest_logit, found
    assert found.eager_error < 1e-3 * found.largest_logit, f"the oracle itself is unsteady: {found}"
