"""Loading on a pool: a failure on one rank leaves no model on the others."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from epruntime.comm.identity import RankInfo
from epruntime.config import EngineConfig
from epruntime.engine.model_group import ModelGroup
from epruntime.errors import CheckpointError, ProtocolError, RankLostError
from epruntime.moe.placement import placement_for

INFO = {
    "vocab_size": 8, "num_experts": 6, "expert_bytes": [[6, 100], [4, 100], [6, 100]], "index_heads": 0,
    "eos_warning": "",
}  # fmt: skip
LOADED = {
    "info": INFO, "max_model_len": 16, "experts_backend": "reference", "num_kv_blocks": 4, "load_report": {},
    "placements": {str(experts): placement_for(experts, 2).fingerprint for experts in (4, 6)},
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


def _load(pool: FakePool, **options: Any) -> ModelGroup:
    config = EngineConfig.from_kwargs(model="m", expert_parallel_size=len(pool.ranks), **options)
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
    pool = FakePool(*(FakeRank(i, {**LOADED, "load_report": {"local_experts": 1 - i}}) for i in (0, 1)))
    _load(pool)
    assert "1 of 2 ranks own no experts" in caplog.text


@pytest.mark.parametrize(("heads", "warned"), [(0, False), (1, True), (15, True), (16, False)])
def test_few_index_heads_are_warned_about_once(heads: int, warned: bool, caplog: pytest.LogCaptureFixture) -> None:
    loaded = {**LOADED, "info": {**INFO, "index_heads": heads}}
    _load(FakePool(FakeRank(0, loaded), FakeRank(1, loaded)))
    assert caplog.text.count(f"index_n_heads={heads} ") == warned


def test_end_of_sequence_ids_that_never_come_are_warned_about_once(caplog: pytest.LogCaptureFixture) -> None:
    loaded = {**LOADED, "info": {**INFO, "eos_warning": "config.json names 9"}}
    _load(FakePool(FakeRank(0, LOADED), FakeRank(1, LOADED)))
    assert "docs/sampling.md" not in caplog.text
    _load(FakePool(FakeRank(0, loaded), FakeRank(1, loaded)))
    assert caplog.text.count("config.json names 9 (docs/sampling.md") == 1


def _placed(**options: Any) -> dict[str, Any]:
    """The reply of a rank that places experts as it is told."""
    strategy, redundant = options.get("expert_placement", "linear"), options.get("num_redundant_experts", 0)
    placements = {str(experts): placement_for(experts, 2, strategy, redundant).fingerprint for experts in (4, 6)}
    return {**LOADED, "placements": placements}


@pytest.mark.parametrize("options", [{"expert_placement": "round_robin"}, {"num_redundant_experts": 3}])
def test_a_rank_that_places_experts_otherwise_is_refused(options: dict[str, Any]) -> None:
    told = _placed(**options)
    assert _load(FakePool(FakeRank(0, told), FakeRank(1, told)), **options).ranks
    for other in (LOADED, {**told, "placements": {"6": told["placements"]["6"]}}):
        pool = FakePool(FakeRank(0, told), FakeRank(1, other))
        with pytest.raises(ProtocolError, match=r"rank 1 on host here .*num_redundant_experts=.*install the same"):
            _load(pool, **options)
        assert [rank.calls for rank in pool.ranks] == [["configure", "load", "unload"]] * 2


def test_copies_that_spread_no_load_are_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    told = _placed(num_redundant_experts=5)
    _load(FakePool(FakeRank(0, told), FakeRank(1, told)), num_redundant_experts=5)
    # two ranks with six experts can use six more, those of the layers with four experts four
    assert "num_redundant_experts=5: with 4, each of 2 ranks has all 4 experts" in caplog.text
    assert "all 6 experts" not in caplog.text
