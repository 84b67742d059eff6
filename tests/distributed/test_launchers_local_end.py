"""Ends of local ranks: really killed, by themselves, with their pool or its process; nothing left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time

import pytest
from deaths import until
from leftovers import is_alive, wait_dead
from local_pool import nothing_left, pool_of, run  # noqa: F401  a fixture of this module

from epruntime.errors import EngineDeadError, RankLostError
from epruntime.launchers import rank_end
from epruntime.testing.patience import PATIENCE_S, soon


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("SIGKILL", "killed by SIGKILL"),
        ("exit", "exit code 7"),
        ("hang up", "left the control channel .* while its process was running; killed"),
    ],
)
def test_a_lost_rank_fails_its_calls_once_with_the_reason(how, expected, caplog):
    async def body():
        async with pool_of(2) as pool:
            rank, other = pool.ranks
            pid = rank.info.pid
            lost: list[RankLostError] = []
            pool.on_lost(lost.append)
            pool.on_lost(lambda error: 1 / 0)  # a bad callback hurts nobody
            gone: list[RankLostError] = []
            pool.on_lost(gone.append)()  # taken back
            await rank.call("print", timeout_s=PATIENCE_S, text="my last\nwords\n")
            began = time.monotonic()
            if how == "SIGKILL":
                pending = [rank.call("sleep", seconds=60), rank.call("echo")]
                await asyncio.sleep(0.1)
                os.kill(pid, signal.SIGKILL)
            else:
                pending = [rank.call(how, code=7), rank.call("echo")]
            for call in pending:
                with pytest.raises(RankLostError, match=f"rank 0 on host .* is lost: .*{expected}") as caught:
                    await asyncio.wait_for(call, PATIENCE_S)
            assert time.monotonic() - began < soon(5)
            assert caught.value.slot == 0
            assert "\n" not in str(caught.value)  # one line for whoever waited; what it printed is for the log
            assert "words" not in str(caught.value)
            assert "last words:\n  my last\n  words" in caplog.text
            assert "unanswered: '" in caught.value.detail
            with pytest.raises(RankLostError):
                await rank.call("echo")
            await asyncio.sleep(0.1)
            assert len(lost) == 1
            assert not gone
            assert not is_alive(pid)
            late: list[RankLostError] = []
            pool.on_lost(late.append)  # news for the late comer
            assert (await other.call("echo", timeout_s=PATIENCE_S, data=1))["data"] == 1
            await until(lambda: late == lost, "told")
        assert len(lost) == 1  # the other rank was stopped, not lost

    run(body())


def test_what_a_rank_started_ends_with_it():
    async def body():
        async with pool_of(1) as pool:
            child = (await pool.ranks[0].call("have a child", timeout_s=PATIENCE_S))["pid"]
            assert is_alive(child)
            os.kill(pool.ranks[0].info.pid, signal.SIGKILL)
            assert not await asyncio.to_thread(wait_dead, [child])

    run(body())


def test_stop_ends_stopped_and_stubborn_ranks(monkeypatch):
    monkeypatch.setattr(rank_end, "_LEAVE_S", 0.3)
    monkeypatch.setattr(rank_end, "_TERMINATE_S", 0.3)

    async def body():
        async with pool_of(3) as pool:
            pids = [rank.info.pid for rank in pool.ranks]
            await pool.ranks[0].call("be stubborn", timeout_s=PATIENCE_S)
            os.kill(pids[1], signal.SIGSTOP)
            pending = pool.ranks[1].call("echo")
            began = time.monotonic()
            await asyncio.gather(pool.stop(), pool.stop())
            await pool.stop()
            assert time.monotonic() - began < soon(5)
            assert [pid for pid in pids if is_alive(pid)] == []
            with pytest.raises(EngineDeadError, match="pool was stopped"):
                await pending
            with pytest.raises(EngineDeadError, match="pool was stopped"):
                await pool.ranks[2].call("echo")

    run(body())


COORDINATOR = """
import asyncio, sys, threading
from epruntime.launchers.local import LocalLauncher
from epruntime.launchers.pool import RankPool
from epruntime.launchers.store import host_store

async def main():
    pool = await RankPool.start(2, launcher=LocalLauncher(entry_module="epruntime.testing.echo_rank"))
    pool.on_lost(lambda error: print("LOST", error, flush=True))
    busy = pool.ranks[1].call("sleep", seconds=60)  # one rank idle, one deep in work
    print(*[rank.info.pid for rank in pool.ranks], flush=True)
    try:
        await asyncio.Event().wait()
    finally:
        await pool.stop()
        print("stopped", flush=True)

thread = threading.Thread(target=lambda: asyncio.run(main()))
if len(sys.argv) > 1:
    thread.start(); thread.join()
else:
    try:
        asyncio.run(main())
    except KeyboardInterrupt:
        pass
"""


def coordinator(*arguments: str) -> tuple[subprocess.Popen, list[int]]:
    process = subprocess.Popen(
        [sys.executable, "-c", COORDINATOR, *arguments], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    pids = [int(word) for word in process.stdout.readline().split()]
    assert len(pids) == 2
    return process, pids


@pytest.mark.parametrize("arguments", [(), ("in a thread",)])
def test_no_rank_and_no_file_outlives_a_killed_coordinator(arguments):
    process, pids = coordinator(*arguments)
    with process:
        os.kill(pids[0], signal.SIGSTOP)  # not even one that can do nothing for itself
        process.kill()
    assert wait_dead(pids) == []


def test_ctrl_c_in_the_terminal_is_the_coordinators_to_handle():
    """The whole foreground group gets SIGINT; ranks are not in it, and end because the coordinator says so."""
    process, pids = coordinator()
    with process:
        assert os.getpgid(pids[0]) != os.getpgid(process.pid)
        os.killpg(process.pid, signal.SIGINT)
        out, _ = process.communicate(timeout=PATIENCE_S)
    assert out.split() == ["stopped"]
    assert process.returncode == 0
    assert wait_dead(pids) == []
