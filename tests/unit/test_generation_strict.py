"""A rank under invariance=strict: row-independent ops while a model is loaded, and a word about other ops."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from epruntime.comm.progress import Stamps
from epruntime.errors import CheckpointError
from epruntime.ops import batch_invariant
from epruntime.testing import tiny_models
from epruntime.worker.generation import Generation, ServedModel
from epruntime.worker.letters import Configure, Load

STRICT = Configure(
    generation=1,
    ep_rank=0,
    world_size=1,
    store_host="127.0.0.1",
    store_port=0,
    hosts=("here",),
    transport="local",
    experts_backend="auto",
    invariance="strict",
    exchange_budget_tokens=64,
    step_timeout_s=60.0,
)


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    assert not batch_invariant.installed()
    yield
    batch_invariant.uninstall()


def _load(config: Configure, path: Path) -> ServedModel:
    letter = Load(
        model=str(path),
        dtype="float32",
        max_model_len=64,
        block_size=4,
        num_kv_blocks=32,
        kv_cache_memory_bytes=None,
        max_num_seqs=4,
        max_num_batched_tokens=32,
    )
    return Generation(config, stamps=Stamps()).load(letter, lambda *_: None)


def _saved(model_type: str, path: Path) -> Path:
    return tiny_models.save(tiny_models.build(model_type)[1], path)


def _multiplies_by_parts() -> bool:
    """Are products of complex numbers put together from real ones now?"""
    x = torch.ones(3, dtype=torch.complex64)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        x * x
    return any(event.key == "aten::complex" for event in profile.key_averages())


def test_strict_installs_and_takes_back(tmp_path: Path) -> None:
    path = _saved("mixtral", tmp_path)
    served = _load(STRICT, path)
    assert batch_invariant.installed()
    assert served.unsteady_ops == ()
    assert served.stats()["unsteady_ops"] == []
    assert not _multiplies_by_parts(), "mixtral multiplies no complex numbers, and pays for none"
    assert not served.moe.context.probe
    served.close()
    assert not batch_invariant.installed()


def test_fast_does_not_install_and_takes_back_what_was(tmp_path: Path) -> None:
    path = _saved("mixtral", tmp_path)
    batch_invariant.install()
    served = _load(dataclasses.replace(STRICT, invariance="fast"), path)
    assert not batch_invariant.installed()
    served.close()


def test_complex_products_are_replaced_where_a_model_has_some(tmp_path: Path) -> None:
    served = _load(STRICT, _saved("deepseek_v2", tmp_path))
    assert _multiplies_by_parts()
    assert served.unsteady_ops == ()
    served.close()


def test_a_failed_load_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "mixtral"}')
    with pytest.raises(CheckpointError):
        _load(STRICT, tmp_path)
    assert not batch_invariant.installed()


def test_an_op_outside_the_table_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(batch_invariant, "EXACT", batch_invariant.EXACT - {"embedding"})
    with caplog.at_level(logging.WARNING, logger="epruntime.worker.generation"):
        served = _load(STRICT, _saved("mixtral", tmp_path))
    assert served.stats()["unsteady_ops"] == ["embedding"]
    assert "mixtral" in caplog.text
    assert "embedding" in caplog.text
    served.close()
