"""The referee computes what the whole model in the wider dtype does, and leaves the model as it was."""

from __future__ import annotations

import copy

import pytest
import torch

from epruntime.testing.tiny_models import build
from epruntime.verify.referee import extra_bytes, widened


@pytest.mark.parametrize(
    ("model_type", "dtype"),
    [
        ("mixtral", torch.float64),
        ("gemma4_text", torch.float32),
        ("gpt_oss", torch.float32),
        ("deepseek_v3", torch.float32),
        ("dbrx", torch.float32),
    ],
)
@torch.no_grad()
def test_one_layer_at_a_time_is_the_whole_model_in_the_wider_dtype(model_type: str, dtype: torch.dtype) -> None:
    _, model = build(model_type, dtype=torch.bfloat16)
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    whole = copy.deepcopy(model).to(dtype)
    before = {name: (tensor.dtype, tensor.clone()) for name, tensor in model.named_parameters() if ".0." in name}
    ids = torch.arange(5, 30)[None]
    narrow = model(input_ids=ids, use_cache=False).logits
    with widened(model, dtype):
        wide = model(input_ids=ids, use_cache=False).logits
    assert wide.dtype == dtype
    assert torch.equal(wide, whole(input_ids=ids, use_cache=False).logits)
    assert not torch.equal(wide, narrow)
    assert before
    for name, tensor in model.named_parameters():
        if name in before:
            assert tensor.dtype == before[name][0]
            assert torch.equal(tensor, before[name][1])


def test_it_needs_room_for_one_layer() -> None:
    _, model = build("mixtral", dtype=torch.bfloat16)
    number = sum(tensor.numel() for tensor in model.parameters())
    layer = sum(tensor.numel() for tensor in model.model.layers[0].parameters())
    assert len(model.model.layers) == 3
    assert extra_bytes(model, torch.float32) - 4 * (number - 2 * layer) in range(4096)  # buffers are small
    assert extra_bytes(model, torch.bfloat16) == 0
