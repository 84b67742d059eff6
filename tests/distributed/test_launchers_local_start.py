"""Starts of local ranks that fail or are taken back: named, at once, and nothing left behind."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest
from leftovers import is_alive
from local_pool import ENTRY, nothing_left, run  # noqa: F401  a fixture of this module

from epruntime.errors import ConfigError, HandshakeError, LaunchError
from epruntime.launchers import pool as pool_module
from epruntime.launchers.local import LocalLauncher
from epruntime.launchers.pool import RankPool
from epruntime.testing.echo_rank import ABSENT_VARIABLE, SIGNATURE_VARIABLE
from epruntime.testing.patience import soon


def test_unequal_builds_are_refused_by_name(monkeypatch):
    monkeypatch.setenv(SIGNATURE_VARIABLE, "1:other")

    async def body():
        with pytest.raises(HandshakeError, match=r"rank \d on host .* and rank \d on host .*'(same|other)' against"):
            await RankPool.start(3, launcher=LocalLauncher(entry_module=ENTRY), start_timeout_s=30)

    run(body())


def test_a_rank_that_ends_during_start(monkeypatch):
    monkeypatch.setenv(ABSENT_VARIABLE, "1")

    async def body():
        began = time.monotonic()
        with pytest.raises(LaunchError, match=r"(?s)rank 1 on .* ended during start: exit code 3.*told not to join"):
            await RankPool.start(2, launcher=LocalLauncher(entry_module=ENTRY), start_timeout_s=60)
        assert time.monotonic() - began < soon(30)

    run(body())


def test_a_rank_that_never_joins_is_named(monkeypatch):
    monkeypatch.setenv(ABSENT_VARIABLE, "1:wait")
    monkeypatch.setattr(pool_module, "_PLACE_GRACE_S", 0)

    async def body():
        with pytest.raises(LaunchError, match=r"(?s)1 of 2 ranks did not join within 4 s.*rank 1 on host .*running"):
            await RankPool.start(2, launcher=LocalLauncher(entry_module=ENTRY), start_timeout_s=4)

    run(body())


def test_a_module_that_is_not_there():
    async def body():
        with pytest.raises(LaunchError, match=r"(?s)exit code 1.*No module named epruntime.nowhere"):
            await RankPool.start(1, launcher=LocalLauncher(entry_module="epruntime.nowhere"))

    run(body())


def test_bad_settings():
    async def body():
        with pytest.raises(ConfigError, match="num_ranks=0"):
            await RankPool.start(0)
        with pytest.raises(ConfigError, match="launcher='slurm'"):
            await RankPool.start(1, launcher="slurm")

    run(body())


@pytest.mark.parametrize("delay", [0.0, 0.02, 0.1, 0.3, 0.6, 1.0])
def test_a_cancelled_start_leaves_nothing(delay):
    async def body():
        task = asyncio.create_task(RankPool.start(2, launcher=LocalLauncher(entry_module=ENTRY)))
        await asyncio.sleep(delay)
        task.cancel()
        try:
            pool = await task
        except asyncio.CancelledError:
            return
        await pool.stop()

    run(body())


def test_a_start_cancelled_while_a_process_is_being_made(monkeypatch):
    started, made = [], threading.Event()
    real = LocalLauncher._start

    def slowly(self, letter):
        started.append(real(self, letter))
        made.set()
        time.sleep(0.5)
        return started[0]

    monkeypatch.setattr(LocalLauncher, "_start", slowly)

    async def body():
        task = asyncio.create_task(RankPool.start(1, launcher=LocalLauncher(entry_module=ENTRY)))
        await asyncio.to_thread(made.wait, 30)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not is_alive(started[0].pid)

    run(body())


def test_whatever_a_launcher_raises_ends_the_start_at_once():
    class Broken(LocalLauncher):
        async def spawn(self, bootstrap):
            raise RuntimeError("boom")

    began = time.monotonic()
    with pytest.raises(LaunchError, match=r"rank 0 on host .* could not be started: RuntimeError: boom"):
        run(RankPool.start(1, launcher=Broken(), start_timeout_s=60))
    assert time.monotonic() - began < soon(20)
