"""A slot of a pool that is filled again; and a coordinator that was itself held up blames nobody."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from dataclasses import replace

import pytest
from deaths import until
from leftovers import Leftovers, is_alive
from local_pool import ENTRY, nothing_left, run  # noqa: F401  a fixture of this module

from epruntime.comm.control import ControlClient, RankBootstrap
from epruntime.errors import EngineDeadError, HandshakeError, LaunchError, RankLostError
from epruntime.launchers.local import LocalLauncher
from epruntime.launchers.pool import RankPool
from epruntime.testing.echo_rank import ABSENT_VARIABLE
from epruntime.testing.patience import PATIENCE_S, soon


class Recorder(LocalLauncher):
    """Keeps the letters that ranks were started with."""

    def __init__(self) -> None:
        super().__init__(entry_module=ENTRY)
        self.letters: list[RankBootstrap] = []

    async def spawn(self, bootstrap):
        self.letters.append(bootstrap)
        return await super().spawn(bootstrap)


@contextlib.asynccontextmanager
async def pool_of(num_ranks: int = 2, **options):
    pool = await RankPool.start(num_ranks, launcher=Recorder(), **options)
    try:
        yield pool
    finally:
        await pool.stop()


def test_a_lost_slot_is_filled_again_and_again():
    async def body():
        async with pool_of(3) as pool:
            lost: list[RankLostError] = []
            pool.on_lost(lost.append)
            for incarnation in (1, 2):
                old = [pool.ranks[slot] for slot in (0, 2)]
                for rank in old:
                    os.kill(rank.info.pid, signal.SIGKILL)
                await asyncio.wait_for(asyncio.gather(*(rank.gone for rank in old)), PATIENCE_S)
                new = await asyncio.gather(*(pool.replace(slot, timeout_s=30) for slot in (0, 2)))
                assert new == [pool.ranks[0], pool.ranks[2]]
                for rank, before in zip(new, old, strict=True):
                    assert (rank.info.slot, rank.info.incarnation) == (before.info.slot, incarnation)
                    assert rank.info.pid != before.info.pid
                    assert (await rank.call("echo", 10, data=incarnation))["data"] == incarnation
                    with pytest.raises(RankLostError, match="killed by SIGKILL"):
                        await before.call("echo")
                assert Leftovers.now().files == frozenset(), "the door is closed again"
                assert not pool._server._servers
            assert pool.ranks[1].info.incarnation == 0
            assert len(lost) == 4

    run(body())


def test_one_that_lives_is_killed_first():
    async def body():
        async with pool_of(1) as pool:
            old = pool.ranks[0]
            os.kill(old.info.pid, signal.SIGSTOP)
            await pool.replace(0, timeout_s=30)
            assert not is_alive(old.info.pid)
            assert "it is being replaced; killed" in str(old.lost)

    run(body())


def test_a_late_rank_of_an_earlier_incarnation_is_refused_and_harms_nobody():
    async def body():
        async with pool_of(1) as pool:
            early = pool._launcher.letters[0]
            os.kill(pool.ranks[0].info.pid, signal.SIGKILL)
            await asyncio.wait_for(pool.ranks[0].gone, PATIENCE_S)
            async with pool._door.open() as address:
                replacing = asyncio.create_task(pool.replace(0, timeout_s=30))
                while len(pool._launcher.letters) < 2:
                    await asyncio.sleep(0.01)
                late = replace(early, address=address)
                signature = {"extension": "same"}
                with pytest.raises(HandshakeError, match="old incarnation 0 of slot 0: this pool expects 1"):
                    await asyncio.to_thread(ControlClient.connect, late, signature=signature)
                rank = await replacing
            assert (await rank.call("echo", 10, data=1))["data"] == 1

    run(body())


def test_a_replacement_that_does_not_start_leaves_the_slot_lost(monkeypatch):
    async def body():
        async with pool_of(2) as pool:
            os.kill(pool.ranks[1].info.pid, signal.SIGKILL)
            await asyncio.wait_for(pool.ranks[1].gone, PATIENCE_S)
            monkeypatch.setenv(ABSENT_VARIABLE, "1")
            with pytest.raises(LaunchError, match=r"(?s)rank 1 on host .* ended during start: exit code 3"):
                await pool.replace(1, timeout_s=30)
            monkeypatch.setenv(ABSENT_VARIABLE, "1:wait")
            with pytest.raises(LaunchError, match=r"rank 1 on host .* did not join within 2 s"):
                await pool.replace(1, timeout_s=2)
            with pytest.raises(RankLostError, match="did not start again"):
                await pool.ranks[1].call("echo")
            task = asyncio.create_task(pool.replace(1, timeout_s=30))
            await asyncio.sleep(0.3)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            monkeypatch.delenv(ABSENT_VARIABLE)
            rank = await pool.replace(1, timeout_s=30)
            assert rank.info.incarnation == 4
            assert (await rank.call("echo", 10, data=1))["data"] == 1
        with pytest.raises(EngineDeadError, match="pool was stopped"):
            await pool.replace(1, timeout_s=30)

    run(body())


def test_silence_is_the_ranks_and_not_the_coordinators():
    async def body():
        async with pool_of(2, heartbeat_timeout_s=1.5) as pool:
            await asyncio.sleep(0.3)
            began = time.monotonic()
            time.sleep(3)  # noqa: ASYNC251 - the loop is held up, and hears nothing
            for rank in pool.ranks:
                assert (await rank.call("echo", 10, data=1))["data"] == 1
            await asyncio.sleep(0.7)
            await until(lambda: max(rank.progress.silent_s for rank in pool.ranks) < 1.5, "heard again")
            assert [rank.lost for rank in pool.ranks] == [None, None]
            began = time.monotonic()
            os.kill(pool.ranks[0].info.pid, signal.SIGSTOP)
            await asyncio.wait_for(pool.ranks[0].gone, PATIENCE_S)
            assert 1.2 < time.monotonic() - began < soon(8)
            assert "no heartbeat for" in str(pool.ranks[0].lost)
            assert pool.ranks[1].lost is None

    run(body())


def test_the_stamp_of_a_dead_rank_tells_what_it_did_last():
    async def body():
        async with pool_of(1) as pool:
            rank = pool.ranks[0]
            call = rank.call("sleep", seconds=60)
            await until(lambda: getattr(rank.progress.stamp, "note", "") == "sleep", "a beat says what it does")
            os.kill(rank.info.pid, signal.SIGKILL)
            with pytest.raises(
                RankLostError, match=r"killed by SIGKILL; last progress \d\.\d s ago: step \d+ \(sleep\)"
            ):
                await asyncio.wait_for(call, PATIENCE_S)

    run(body())
