"""RankPool over Ray: a private cluster that leaves nothing, and existing ones that are left as they were."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from leftovers import Leftovers, is_alive, wait_dead

from epruntime.errors import ConfigError, LaunchError, RankLostError
from epruntime.launchers.pool import RankPool
from epruntime.testing.echo_rank import ABSENT_VARIABLE
from epruntime.testing.patience import PATIENCE_S, soon

ray = pytest.importorskip("ray")

import psutil  # noqa: E402

from epruntime.launchers.ray import RayLauncher  # noqa: E402
from epruntime.testing.server_process import adopt_orphans  # noqa: E402

ENTRY = "epruntime.testing.echo_rank:run_rank"


def run(coroutine, seconds: float = 240) -> None:
    asyncio.run(asyncio.wait_for(coroutine, seconds))


@pytest.fixture(autouse=True)
def nothing_left(monkeypatch):
    """Ray's sockets need a short path, so the temporary folder is a fresh one in the system's."""
    with tempfile.TemporaryDirectory(prefix="ept-", dir="/tmp") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        monkeypatch.setenv("TMPDIR", folder)
        before = Leftovers.now()
        yield
        # Ray keeps a few descriptors in this process.
        assert before.grown_by(descriptors=False) == {}


def test_private_cluster():
    async def body():
        pool = await RankPool.start(2, launcher=RayLauncher(entry=ENTRY), threads_per_rank=3, start_timeout_s=90)
        try:
            assert [(r.info.slot, r.info.local_rank) for r in pool.ranks] == [(0, 0), (1, 1)]
            who = await asyncio.gather(*(rank.call("whoami", timeout_s=PATIENCE_S) for rank in pool.ranks))
            pids = [rank.info.pid for rank in pool.ranks]
            assert [w["pid"] for w in who] == pids
            assert {w["environment"]["OMP_NUM_THREADS"] for w in who} == {"3"}
            for w in who:
                assert pool._secret.hex() not in repr(w["argv"]) + repr(w["environment"])
            # nothing of the cluster can be reached from other machines
            me = psutil.Process()
            addresses = {
                c.laddr.ip
                for p in [me, *me.children(recursive=True)]
                for c in p.net_connections("tcp")
                if c.status == "LISTEN"
            }
            assert addresses <= {"127.0.0.1", "::ffff:127.0.0.1", "::1"}

            lost: list[RankLostError] = []
            pool.on_lost(lost.append)
            await pool.ranks[0].call("print", timeout_s=PATIENCE_S, text="my last words")
            call = pool.ranks[0].call("sleep", seconds=60)
            await asyncio.sleep(0.1)
            began = time.monotonic()
            os.kill(pids[0], signal.SIGKILL)
            with pytest.raises(RankLostError, match=r"rank 0 on host .*unanswered: 'sleep'"):
                await asyncio.wait_for(call, PATIENCE_S)
            assert time.monotonic() - began < soon(5)
            assert [error.slot for error in lost] == [0]
            assert (await pool.ranks[1].call("echo", timeout_s=PATIENCE_S, data=1))["data"] == 1
            os.kill(pids[1], signal.SIGSTOP)  # even a stopped one is ended
        finally:
            await pool.stop()
        assert not [pid for pid in pids if is_alive(pid)]
        assert len(lost) == 1
        assert not ray.is_initialized()
        await pool.stop()

    run(body())


def test_failed_start_leaves_nothing(monkeypatch):
    monkeypatch.setenv(ABSENT_VARIABLE, "1")

    async def body():
        with pytest.raises(LaunchError, match=r"(?s)rank 1 on host .* ended during start.*told not to join"):
            await RankPool.start(2, launcher=RayLauncher(entry=ENTRY), start_timeout_s=90)
        assert not ray.is_initialized()

    run(body())


def test_an_entry_that_fails_shows_its_error():
    async def body():
        expected = r"(?s)ended during start: it raised .*No module named 'epruntime.nowhere'"
        with pytest.raises(LaunchError, match=expected):
            await RankPool.start(1, launcher=RayLauncher(entry="epruntime.nowhere:run"), start_timeout_s=90)

    run(body())


def test_cancelled_start_leaves_nothing():
    async def body():
        task = asyncio.create_task(RankPool.start(1, launcher=RayLauncher(entry=ENTRY)))
        await asyncio.sleep(1.0)  # Ray is starting
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run(body())


def test_existing_cluster_of_two_nodes(caplog):
    """Room is waited for and named; ranks are node-ordered and reached over TCP; the cluster stays as it was."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        cluster.add_node(num_cpus=2)
        ray.init(address=cluster.address, logging_level=logging.ERROR, log_to_driver=False)

        async def too_many():
            began = time.monotonic()
            with pytest.raises(LaunchError, match=r"(?s)no room within 4 s: asked for 3 ranks of 2 CPU each") as caught:
                await RankPool.start(3, launcher=RayLauncher(entry=ENTRY), threads_per_rank=2, start_timeout_s=4)
            assert time.monotonic() - began < soon(15)
            assert "CPU 1 free of 1" in str(caught.value)
            assert "CPU 2 free of 2" in str(caught.value)

        async def fits():
            pool = await RankPool.start(3, launcher=RayLauncher(entry=ENTRY), start_timeout_s=60)
            try:
                assert [rank.info.local_rank for rank in pool.ranks] == [0, 0, 1]  # driver's node first
                host, _ = pool.store_address
                assert pool._launcher.control_host == host
                replies = await asyncio.gather(*(rank.call("echo", PATIENCE_S, data=1) for rank in pool.ranks))
                assert len(replies) == 3
                kinds = {rank.connection._transport.get_extra_info("socket").family for rank in pool.ranks}
                assert kinds <= {socket.AF_INET, socket.AF_INET6}
            finally:
                await pool.stop()
            assert await asyncio.to_thread(wait_dead, [rank.info.pid for rank in pool.ranks]) == []

        run(too_many())
        run(fits())
        assert ray.is_initialized()
        deadline = time.monotonic() + PATIENCE_S
        while ray.available_resources().get("CPU") != 3 and time.monotonic() < deadline:
            time.sleep(0.1)
        assert ray.available_resources()["CPU"] == 3
    finally:
        ray.shutdown()
        cluster.shutdown()
        shutil.rmtree(Path(tempfile.gettempdir()) / "ray", ignore_errors=True)


def test_addresses_that_cannot_work():
    with pytest.raises(ConfigError, match="Ray Client"):
        RayLauncher(address="ray://head:10001")

    async def body():
        with socket.socket() as closed:
            closed.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{closed.getsockname()[1]}"
        began = time.monotonic()
        with pytest.raises(LaunchError, match=r"no Ray cluster listens at ray_address='127\.0\.0\.1:"):
            await RankPool.start(1, launcher="ray", ray_address=address)
        assert time.monotonic() - began < soon(10)

    run(body())


def test_a_listener_that_is_no_ray_ends_in_time_with_the_hint():
    """Run apart: Ray's own attempt cannot be interrupted, and goes on in a thread."""
    program = """
import asyncio, socket, sys
from epruntime.errors import LaunchError
from epruntime.launchers.pool import RankPool
mute = socket.create_server(("127.0.0.1", 0))
try:
    asyncio.run(RankPool.start(1, launcher="ray", ray_address=f"127.0.0.1:{mute.getsockname()[1]}", start_timeout_s=3))
except LaunchError as error:
    print("LaunchError", error, flush=True)
    import os; os._exit(0)
"""
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert "LaunchError Ray did not answer within 3 s" in done.stdout
    assert "RAY_AUTH_TOKEN_PATH" in done.stdout
    assert time.monotonic() - began < soon(40)


COORDINATOR = """
import asyncio
from epruntime.launchers.pool import RankPool
from epruntime.launchers.ray import RayLauncher  # noqa: E402

async def main():
    pool = await RankPool.start(2, launcher=RayLauncher(entry="epruntime.testing.echo_rank:run_rank"))
    pool.on_lost(lambda error: print("LOST", error, flush=True))
    print(*[rank.info.pid for rank in pool.ranks], flush=True)
    try:
        await asyncio.Event().wait()
    finally:
        await pool.stop()
        print("stopped", flush=True)

try:
    asyncio.run(main())
except KeyboardInterrupt:
    pass
"""


def _is_helper(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).cmdline()[:1] in (["ray::DashboardAgent"], ["ray::RuntimeEnvAgent"])
    return False


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_signals_to_the_coordinator(number):
    """Ctrl-C (to the whole foreground group) stops in order; kill -9 leaves no process, only Ray's log folder."""
    adopt_orphans()  # as under an init that is not process 1, where Ray does not see that its workers are orphans
    process = subprocess.Popen(
        [sys.executable, "-c", COORDINATOR], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    with process:
        ranks = [int(word) for word in process.stdout.readline().split()]
        assert len(ranks) == 2
        tree = [p.pid for p in psutil.Process(process.pid).children(recursive=True)]
        assert set(ranks) <= set(tree)
        if number == signal.SIGINT:
            os.killpg(process.pid, number)
            assert process.communicate(timeout=PATIENCE_S)[0].split() == ["stopped"]
            assert process.returncode == 0
        else:
            process.kill()
    assert wait_dead(ranks) == []
    if number == signal.SIGKILL:
        # Two helpers of Ray's first try to reach the dead cluster for half a minute.
        deadline = time.monotonic() + PATIENCE_S / 2
        while strangers := [pid for pid in tree if is_alive(pid) and not _is_helper(pid)]:
            assert time.monotonic() < deadline, [psutil.Process(pid).cmdline() for pid in strangers if is_alive(pid)]
            time.sleep(0.05)
        for pid in tree:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for folder in Path(tempfile.gettempdir()).iterdir():
            shutil.rmtree(folder)
    assert wait_dead(tree) == []
