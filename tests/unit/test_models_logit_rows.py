"""Logits of some rows, of a model whose forward has no argument that asks for them: no other row meets the head."""

from __future__ import annotations

from functools import wraps
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import MixtralForCausalLM
from transformers.modeling_outputs import CausalLMOutput

from epruntime.errors import UnsupportedModelError
from epruntime.models import adapter
from epruntime.models.loader import load_model
from epruntime.models.probe import run_probe
from epruntime.models.replay import LastHidden
from epruntime.models.small_config import small_config
from epruntime.testing import tiny_models
from epruntime.testing.ragged import RaggedDriver, local_runtime, strict_ops


class Plain(MixtralForCausalLM):
    """A forward that gives logits of all rows."""

    def forward(self, input_ids: Any = None, position_ids: Any = None, cache: Any = None) -> CausalLMOutput:
        keyword = adapter.cache_keyword(self.model)
        output = self.model(input_ids=input_ids, position_ids=position_ids, **{keyword: cache})
        return CausalLMOutput(logits=self.lm_head(self.rows(output, input_ids)))

    def rows(self, output: Any, input_ids: Any) -> torch.Tensor:
        return output.last_hidden_state


class WithInputs(Plain):
    """Its logits are of all rows, whatever the base model returns."""

    def rows(self, output: Any, input_ids: Any) -> torch.Tensor:
        return self.model.embed_tokens(input_ids)


class WithoutHidden(Plain):
    def rows(self, output: Any, input_ids: Any) -> torch.Tensor:
        return output[0]


def _meta(kind: type) -> Any:
    model = adapter.build_meta_model(small_config("mixtral"), torch.float32)
    object.__setattr__(model, "__class__", kind)
    return model


def test_any_class_whose_logits_are_made_row_by_row_passes() -> None:
    model = _meta(Plain)
    adapter.check_forward_arguments(model)
    assert not adapter.takes_rows(model)
    assert len(run_probe(model).attention) == 3
    assert "forward" not in vars(model.model)  # as it was


def test_logits_of_other_rows_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match=r"WithInputs: .* logits \(1, 5, 128\) for 4 rows"):
        run_probe(_meta(WithInputs))


def test_a_base_model_without_hidden_states_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = _meta(WithoutHidden)
    forward = type(model.model).forward

    @wraps(forward)
    def plain_tuple(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
        return (forward(*args, **kwargs).last_hidden_state,)

    monkeypatch.setattr(type(model.model), "forward", plain_tuple)
    with pytest.raises(UnsupportedModelError, match="returns a tuple without hidden states"):
        run_probe(model)


def test_rows_equal_those_of_a_class_that_is_told_of_them(tmp_path: Path) -> None:
    path = tiny_models.save(tiny_models.build("mixtral")[1], tmp_path)
    told, model = (load_model(path, dtype="float32", moe=local_runtime()) for _ in range(2))
    model._hidden.unwrap()
    object.__setattr__(model.module, "__class__", Plain)
    model._hidden = LastHidden(model.module)
    rows = torch.tensor([7, 2])
    with strict_ops():
        for each in (told, model):
            RaggedDriver(each).step([("a", torch.arange(3, 14))])
        assert torch.equal(model.logits(rows), told.logits(rows))
        assert tuple(model.logits(rows[:0]).shape) == (0, 128)


def test_the_head_of_a_served_one_meets_the_wanted_rows_alone(tmp_path: Path) -> None:
    path = tiny_models.save(tiny_models.build("qwen3_omni_moe_thinker")[1], tmp_path)
    model = load_model(path, dtype="float32", moe=local_runtime())
    assert not adapter.takes_rows(model.module)
    seen: list[int] = []
    model.module.lm_head.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].shape[1]))
    with strict_ops():
        (everything,) = RaggedDriver(model).step([("a", torch.arange(3, 14))])
        some = model.logits(torch.tensor([10, 0]))
    assert seen == [11, 2]
    assert torch.equal(some, everything[[10, 0]])
