"""Loading on a pool: a failure on one rank leaves no model on the others."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from epruntime.comm.identity import RankInfo
from epruntime.config import EngineConfig
from epruntime.engine.model_group import ModelGroup
from epruntime.errors import CheckpointError, RankLostError

LOADED = {
    "info": {"vocab_size": 8}, "max_model_len": 16, "experts_backend": "reference", "num_kv_blocks": 4,
    "load_report": {},
}  # fmt: skip


class FakeRank:
    def __init__(self, slot: int, load: dict[str, Any] | Exception) -> None:
        self.info = RankInfo(slot=slot, host="here")
        self.calls: list[str] = []
        self._load = load
        self.lost = load if isinstance(load, RankLostError) else None

    def call(self, type: str, timeout_s: float | None = None, **body: Any) -> asyncio.Future[dict[str, Any]]:
        self.calls.append(type)
        future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        if type == "load" and isinstance(self._load, Exception):
            future.set_exception(self._load)
        else:
            future.set_result({"configure": {"transport": "gloo"}, "load": self._load}.get(type, {}))
        return future


class FakePool:
    def __init__(self, *ranks: FakeRank) -> None:
        self.ranks = list(ranks)
        self.store_address = ("127.0.0.1", 1)

    def next_generation(self) -> int:
        return 7


def _load(pool: FakePool) -> ModelGroup:
    config = EngineConfig.from_kwargs(model="m", expert_parallel_size=len(pool.ranks))
    return asyncio.run(ModelGroup.load(config, pool))  # type: ignore[arg-type]


def test_a_load_that_fails_on_one_rank_is_undone_on_all() -> None:
    pool = FakePool(FakeRank(0, LOADED), FakeRank(1, CheckpointError("damaged")))
    with pytest.raises(CheckpointError, match="damaged"):
        _load(pool)
    assert [rank.calls for rank in pool.ranks] == [["configure", "load", "unload"]] * 2


def test_a_lost_rank_is_not_asked_anything_more() -> None:
    pool = FakePool(FakeRank(0, LOADED), FakeRank(1, RankLostError(slot=1, host="here", detail="killed")))
    with pytest.raises(RankLostError, match="killed"):
        _load(pool)
    assert [rank.calls for rank in pool.ranks] == [["configure", "load"]] * 2


def test_what_the_ranks_said_is_kept() -> None:
    group = _load(FakePool(FakeRank(0, LOADED), FakeRank(1, {**LOADED, "num_kv_blocks": 3})))
    assert (group.generation, group.transport, group.num_kv_blocks) == (7, "gloo", [4, 3])


def test_ranks_without_experts_are_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    info = {"vocab_size": 8, "num_experts": 1}
    pool = FakePool(*(FakeRank(i, {**LOADED, "info": info, "load_report": {"local_experts": 1 - i}}) for i in (0, 1)))
    _load(pool)
    assert "1 of 2 ranks own no experts" in caplog.text
