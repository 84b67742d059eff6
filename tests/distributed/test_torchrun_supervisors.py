"""Supervisors and their hub without torchrun: spare workers, secrets, workers that are missing, old letters."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time

import psutil
import pytest
from leftovers import wait_dead
from supervised_job import START_S, job

from epruntime.comm import auth
from epruntime.comm.control import RankBootstrap
from epruntime.errors import ConfigError, HandshakeError, LaunchError, RankLostError
from epruntime.launchers import torchrun_supervisor
from epruntime.launchers.pool import RankPool, make_launcher
from epruntime.launchers.torchrun import TorchrunLauncher, _share
from epruntime.launchers.torchrun_environment import (
    CoordinatorLetter,
    TorchrunWorker,
    drain_timeout_s,
    forget_torchrun,
)
from epruntime.launchers.torchrun_hub import SupervisorHub
from epruntime.launchers.torchrun_meeting import REASON, MeetingLetter, MeetingPoint
from epruntime.testing.patience import PATIENCE_S

HOST = socket.gethostname()


def test_a_rank_whose_worker_is_gone_moves_to_a_spare_one():
    with job(4) as it:
        it.supervise(1, 0, 2, 3)

        async def body() -> None:
            launcher = TorchrunLauncher()
            pool = await RankPool.start(3, launcher=launcher, threads_per_rank=1, start_timeout_s=START_S)
            try:
                assert [(r.info.slot, r.info.local_rank) for r in pool.ranks] == [(0, 0), (1, 1), (2, 0)]
                parents = [psutil.Process(r.info.pid).ppid() for r in pool.ranks]
                assert parents == [it.processes[rank].pid for rank in (0, 1, 2)]  # in rank order
                assert launcher.control_host == "127.0.0.1"  # on two hosts, as far as torchrun is concerned
                lost: list[RankLostError] = []
                pool.on_lost(lost.append)

                # a rank dies: its own worker starts it again
                os.kill(pool.ranks[0].info.pid, signal.SIGKILL)
                await until(lambda: len(lost) == 1)
                assert "killed by SIGKILL" in str(lost[0])
                again = await pool.replace(0, timeout_s=START_S)
                assert psutil.Process(again.info.pid).ppid() == it.processes[0].pid

                # a worker dies, and its rank with it: a spare one takes its place
                pid = pool.ranks[2].info.pid
                it.processes[2].kill()
                await until(lambda: len(lost) == 2)
                assert wait_dead([pid]) == []
                assert "torchrun worker 2 on host" in str(lost[1])
                moved = await pool.replace(2, timeout_s=START_S)
                assert psutil.Process(moved.info.pid).ppid() == it.processes[3].pid
                assert (moved.info.slot, moved.info.incarnation, moved.info.local_rank) == (2, 1, 1)

                it.processes[3].kill()
                await until(lambda: len(lost) == 3)
                with pytest.raises(LaunchError, match="no spare worker"):
                    await pool.replace(2, timeout_s=START_S)
            finally:
                pids = [rank.info.pid for rank in pool.ranks]
                await pool.stop()
            assert wait_dead(pids) == []

        asyncio.run(body())


async def until(condition, seconds: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


def test_missing_workers_are_named_and_signals_count_once():
    with job(3) as it:
        it.supervise(0, 1)

        async def place(num_ranks: int, timeout_s: float) -> None:
            await TorchrunLauncher().place(num_ranks, threads_per_rank=None, timeout_s=timeout_s)

        asyncio.run(place(2, START_S))
        with pytest.raises(
            LaunchError, match=r"workers 2 did not reach the coordinator on host .* Here are: torchrun "
        ):
            asyncio.run(place(1, 0.3))
        with pytest.raises(LaunchError, match=r"3 ranks were asked for .* of which 1 are free"):
            asyncio.run(place(3, 0.3))
        for expected in ([15], [15, 2]):  # the agents of all hosts pass on what is one wish
            for rank in (0, 1):
                it.processes[rank].send_signal(expected[-1])
            deadline = time.monotonic() + PATIENCE_S
            while it.signals != expected:
                assert time.monotonic() < deadline, it.signals
                time.sleep(0.01)
        time.sleep(0.2)
        assert it.signals == [15, 2]


def test_job_secret():
    with job(3, job_secret="of the user") as it:
        it.supervise(1, EPRUNTIME_JOB_SECRET="of the user")
        it.supervise(2)
        assert f"EPRUNTIME_JOB_SECRET is set on host {HOST} and not on host {HOST}" in it.words(2)
        assert it.processes[2].returncode == 1
        it.supervise(2, EPRUNTIME_JOB_SECRET="another")
        words = it.words(2)
        assert "does not know this pool's secret" in words
        assert "EPRUNTIME_JOB_SECRET must have one value on all hosts" in words
        assert "another" not in words

        async def rank() -> str:
            pool = await RankPool.start(1, launcher=_Late(1), threads_per_rank=1, start_timeout_s=START_S)
            environment = psutil.Process(pool.ranks[0].info.pid).environ()
            await pool.stop()
            return environment.get("EPRUNTIME_JOB_SECRET", "")

        assert asyncio.run(rank()) == ""  # it joined, by a secret that was masked on the way, and has not got this one


class _Late(TorchrunLauncher):
    """Takes one certain worker, for others are missing."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self._rank = rank

    async def place(self, num_ranks, *, threads_per_rank, timeout_s):
        while self._rank not in self._hub._links:
            await asyncio.sleep(0.01)
        self._links = [self._hub._links[self._rank]]
        link = self._links[0]
        return [_seat(link)]


def _seat(link):
    from epruntime.launchers.base import Seat

    return Seat(slot=0, host=link.host, local_rank=link.local_rank, threads=1)


def test_a_letter_of_an_earlier_coordinator_is_no_dead_end():
    with job(2) as it:
        worker = it.hub.worker
        stale = MeetingLetter(address="tcp:127.0.0.1:9", host="before", secret=auth.new_secret())
        meeting = MeetingPoint.of(worker)
        meeting.post(stale)
        it.supervise(1)
        time.sleep(3.0)
        assert it.processes[1].poll() is None
        fresh = MeetingLetter(address=f"tcp:127.0.0.1:{_port(it.hub)}", host=HOST, secret=it.hub._secret)
        meeting.post(fresh)
        deadline = time.monotonic() + START_S
        while 1 not in it.hub._links:
            assert time.monotonic() < deadline
            time.sleep(0.05)


def _port(hub: SupervisorHub) -> int:
    return hub._server._servers[0].sockets[0].getsockname()[1]


MESSENGER = (
    "from epruntime.launchers import torchrun_meeting as m; m._STORE_TIMEOUT_S = 0.3; raise SystemExit(m.main())"
)


def test_the_store_is_not_reached():
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        where = {"host": "127.0.0.1", "port": nobody.getsockname()[1], "prefix": "p", "parent": os.getpid()}
        done = subprocess.run(
            [sys.executable, "-c", MESSENGER],
            input=json.dumps(where) + "\n",
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert done.returncode == 1
    (reason,) = (line for line in done.stdout.splitlines() if line.startswith(REASON))
    assert f"torchrun's store at 127.0.0.1:{where['port']} was not reached: " in reason
    assert "--local-addr" in reason


FULL = {
    "RANK": "3", "LOCAL_RANK": "1", "GROUP_RANK": "1", "WORLD_SIZE": "4", "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "[fd00::1]", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "abc",
    "TORCHELASTIC_RESTART_COUNT": "2", "TORCHELASTIC_USE_AGENT_STORE": "True", "PATH": "/bin",
}  # fmt: skip


class Unreached:
    """In place of the search for the coordinator."""

    def __init__(self, worker: TorchrunWorker, *, job_secret: bytes | None) -> None:
        pass

    async def run(self) -> None:
        raise HandshakeError("connection reset by peer")


def test_the_coordinator_s_exit_code_tells_more_than_that_it_was_not_reached(monkeypatch):
    """One that ends at once may do so while its own worker still greets it."""
    monkeypatch.setattr(torchrun_supervisor, "CoordinatorSearch", Unreached)

    async def run(rank: str) -> int:
        supervisor = torchrun_supervisor.Supervisor(TorchrunWorker.of({**FULL, "RANK": rank}), job_secret=None)
        return await supervisor.run([sys.executable, "-c", "import time; time.sleep(0.2); raise SystemExit(7)"], {})

    assert asyncio.run(run("0")) == 7
    assert asyncio.run(run("3")) == 1


class TestEnvironment:
    def test_worker(self):
        worker = TorchrunWorker.of(FULL)
        assert (worker.rank, worker.local_rank, worker.group_rank, worker.num_hosts) == (3, 1, 1, 2)
        assert (worker.store_host, worker.agent_store, worker.prefix) == ("fd00::1", True, "epruntime/abc/2")
        assert TorchrunWorker.of({"RANK": "0", "WORLD_SIZE": "1"}) is None
        with pytest.raises(ConfigError, match="MASTER_PORT"):
            TorchrunWorker.of({key: value for key, value in FULL.items() if key != "MASTER_PORT"})

    def test_nothing_of_torchrun_is_handed_on(self):
        environment = dict(FULL)
        forget_torchrun(environment)
        assert environment == {"PATH": "/bin"}

    def test_coordinator_letter_is_taken_once(self):
        environment = {"PATH": "/bin"}
        letter = CoordinatorLetter(worker=TorchrunWorker.of(FULL), parent_pid=7)
        letter.put(environment)
        assert CoordinatorLetter.take(environment) == letter
        assert CoordinatorLetter.take(environment) is None
        assert environment == {"PATH": "/bin"}

    def test_drain_fits_into_torchruns_patience(self, monkeypatch):
        monkeypatch.delenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", raising=False)
        assert drain_timeout_s() == 22
        monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "100")
        assert drain_timeout_s() == 92
        monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "3")
        assert drain_timeout_s() == 0

    def test_launcher_elsewhere(self):
        with pytest.raises(ConfigError, match=r"torchrun \.\.\. launch/torchrun_serve\.py MODEL"):
            make_launcher("torchrun")


def test_masked_secrets_come_back_and_differ_each_time():
    secret, other, data = (bytes([i]) * 32 for i in range(3))
    nonce = auth.new_nonce()
    hidden = auth.masked(secret, nonce, data)
    assert auth.masked(secret, nonce, hidden) == data
    assert data not in {hidden, auth.masked(other, nonce, hidden)}
    assert auth.masked(secret, auth.new_nonce(), data) != hidden
    letter = RankBootstrap(address="tcp:h:1", secret=hidden, slot=0, host="h")
    assert RankBootstrap.from_bytes(letter.to_bytes()).secret == hidden


class FakeLink:
    def __init__(self, group: int, affinity: set[int], cores: int) -> None:
        self.group, self.affinity, self.cores = group, frozenset(affinity), cores


@pytest.mark.parametrize(
    ("links", "threads"),
    [
        ([FakeLink(0, {0, 1, 2, 3}, 4)] * 2, [2, 2]),  # all share all cores
        ([FakeLink(0, {0, 1}, 2), FakeLink(0, {2, 3}, 2)], [2, 2]),  # torchrun --numa-binding
        ([FakeLink(0, set(range(64)), 8)] * 4, [2, 2, 2, 2]),  # a container with a quota of 8
        ([FakeLink(0, {0}, 1)] * 3 + [FakeLink(1, {0, 1}, 2)], [1, 1, 1, 2]),
        ([FakeLink(0, set(), 4)] * 2, [2, 2]),  # a system that tells no affinity
    ],
)
def test_threads_of_ranks(links, threads):
    assert [_share(link, links) for link in links] == threads
