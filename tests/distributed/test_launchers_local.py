"""RankPool over local processes: real processes, really killed, and nothing left behind."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil
import pytest
from deaths import until
from leftovers import Leftovers, is_alive, wait_dead

from epruntime.errors import (
    ConfigError,
    EngineDeadError,
    HandshakeError,
    LaunchError,
    ProtocolError,
    RankLostError,
    UnsupportedModelError,
)
from epruntime.launchers import door as door_module
from epruntime.launchers import pool as pool_module
from epruntime.launchers import rank_end
from epruntime.launchers.cores import threads_each, usable_cores
from epruntime.launchers.local import LocalLauncher, exit_text
from epruntime.launchers.pool import RankPool
from epruntime.launchers.store import host_store
from epruntime.testing.echo_rank import ABSENT_VARIABLE, SIGNATURE_VARIABLE
from epruntime.testing.patience import PATIENCE_S, soon

ENTRY = "epruntime.testing.echo_rank"


def run(coroutine, seconds: float = 240) -> None:
    asyncio.run(asyncio.wait_for(coroutine, seconds))


@contextlib.asynccontextmanager
async def pool_of(num_ranks: int = 2, **options):
    pool = await RankPool.start(num_ranks, launcher=LocalLauncher(entry_module=ENTRY), **options)
    try:
        yield pool
    finally:
        await pool.stop()


@pytest.fixture(autouse=True)
def nothing_left(tmp_path_factory, monkeypatch):
    """Every test has a temporary folder of its own, and leaves nothing in it or elsewhere."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("t")))
    monkeypatch.setenv("TMPDIR", tempfile.tempdir)
    host_store("127.0.0.1")  # what a first use opens for good is no leak
    before = Leftovers.now()
    yield
    assert before.grown_by() == {}


def test_start_talk_stop(caplog):
    async def body():
        async with pool_of(3, threads_per_rank=2) as pool:
            assert [rank.info.slot for rank in pool.ranks] == [0, 1, 2]
            assert [rank.info.local_rank for rank in pool.ranks] == [0, 1, 2]
            assert len({rank.info.pid for rank in pool.ranks}) == 3
            # answers find their questions
            questions = [(slot, n) for n in range(20) for slot in range(3)]
            replies = await asyncio.gather(
                *(pool.ranks[q[0]].call("echo", timeout_s=PATIENCE_S, data=q) for q in questions)
            )
            assert [tuple(reply["data"]) for reply in replies] == questions
            who = await pool.ranks[1].call("whoami", timeout_s=PATIENCE_S)
            assert who["pid"] == pool.ranks[1].info.pid
            assert who["sid"] == who["pid"]  # own session
            assert who["threads"] == 2
            assert {who["environment"][name] for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")} == {"2"}
            # the door is closed: neither file nor listener
            assert Leftovers.now().files == frozenset()
            assert not pool._server._servers

    with caplog.at_level(logging.INFO):
        run(body())
    assert any("3 ranks are up (local)" in record.getMessage() for record in caplog.records)


def test_secret_is_in_no_argument_environment_or_log(caplog):
    async def body():
        async with pool_of(1) as pool:
            who = await pool.ranks[0].call("whoami", timeout_s=PATIENCE_S)
            text = repr(who["argv"]) + repr(who["environment"]) + repr(pool.ranks)
            for record in caplog.records:
                text += record.getMessage()
            for form in (pool._secret.hex(), repr(pool._secret)[2:-1], repr(list(pool._secret))):
                assert form not in text

    with caplog.at_level(logging.DEBUG):
        run(body())


def test_the_socket_lies_in_a_private_directory(monkeypatch):
    modes = []
    real = door_module.private_directory

    def spy():
        directory = real()
        modes.append(stat.S_IMODE(Path(directory.name).stat().st_mode))
        return directory

    monkeypatch.setattr(door_module, "private_directory", spy)

    async def body():
        async with pool_of(1):
            pass

    run(body())
    assert modes == [0o700]


def test_a_long_temporary_path_is_no_obstacle(monkeypatch, tmp_path):
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))

    async def body():
        async with pool_of(1) as pool:
            await pool.ranks[0].call("echo", timeout_s=PATIENCE_S)

    run(body())


def test_store_is_hosted_here_and_on_loopback_only():
    async def body():
        async with pool_of(1) as pool:
            from torch.distributed import TCPStore

            host, port = pool.store_address
            assert host == "127.0.0.1"
            store = await asyncio.to_thread(TCPStore, host, port, is_master=False)
            store.set("a", "b")
            assert pool._store.result()[0].get("a") == b"b"
            listening = {
                c.laddr.ip
                for c in psutil.Process().net_connections("tcp")
                if c.status == "LISTEN" and c.laddr.port == port
            }
            assert listening == {"127.0.0.1"}

    run(body())


def test_progress_and_errors():
    async def body():
        async with pool_of(1) as pool:
            (rank,) = pool.ranks
            seen = []
            await rank.call("progress", timeout_s=PATIENCE_S, total=3, on_progress=lambda m: seen.append(m["done"]))
            assert seen == [0, 1, 2]
            await rank.call("progress", timeout_s=PATIENCE_S, total=1)  # nobody listens
            await rank.call(
                "progress", timeout_s=PATIENCE_S, total=1, on_progress=lambda m: 1 / 0
            )  # the listener fails
            with pytest.raises(UnsupportedModelError, match=r"rank 0 on host .*, test: dense") as refused:
                await rank.call("fail", kind="refused")
            assert "Traceback on rank 0" in refused.value.__notes__[0]
            with pytest.raises(EngineDeadError, match="ValueError: oops"):
                await rank.call("fail", kind="foreign")
            with pytest.raises(ProtocolError, match="cannot be packed"):
                await rank.call("echo", data=object())
            await rank.call("echo", timeout_s=PATIENCE_S)  # and it still works

    run(body())


def test_timeout_and_cancel_leave_the_rank_usable():
    async def body():
        async with pool_of(1) as pool:
            (rank,) = pool.ranks
            lost = []
            pool.on_lost(lost.append)
            began = time.monotonic()
            slow = rank.call("sleep", timeout_s=0.2, seconds=2)
            with pytest.raises(RankLostError, match=r"did not answer 'sleep' within 0.2 s"):
                await slow
            assert time.monotonic() - began < 1.9, "it was not waited for"
            rank.call("sleep", seconds=0.1).cancel()
            assert (await rank.call("echo", timeout_s=PATIENCE_S, data=1))["data"] == 1
            assert lost == []
            assert not rank._pending

    run(body())


def test_generations():
    async def body():
        async with pool_of(1) as pool:
            (rank,) = pool.ranks
            first, second = pool.next_generation(), pool.next_generation()
            assert second > first
            await rank.call("configure", timeout_s=PATIENCE_S, generation=second, ep_rank=5)
            assert rank.info.ep_rank == 5
            with pytest.raises(ConfigError, match="next_generation"):
                await rank.call("configure", generation=first)
            slow = rank.call("sleep", seconds=0.3)
            await rank.call("configure", timeout_s=PATIENCE_S, generation=pool.next_generation(), ep_rank=0)
            with pytest.raises(EngineDeadError, match="generation 1 ended"):
                await slow
            late = rank.call("answer late")
            await until(lambda: rank.connection.num_stale == 2, "the answer to `slow` came too late as well")
            assert not late.done()
            late.cancel()
            assert (await rank.call("echo", timeout_s=PATIENCE_S, data=2))["data"] == 2

    run(body())


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


def test_rank_output_is_forwarded_with_its_level(caplog):
    async def body():
        async with pool_of(2) as pool:
            await pool.ranks[1].call(
                "print", timeout_s=PATIENCE_S, text="plain\nWARNING epruntime.worker: careful\n\x80"
            )
            await pool.ranks[1].call("print", timeout_s=PATIENCE_S, text="x" * 100_000)

    with caplog.at_level(logging.INFO, logger="epruntime.rank"):
        run(body())
    lines = {record.getMessage(): record.levelname for record in caplog.records if record.name == "epruntime.rank"}
    assert lines["[rank 1] plain"] == "INFO"
    assert lines["[rank 1] epruntime.worker: careful"] == "WARNING"
    assert max(map(len, lines)) < 10_000


def test_whatever_a_launcher_raises_ends_the_start_at_once():
    class Broken(LocalLauncher):
        async def spawn(self, bootstrap):
            raise RuntimeError("boom")

    began = time.monotonic()
    with pytest.raises(LaunchError, match=r"rank 0 on host .* could not be started: RuntimeError: boom"):
        run(RankPool.start(1, launcher=Broken(), start_timeout_s=60))
    assert time.monotonic() - began < soon(20)


def test_cores_are_divided(tmp_path):
    assert threads_each(8, 3) == 2
    assert threads_each(2, 3) == 1
    limit = tmp_path / "cpu.max"
    assert usable_cores(limit) == len(os.sched_getaffinity(0))
    limit.write_text("max 100000\n")
    assert usable_cores(limit) == len(os.sched_getaffinity(0))
    limit.write_text("50000 100000\n")
    assert usable_cores(limit) == 1


def test_exit_text():
    assert [exit_text(code) for code in (0, 3, -9, -11, -64)] == [
        "exit code 0",
        "exit code 3",
        "killed by SIGKILL",
        "killed by SIGSEGV",
        "killed by SIGRTMAX",
    ]
    assert exit_text(-100) == "killed by signal 100"
