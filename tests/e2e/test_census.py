"""No served model asks the CPU for an op outside the table of `epruntime.ops.batch_invariant`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers.activations import ACT2FN

from epruntime.models.conformance import COVERED
from epruntime.models.loader import load_model
from epruntime.ops import attention, batch_invariant, combine, dispatch, gemm, reference
from epruntime.ops.census import Census
from epruntime.testing import tiny_models
from epruntime.testing.ragged import SCHEDULE, RaggedDriver, local_runtime, sequences_for
from epruntime.worker.rehearsal import rehearse

#: Types that `make test` runs: those with an op that few others have.
SLICE = {"beam", "deepseek_v2", "deepseek_v32", "deepseek_v4", "gemma4_text", "gpt_oss", "laguna", "mixtral", "phimoe"}
TYPES = [pytest.param(t, marks=() if t in SLICE else pytest.mark.full) for t in tiny_models.distinct(COVERED)]
COMPLEX = {"deepseek_v2", "llama4_text"}


@pytest.fixture(autouse=True)
def own_ops() -> Iterator[None]:
    batch_invariant.install()
    yield
    batch_invariant.uninstall()


@pytest.mark.parametrize("model_type", TYPES)
def test_every_op_is_known(model_type: str, tmp_path: Path) -> None:
    _, reference = tiny_models.build(model_type)
    moe = local_runtime()
    model = load_model(tiny_models.save(reference, tmp_path), dtype="float32", moe=moe)
    driver = RaggedDriver(model)
    tokens = sequences_for(model.info.vocab_size, SCHEDULE, seed=1)
    model_forward = Census()
    with model_forward:
        driver.step([("a", tokens["a"][:5]), ("b", tokens["b"][:7])])
        driver.step([("a", tokens["a"][5:6])])
    assert not model_forward.unsteady
    assert model_forward.multiplies_complex == (model_type in COMPLEX)
    rehearsal = rehearse(model, moe, block_size=driver.block_size)
    assert not rehearsal.unsteady
    assert rehearsal.multiplies_complex == model_forward.multiplies_complex
    own = {"new_zeros", "zeros_like"}  # what it hands to experts, and what they return without an exchange
    assert "mm" in rehearsal.ops
    assert not rehearsal.ops - own - model_forward.ops
    left = model_forward.ops - rehearsal.ops
    counts = {"sum.dim_IntList"}  # of integers, of rows that are sent: no rehearsal, and exact
    unseen = left & set(batch_invariant.REPLACED) - counts
    assert not unseen, "the rehearsal sees what is computed by the model itself"


@pytest.mark.parametrize("model_type", ["deepseek_v32", "gpt_oss"])
def test_every_op_of_the_plain_torch_kernels_is_known(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (attention, combine, dispatch, gemm):
        monkeypatch.setattr(module, "load", lambda: None)
    _, plain = tiny_models.build(model_type)
    model = load_model(tiny_models.save(plain, tmp_path), dtype="float32", moe=local_runtime())
    tokens = sequences_for(model.info.vocab_size, SCHEDULE, seed=1)
    driver, scores = RaggedDriver(model), torch.randn(3, 4)
    with Census() as census:
        driver.step([("a", tokens["a"][:3]), ("b", tokens["b"][:1])])
        reference.soft_cap(scores, 30.0)  # no tiny model has one
    assert {"nan_to_num", "mul.out"} <= census.ops, "these are not the plain-torch kernels"
    assert not census.unsteady


@pytest.mark.parametrize("name", ACT2FN)
def test_every_activation_is_known(name: str) -> None:
    """All that `hidden_act` may name, whether or not a model of `COVERED` has it."""
    with Census() as census, torch.inference_mode():
        ACT2FN[name](torch.ones(3, 4))
    assert census.ops or name == "linear"
    assert not census.unsteady


def test_an_unknown_op_is_named() -> None:
    x = torch.randn(3, 4)
    with Census() as census, torch.inference_mode():
        torch.nn.functional.glu(x)
        torch.add(x, x, alpha=2)
        torch.rsub(x, 1, alpha=2)
        torch.rsub(x, 1)
        x.sum()
        torch.nn.functional.linear(x, x)
        x.long().sum()
        torch.mm(x, x.t(), out=torch.empty(3, 3))
    with_alpha = {"add.Tensor with alpha", "rsub.Scalar with alpha"}
    assert census.unsteady == {"glu", "sum over the whole batch", "mm.out"} | with_alpha
    assert "mm" in census.ops
