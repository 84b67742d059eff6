"""How supervisors, and what uses them, hear of the end of a torchrun job, or tell of it; without torchrun."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import psutil
import pytest
from supervised_job import START_S, Job, job

from epruntime.errors import LaunchError
from epruntime.launchers.pool import RankPool
from epruntime.launchers.torchrun import TorchrunLauncher
from epruntime.launchers.torchrun_meeting import LastLetter, MeetingLetter, MeetingPoint, read_letter
from epruntime.testing.patience import PATIENCE_S, soon


def until(condition: Callable[[], object], seconds: float = START_S) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_ranks_that_outlive_the_hub_can_be_stopped(caplog):
    with job(2) as it:
        it.supervise(0, 1)

        async def body() -> None:
            pool = await RankPool.start(2, launcher=TorchrunLauncher(), threads_per_rank=1, start_timeout_s=START_S)
            await asyncio.to_thread(it.hub.close)
            for rank in pool.ranks:
                rank.process.kill()
            await asyncio.wait_for(pool.stop(), PATIENCE_S)
            with pytest.raises(LaunchError, match="the job has ended"):
                await RankPool.start(1, launcher=TorchrunLauncher(), threads_per_rank=1, start_timeout_s=START_S)

        asyncio.run(asyncio.wait_for(body(), START_S))
    assert "could not be confirmed dead" not in caplog.text


def test_who_waits_for_workers_when_the_hub_is_closed_is_told():
    told: list[LaunchError] = []
    with job(2) as it:

        def wait() -> None:
            with pytest.raises(LaunchError, match="the job has ended") as caught:
                it.hub.run(it.hub.seats(2, 600.0))
            told.append(caught.value)

        waiting = threading.Thread(target=wait, daemon=True)
        waiting.start()
        it.hub.run(asyncio.sleep(0.1))
        it.hub.close()
        waiting.join(PATIENCE_S)
    assert len(told) == 1


def letter(it: Job) -> MeetingLetter | LastLetter:
    found = MeetingPoint.of(it.hub.worker).look(PATIENCE_S)
    assert found is not None
    return read_letter(found)


def test_a_worker_that_comes_when_the_job_has_ended_is_told_how():
    with job(3) as it:
        it.supervise(1)
        until(lambda: 1 in it.hub._links)
        it.hub.cause = "LaunchError: no room"
        it.hub.close()
        assert it.processes[1].wait(PATIENCE_S) == 5
        assert letter(it) == LastLetter(code=5, cause="LaunchError: no room", host=socket.gethostname())
        it.supervise(2)
        words = it.words(2)
    assert it.processes[2].returncode == 5
    assert f"the coordinator on host {socket.gethostname()} ended with exit code 5: LaunchError: no room" in words


def test_a_worker_that_joins_while_the_hub_closes_is_told():
    with job(2) as it:
        it.supervise(0)
        until(lambda: 0 in it.hub._links)
        it.hub._closed = True  # as while close() runs
        it.supervise(1)
        assert it.processes[1].wait(PATIENCE_S) == 5
        assert isinstance(letter(it), MeetingLetter)  # none is taken away, which needs a thread, or was a last one
        it.hub._closed = False


def test_a_job_that_was_stopped_or_had_all_workers_leaves_no_last_letter():
    with job(2) as it:
        it.supervise(1)
        until(lambda: 1 in it.hub._links)
        it.processes[1].send_signal(signal.SIGTERM)
        until(lambda: it.signals == [signal.SIGTERM])
        it.hub.close()
        assert isinstance(letter(it), MeetingLetter)
    with job(1) as it:
        it.supervise(0)
        until(lambda: 0 in it.hub._links)
        it.hub.close()
        assert MeetingPoint.of(it.hub.worker).look(0.1) is None


def test_the_last_letter_of_an_earlier_start_ends_no_later_one():
    with job(1, restart_count=1) as it:
        before = replace(it.hub.worker, restart_count=0)
        MeetingPoint.of(before).post(LastLetter(code=3, cause="", host="before"))
        it.supervise(0, TORCHELASTIC_RESTART_COUNT="1")
        until(lambda: 0 in it.hub._links)


def test_a_coordinator_that_has_said_the_end_may_take_its_time(tmp_path):
    done = tmp_path / "done"
    with job(1) as it:
        it.supervise(0, COORDINATOR=f"trap 'exit 9' TERM; until [ -e {done} ]; do sleep 0.1; done; exit 7")
        until(lambda: 0 in it.hub._links)
        it.hub.close()
        assert it.hub._links[0].gone == "closed by the peer"  # it has heard, and nobody waits for it any longer
        it.processes[0].send_signal(signal.SIGTERM)  # wants the job to end, as it does
        time.sleep(2.5)
        assert it.processes[0].poll() is None
        done.touch()
        assert it.processes[0].wait(PATIENCE_S) == 7


def searches(it: Job, rank: int) -> None:
    """Until this worker's supervisor does."""
    messenger = "epruntime.launchers.torchrun_meeting"
    process = psutil.Process(it.processes[rank].pid)
    until(lambda: any(messenger in " ".join(child.cmdline()) for child in process.children()))


def stop(it: Job, rank: int) -> None:
    """As torchrun's agent does, which signals its workers' process groups."""
    os.killpg(it.processes[rank].pid, signal.SIGTERM)


def test_a_signal_before_the_coordinator_is_found_reaches_it():
    with job(2, started=False) as it:
        it.supervise(0, 1)
        for rank in (0, 1):
            searches(it, rank)
            stop(it, rank)
        it.hub.start()
        until(lambda: len(it.hub._links) == 2)
        time.sleep(0.2)
        assert it.signals == [signal.SIGTERM]  # and it is one wish


@pytest.mark.parametrize(("grace", "num_signals"), [("9", 1), ("", 2)])
def test_a_signal_that_cannot_be_delivered_ends_what_is_here(tmp_path, grace, num_signals):
    with job(2, started=False) as it:
        why = [tmp_path / "0", tmp_path / "1"]
        for rank in (0, 1):
            it.supervise(rank, TORCH_ELASTIC_SHUTDOWN_TIMEOUT=grace, TORCHELASTIC_ERROR_FILE=str(why[rank]))
            searches(it, rank)
        began = time.monotonic()
        for _ in range(num_signals):
            for rank in (0, 1):
                stop(it, rank)
            time.sleep(0.1)
        assert [it.processes[rank].wait(PATIENCE_S) for rank in (0, 1)] == [128 + signal.SIGTERM] * 2
        assert "the coordinator, on this host, ended: killed by SIGTERM" in why[0].read_text()
        assert "stopped by SIGTERM before the coordinator was found" in why[1].read_text()
        assert time.monotonic() - began < soon(8)
