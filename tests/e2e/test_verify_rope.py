"""`epruntime verify` on models whose keys depend on the length of their sequence, with prompts on both sides of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from epruntime.engine.ranks import Ranks
from epruntime.testing.tiny_models import build, save
from epruntime.verify import VerifyConfig, verify

LENGTH = 12  #: the original one
LONGROPE: dict[str, Any] = {
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0 + 0.05 * i for i in range(8)],
        "long_factor": [2.0 + 0.5 * i for i in range(8)],
        "original_max_position_embeddings": LENGTH,
        "short_mscale": 1.1,
        "long_mscale": 1.5,
    }
}
DYNAMIC: dict[str, Any] = {
    "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
    "max_position_embeddings": LENGTH,
}


@pytest.mark.parametrize(("model_type", "config"), [("phimoe", LONGROPE), ("qwen3_moe", DYNAMIC)])
def test_prompts_share_a_prefix_across_the_length(
    model_type: str, config: dict[str, Any], ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(save(build(model_type, **config)[1], tmp_path))
    prompt = [7 + 3 * i for i in range(20)]  # each prompt begins as the longest one does
    monkeypatch.setattr(
        "epruntime.verify.run.random_prompts", lambda number, *_, **__: [prompt[: 20 - 2 * i] for i in range(number)]
    )
    options = VerifyConfig(
        num_prompts=8, max_tokens=6, max_prompt_tokens=20, seed=3, cases="chunks,preempted,prefix", trace_layers=True
    )
    report = verify(path, options, ranks=ranks, block_size=2)
    assert [case.status for case in report.cases] == ["baseline"] + ["identical"] * 3, report.summary
    assert report.control.status == "caught"
