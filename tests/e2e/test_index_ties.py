"""Attention that selects keys: how often index scores are equal, so that what is selected is no more transformers' own
choice. Few index heads, all cut off by the ReLU, give a score of exactly zero to several keys.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from epruntime.models import text_part
from epruntime.models.conformance import COVERED
from epruntime.models.loader import load_model
from epruntime.models.small_config import small_config
from epruntime.testing import tiny_models
from epruntime.testing.ragged import RaggedDriver, local_runtime, reference_logits, strict_ops

SPARSE = tiny_models.available(t for t in COVERED if "sparse" in COVERED[t])
MODELS, PROMPTS, LENGTH = 4, 3, 45
#: far above rounding, far below what another key does
DIFFERENT = 1e-2


def _differing(model_type: str, index_heads: int, folder: Path) -> int:
    """Of 12 prompts, those in which some row's logits are not transformers'."""
    found = 0
    for seed in range(MODELS):
        _, reference = tiny_models.build(model_type, seed, index_n_heads=index_heads)
        path = tiny_models.save(reference, folder / str(seed))
        model = load_model(path, dtype="float32", moe=local_runtime())
        prompts = {
            str(i): torch.randint(3, 128, (LENGTH,), generator=torch.Generator().manual_seed(100 * seed + i))
            for i in range(PROMPTS)
        }
        expected = reference_logits(reference, prompts)
        for name, tokens in prompts.items():
            with strict_ops():
                (logits,) = RaggedDriver(model).step([(name, tokens)])
            found += bool((logits - expected[name]).abs().max() > DIFFERENT)
    return found


@pytest.mark.parametrize(
    ("model_type", "heads"),
    [("axk2", (4, 16)), pytest.param("glm_moe_dsa", (4, 8, 16, 32), marks=pytest.mark.full)],
)
def test_sixteen_index_heads_select_as_transformers_does(
    model_type: str, heads: tuple[int, ...], tmp_path: Path
) -> None:
    """As docs/models.md says. Tiny models have as many heads as it takes: whoever copies them meets no ties."""
    assert all(text_part.language_config(small_config(name)).index_n_heads == 16 for name in SPARSE)
    differing = {n: _differing(model_type, n, tmp_path / str(n)) for n in heads}
    assert differing[4] > 6  # negative control
    assert differing.get(8, 0) <= 2
    assert differing[16] == differing.get(32, 0) == 0
