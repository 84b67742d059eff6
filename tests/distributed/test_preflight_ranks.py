"""Preflight on two real ranks: what is found, in time, and before anything is loaded. One pool serves all tests but the
last ones, which lose a rank."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from epruntime.config import EngineConfig
from epruntime.engine import preflight as engine_preflight
from epruntime.engine.async_llm import AsyncLLM
from epruntime.engine.membership import form
from epruntime.engine.preflight import Preflight
from epruntime.errors import PreflightError, RankLostError
from epruntime.launchers.local import LocalLauncher
from epruntime.launchers.pool import RankPool
from epruntime.models.loader import inspect_model
from epruntime.preflight.verdict import Verdict
from epruntime.testing import tiny_models
from epruntime.testing.faulty_preflight import FAULT_FILE
from epruntime.testing.patience import soon

#: preflight of two local ranks takes 0.1 s on an idle machine.
BOUND_S = 3.0


class World:
    """A loop, a model, and two ranks whose fault is in a file."""

    def __init__(self, folder: Path) -> None:
        self.fault_file = folder / "fault"
        self.model = folder / "model"
        _, model = tiny_models.build("mixtral")
        tiny_models.save(model, self.model)
        self.runner = asyncio.Runner()
        self.pool = self.runner.run(self._start())

    def config(self, **options: Any) -> EngineConfig:
        settings = {"expert_parallel_size": 2, "threads_per_rank": 1, "num_kv_blocks": 16, "max_model_len": 64}
        return EngineConfig.from_kwargs(model=str(self.model), **settings | options)

    async def _start(self) -> RankPool:
        launcher = LocalLauncher(entry_module="epruntime.testing.faulty_preflight")
        return await RankPool.start(2, launcher=launcher, threads_per_rank=1, start_timeout_s=90)

    def create(self, **options: Any) -> None:
        """Makes an engine on the pool, and ends it."""

        async def body() -> None:
            llm = await AsyncLLM.create(self.config(**options), rank_pool=self.pool)
            await llm.shutdown()

        self.runner.run(asyncio.wait_for(body(), 120))

    def preflight(self) -> Verdict:
        """Of a start that goes through preflight, or is stopped by it."""

        async def body() -> Verdict:
            config = self.config()
            preflight = Preflight(config, inspect_model(self.model))
            with contextlib.suppress(PreflightError):
                await form(config, self.pool, preflight)
            return preflight.verdict

        return self.runner.run(asyncio.wait_for(body(), 120))

    def progress(self, slot: int) -> str:
        return str(self.pool.ranks[slot].progress)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("ranks")
    os.environ[FAULT_FILE] = str(folder / "fault")
    world = World(folder)
    yield world
    world.runner.run(world.pool.stop())
    world.runner.close()
    del os.environ[FAULT_FILE]


@pytest.fixture
def world(running: World) -> World:
    running.fault_file.write_text("")
    return running


def test_a_start_logs_one_line_and_takes_little_time(world: World, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        world.create()
    (line,) = [r.getMessage() for r in caplog.records if "preflight passed" in r.getMessage()]
    assert "2 ranks on 1 host, gloo; same host:" in line


def test_verdict_of_healthy_ranks(world: World) -> None:
    verdict = world.preflight()
    assert verdict.ok
    assert verdict.seconds < soon(BOUND_S)
    assert verdict.transport == "gloo"
    assert sorted((t.source, t.destination) for t in verdict.times) == [(0, 1), (1, 0)]
    assert all(1e-6 < t.latency_s < soon(0.1) and 1e5 < t.bytes_per_s < 1e12 for t in verdict.times)
    info = inspect_model(world.model)
    for rank in verdict.ranks:
        assert rank.machine.pid == world.pool.ranks[rank.slot].info.pid
        assert (rank.machine.address, rank.machine.interface) == ("127.0.0.1", "lo")
        assert rank.machine.versions == engine_preflight.versions()
        assert rank.machine.threads == 1
        assert rank.machine.checkpoint_files == 1
        assert abs(rank.clock_offset_s) < soon(0.5)  # one clock, and the way there and back
        assert rank.need.weights < info.checkpoint_bytes
        assert rank.need.kv == 16 * info.kv_bytes_per_block(16)


@pytest.mark.parametrize(
    ("fault", "id", "slots"),
    [
        ("order", "exchange-order", {0, 1}),
        ("bits", "exchange-bits", {0, 1}),
        ("bits 1", "exchange-bits", {1}),  # in the last row that it receives, which is its own
        ("counts 0", "exchange-counts", {0, 1}),
        ("old-transformers 1", "versions-differ", {1}),
        ("other-checkpoint 1", "checkpoint-differs", {1}),
        ("little-memory", "memory-short", {0, 1}),
        ("few-files 0", "open-files-low", {0}),
        ("closed-port 1", "unreachable", {0, 1}),
    ],
)
def test_an_error_stops_the_start_before_anything_is_loaded(world: World, fault: str, id: str, slots: set[int]) -> None:
    world.fault_file.write_text(fault)
    with pytest.raises(PreflightError, match=rf"preflight failed.*\n.*error: {id} .*Remedy: ") as caught:
        world.create()
    found = [finding for finding in caught.value.verdict.errors if finding.id == id]
    assert {slot for finding in found for slot in finding.slots} == slots
    assert caught.value.verdict.seconds < soon(BOUND_S)
    assert not any("load" in world.progress(slot) for slot in (0, 1))


def test_a_warning_lets_the_start_go_on(world: World, caplog: pytest.LogCaptureFixture) -> None:
    world.fault_file.write_text("clock")
    world.create()
    (line,) = [r.getMessage() for r in caplog.records if "clock-skew" in r.getMessage()]
    assert "its clock is 1e+02 s ahead of" in line or "its clock is 100 s ahead of" in line


def test_without_preflight_nothing_is_looked_at(world: World, caplog: pytest.LogCaptureFixture) -> None:
    world.fault_file.write_text("order")
    with caplog.at_level(logging.INFO):
        world.create(preflight=False)
    assert not [record for record in caplog.records if "preflight" in record.name]


def test_ranks_are_of_use_after_a_failed_preflight(world: World) -> None:
    world.fault_file.write_text("bits")
    assert not world.preflight().ok
    world.fault_file.write_text("")
    world.create()


def test_a_rank_that_stands_still_is_named_in_time(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_preflight, "ANSWER_S", 2.0)
    world.fault_file.write_text("stuck 1")
    began = time.monotonic()
    with pytest.raises(RankLostError, match=r"preflight \(exchange\) within 2 s") as caught:
        world.create()
    assert caught.value.slot == 1
    assert time.monotonic() - began < soon(2 + 10)
    world.runner.run(world.pool.replace(1, timeout_s=60))


def test_a_rank_that_dies_is_named_at_once(world: World) -> None:
    """Rank 0 goes on, and waits in the exchange for a moment."""
    world.fault_file.write_text("dies 1")
    began = time.monotonic()
    with pytest.raises(RankLostError, match="exit code 9") as caught:
        world.create()
    assert caught.value.slot == 1
    assert time.monotonic() - began < soon(10)


def test_the_command_prints_json_and_exits_with_1_on_errors(world: World) -> None:
    """A KV cache that no machine has room for."""
    command = [sys.executable, "-m", "epruntime.cli", "preflight", str(world.model), "--expert-parallel-size", "2"]
    done = subprocess.run(
        [*command, "--num-kv-blocks", str(10**12), "--json"], capture_output=True, text=True, timeout=90
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    verdict = json.loads(done.stdout)
    assert not verdict["ok"]
    assert [(f["id"], f["slots"]) for f in verdict["findings"] if f["severity"] == "error"] == [
        ("memory-short", [0, 1])
    ]
    assert verdict["transport"] == ""  # it was not tried
