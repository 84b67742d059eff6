"""A hub in this process and its supervisors, without torchrun."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

from epruntime.launchers import torchrun_hub
from epruntime.launchers.torchrun_environment import TorchrunWorker, take_job_secret
from epruntime.launchers.torchrun_hub import SupervisorHub
from epruntime.testing.patience import PATIENCE_S

START_S = 60.0

#: a supervisor as torchrun's workers are, with ranks that need no torch; worker 0's coordinator does nothing, by itself
SUPERVISOR = """
import asyncio, functools, os, sys
from epruntime.launchers import torchrun_search, torchrun_supervisor
torchrun_search._REFUSED_S = 1.0
torchrun_supervisor._CLOSE_S = 1.0
torchrun_supervisor.LocalLauncher = functools.partial(
    torchrun_supervisor.LocalLauncher, entry_module="epruntime.testing.echo_rank")
from epruntime.launchers.torchrun_environment import TorchrunWorker, forget_torchrun, take_job_secret
from epruntime.launchers.torchrun_supervisor import Supervisor

async def run():
    worker = TorchrunWorker.of(os.environ)
    forget_torchrun(os.environ)
    supervisor = Supervisor(worker, job_secret=take_job_secret(os.environ))
    return await supervisor.run(["sh", "-c", os.environ.get("COORDINATOR", "exec sleep 600")], os.environ)

sys.exit(asyncio.run(run()))
"""


class Job:
    """A hub in this process, and supervisors on "hosts" of two workers each."""

    def __init__(self, world_size: int, *, job_secret: str = "", **changes: object) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.environment = {
            "RANK": "0", "LOCAL_RANK": "0", "GROUP_RANK": "0", "WORLD_SIZE": str(world_size), "GROUP_WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "run",
            "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_USE_AGENT_STORE": "False",
        }  # fmt: skip
        worker = TorchrunWorker.of(self.environment)
        secret = take_job_secret({"EPRUNTIME_JOB_SECRET": job_secret}) if job_secret else None
        self.signals: list[int] = []
        self.hub = SupervisorHub(replace(worker, **changes), job_secret=secret, on_signal=self.signals.append)
        self.processes: dict[int, subprocess.Popen[str]] = {}

    def supervise(self, *ranks: int, **environment: str) -> None:
        for rank in ranks:
            mine = {"RANK": str(rank), "LOCAL_RANK": str(rank % 2), "GROUP_RANK": str(rank // 2)}
            self.processes[rank] = subprocess.Popen(
                [sys.executable, "-c", SUPERVISOR], env={**os.environ, **self.environment, **mine, **environment},
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                start_new_session=True,
            )  # fmt: skip

    def words(self, rank: int, timeout_s: float = START_S) -> str:
        """Of a supervisor that ends."""
        return self.processes[rank].communicate(timeout=timeout_s)[0]


@contextlib.contextmanager
def job(world_size: int, *, started: bool = True, **options: object) -> Iterator[Job]:
    made = Job(world_size, **options)
    torchrun_hub.set_hub(made.hub)
    try:
        made.hub.exit_code = 5
        if started:
            made.hub.start()
        yield made
        made.hub.close()
        for rank, process in made.processes.items():
            if process.poll() is None and rank:  # worker 0 ends with its coordinator
                assert process.wait(PATIENCE_S) == 5
    finally:
        made.hub.close()
        torchrun_hub.set_hub(None)
        for process in made.processes.values():
            process.kill()
            process.communicate()
