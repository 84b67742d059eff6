"""Rotary embeddings by length: rows of many sequences equal transformers on each alone; what is unknown is refused."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from epruntime.errors import UnsupportedModelError
from epruntime.models import adapter, rope
from epruntime.models.batch import ForwardBatch
from epruntime.models.conformance import COVERED
from epruntime.models.info import RopeLengths
from epruntime.models.small_config import small_config
from epruntime.ops import batch_invariant
from epruntime.ops.census import Census
from epruntime.testing import tiny_models

LENGTH = 64
#: What `make test` runs: forms that few share, and families published with such frequencies.
SLICE = ("cohere2_moe", "deepseek_v2", "deepseek_v4", "gpt_oss", "laguna", "minimax_m2", "mixtral", "phimoe")
TYPES = [pytest.param(t, marks=() if t in SLICE else pytest.mark.full) for t in tiny_models.distinct(COVERED)]


@pytest.fixture
def own_ops() -> Iterator[None]:
    batch_invariant.install()
    yield
    batch_invariant.uninstall()


def _parameters(kind: str, old: dict[str, Any], size: int) -> dict[str, Any]:
    kept = {k: v for k, v in old.items() if k.startswith(("rope_theta", "partial", "mrope"))}
    if kind == "dynamic":
        return {**kept, "rope_type": kind, "factor": 4.0}
    short, long = ([start + step * i for i in range(size)] for start, step in ((1.0, 0.02), (2.0, 0.3)))
    mscales = {"short_mscale": 1.1, "long_mscale": 1.3}
    return {
        **kept,
        **mscales,
        "rope_type": kind,
        "short_factor": short,
        "long_factor": long,
        "factor": 4.0,
        "original_max_position_embeddings": LENGTH,
    }


def _rotary(model: torch.nn.Module) -> list[Any]:
    return [m for m in model.modules() if isinstance(getattr(m, "rope_type", None), str | dict)]


def _model(model_type: str, kind: str) -> Any:
    """The module tree of a type with frequencies of a kind in all layers; skips what transformers does not build."""
    config = small_config(model_type)
    try:
        rotary = _rotary(adapter.build_meta_model(config, torch.float32))
        if not rotary:
            pytest.skip("no rotary embedding")
        kinds, old = rotary[0].rope_type, config.rope_parameters
        if isinstance(kinds, dict):
            sizes = {layer: getattr(rotary[0], f"{layer}_inv_freq").numel() for layer in kinds}
            new = {**old, **{layer: _parameters(kind, old[layer], size) for layer, size in sizes.items()}}
        else:
            new = _parameters(kind, old, rotary[0].inv_freq.numel())
        config = small_config(
            model_type, rope_parameters=new, max_position_embeddings=LENGTH if kind == "dynamic" else 512
        )
        return adapter.build_meta_model(config, torch.float32)
    except Exception as error:  # noqa: BLE001 (a class of the library raises what it likes)
        pytest.skip(f"transformers itself does not: {type(error).__name__}: {str(error)[:200]}")


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
@pytest.mark.parametrize("model_type", TYPES)
def test_every_family_of_both_kinds(model_type: str, kind: str) -> None:
    """`wrap` compares rows with transformers; a family whose embedding had another form would be refused."""
    model = _model(model_type, kind)
    wrapped = rope.wrap(model)
    assert len(wrapped) == len(_rotary(model)) > 0
    dynamic = kind == "dynamic" and model_type != "phimoe"
    rule = RopeLengths(longest_original=LENGTH, every_length=dynamic, recompute=model_type == "phimoe")
    assert rope.lengths_of(wrapped, where="here") == rule
    assert rope.longest_sequence(model.config) == (4 * LENGTH if kind == "dynamic" else 512)


def _served(kind: str) -> tuple[rope.RotaryByLength, Any, Any]:
    """(wrapped, its module with real numbers, a module of transformers' own)."""
    config = _model("mixtral", kind).config
    module = type(_rotary(_model("mixtral", kind))[0])(config)
    original = copy.deepcopy(module)
    wrapped = rope.RotaryByLength(module, "rotary_emb")
    wrapped.check()
    return wrapped, module, original


def _batch(sequences: list[tuple[int, int, int]], padding: int = 0) -> ForwardBatch:
    """Of (prompt, first position, rows) each."""
    positions = [p for _, first, rows in sequences for p in range(first, first + rows)] + [0] * padding
    starts = [0]
    for _, _, rows in sequences:
        starts.append(starts[-1] + rows)
    unused = torch.zeros(1, dtype=torch.int32)
    return ForwardBatch(
        input_ids_T=torch.zeros(len(positions), dtype=torch.int64),
        positions_T=torch.tensor(positions),
        slots_T=unused,
        query_starts_S1=torch.tensor(starts, dtype=torch.int32),
        seq_lens_S=unused,
        block_tables_SB=unused,
        logits_rows_N=unused,
        num_tokens=starts[-1],
        rope_lens_S=torch.tensor([prompt for prompt, _, _ in sequences], dtype=torch.int32),
    )


def _rows(wrapped: rope.RotaryByLength, module: Any, batch: ForwardBatch) -> torch.Tensor:
    wrapped.serve(SimpleNamespace(current=batch))  # type: ignore[arg-type]
    return torch.cat(module(torch.zeros(1, 1, 1), batch.positions_T[None]), dim=-1)[0]


@pytest.mark.usefixtures("own_ops")
@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_rows_have_the_bits_that_they_have_alone(kind: str) -> None:
    wrapped, module, _ = _served(kind)
    # whole prompts, chunks of them, single tokens at, below and beyond the length, and one that passes it
    sequences = [
        (LENGTH, 0, 40), (200, 0, 30), (200, 120, 33), (3, LENGTH - 2, 1), (3, LENGTH - 1, 1), (3, LENGTH, 1),
        (3, LENGTH + 1, 1), (LENGTH + 1, 5, 7), (90, 80, 10), (90, 95, 1), (1, 0, 1),
    ]  # fmt: skip
    together = _rows(wrapped, module, _batch(sequences, padding=5))
    row = 0
    for sequence in sequences:
        alone = _rows(wrapped, module, _batch([sequence]))
        assert torch.equal(together[row : row + sequence[2]], alone), sequence
        one = [_rows(wrapped, module, _batch([(sequence[0], sequence[1] + i, 1)])) for i in range(sequence[2])]
        assert torch.equal(torch.cat(one), alone), sequence
        row += sequence[2]


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_a_prompt_and_its_output_as_transformers_has_them(kind: str) -> None:
    wrapped, module, original = _served(kind)
    for prompt in (5, LENGTH - 3, LENGTH, LENGTH + 1, 150):
        theirs = copy.deepcopy(original)
        for first, rows in ((0, prompt), *((prompt + i, 1) for i in range(8))):
            positions = torch.arange(first, first + rows)
            expected = torch.cat(theirs(torch.zeros(1, 1, 1), positions[None]), dim=-1)[0]
            found = _rows(wrapped, module, _batch([(prompt, first, rows)]))
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


@pytest.mark.usefixtures("own_ops")
@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_no_op_depends_on_the_batch(kind: str) -> None:
    wrapped, module, _ = _served(kind)
    batch = _batch([(200, 0, 9), (3, 0, 3), (70, 69, 1)], padding=3)
    with Census() as census:
        _rows(wrapped, module, batch)
    assert not census.unsteady


def test_an_embedding_of_another_form_is_refused() -> None:
    model = _model("mixtral", "longrope")
    (module,) = _rotary(model)

    base = type(module)

    def forward(self: Any, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Scaled by the mean position, which is no length."""
        cos, sin = base.forward(self, x, position_ids)
        return cos * position_ids.float().mean(), sin

    module.__class__ = type("Odd", (base,), {"forward": forward})
    with pytest.raises(UnsupportedModelError, match=r"Odd, longrope.*request by request.*differ"):
        rope.wrap(model)


def test_two_rules_in_one_model_are_refused() -> None:
    config = small_config(
        "mellum",
        layer_types=["sliding_attention", "full_attention"],
        num_hidden_layers=2,
        rope_parameters={
            "full_attention": _parameters("longrope", {"rope_theta": 1e4}, 8),
            "sliding_attention": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
        },
    )
    wrapped = rope.wrap(adapter.build_meta_model(config, torch.float32))
    with pytest.raises(UnsupportedModelError, match="in different ways"):
        rope.lengths_of(wrapped, where="here")


@pytest.mark.parametrize("kind", ["yarn", "linear"])
def test_phi_scales_by_length_with_every_type(kind: str) -> None:
    config = small_config(
        "phimoe", rope_parameters={**_parameters("longrope", {"rope_theta": 1e4}, 8), "rope_type": kind}
    )
    wrapped = rope.wrap(adapter.build_meta_model(config, torch.float32))
    assert rope.lengths_of(wrapped, where="here") == RopeLengths(longest_original=LENGTH, recompute=True)
