"""RankPool over local processes: how its ranks are started, talked to and heard."""

from __future__ import annotations

import asyncio
import logging
import os
import stat
import tempfile
import time
from pathlib import Path

import psutil
import pytest
from deaths import until
from leftovers import Leftovers
from local_pool import nothing_left, pool_of, run  # noqa: F401  a fixture of this module

from epruntime.errors import ConfigError, EngineDeadError, ProtocolError, RankLostError, UnsupportedModelError
from epruntime.launchers import door as door_module
from epruntime.launchers.cores import threads_each, usable_cores
from epruntime.launchers.local import exit_text
from epruntime.testing.patience import PATIENCE_S


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
