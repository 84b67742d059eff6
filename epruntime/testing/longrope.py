"""Whether a model's code uses `long_factor` of longrope at all: a test of long lengths is vacuous where it does not."""

from __future__ import annotations

import copy
from typing import Any

import torch

from epruntime.testing.ragged import fresh


def change_by_long_factors(reference: Any, *, position: int) -> float:
    """Largest change of a logit of some tokens up to `position` when every `long_factor` is half as large.

    `position` is beyond the original length. 0 for families that always use `short_factor` (phimoe in transformers).
    """
    config = copy.deepcopy(reference.config)
    parameters = config.rope_parameters
    changed = [p for p in (parameters, *parameters.values()) if isinstance(p, dict) and "long_factor" in p]
    assert changed, "the configuration has no long_factor"
    for each in changed:
        each["long_factor"] = [factor / 2 for factor in each["long_factor"]]
    other = type(reference)(config).to(reference.dtype).eval()
    other.load_state_dict(reference.state_dict())
    ids, positions = torch.arange(3, 35)[None], torch.arange(position - 31, position + 1)[None]
    with torch.inference_mode():
        theirs, ours = (
            fresh(model)(input_ids=ids, position_ids=positions, use_cache=False).logits for model in (reference, other)
        )
    return float((theirs - ours).abs().max())
