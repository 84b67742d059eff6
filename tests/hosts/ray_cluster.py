"""A Ray cluster with one node per stand-in host, made by `ray start` as an operator does, with token authentication.

Small: a rank's worth of CPU per node, 80 MB of object store; a node's files lie in its host's shared memory, and end
with it.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from epruntime.testing.hosts import Host, HostProcess

RAY = str(Path(sys.executable).with_name("ray"))
GCS_PORT, DASHBOARD_PORT = 6379, 8265
_OBJECT_STORE_BYTES = 80_000_000


def ray_environment(folder: Path | None) -> dict[str, str]:
    """What every Ray process of a cluster has in its environment.

    Args:
        folder: holds the cluster's token; made if it is not there. None: no authentication.
    """
    environment = {
        "RAY_TMPDIR": Host.temporary,
        "RAY_USAGE_STATS_ENABLED": "0",
        # an activated virtual environment: a job's entry says `python`
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        # Ray's workers give way to everything else by default, and a test has a deadline.
        "RAY_worker_niceness": "0",
    }
    if folder is not None:
        token = folder / "token"
        if not token.exists():
            token.touch(mode=0o600)
            token.write_text(secrets.token_hex(32))
        environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
    return environment


class RayCluster:
    """A node on each host; the first is the head. It ends with the hosts.

    Args:
        environment: of all its processes.
        num_cpus: of each node; more: further arguments of `ray start` on every node.
    """

    def __init__(
        self,
        hosts: Sequence[Host],
        environment: Mapping[str, str],
        *,
        num_cpus: int = 1,
        more: Sequence[str] = (),
    ) -> None:
        self.hosts, self.environment, self._num_cpus, self._more = hosts, dict(environment), num_cpus, more
        self.head = hosts[0]
        self.address = f"{self.head.address}:{GCS_PORT}"

    def start(self) -> None:
        self.start_node(
            self.head, "--head", f"--port={GCS_PORT}", f"--dashboard-host={self.head.address}",
            f"--dashboard-port={DASHBOARD_PORT}", "--include-dashboard=true",
        )  # fmt: skip
        for host in self.hosts[1:]:
            self.start_node(host, f"--address={self.address}")

    def start_node(self, host: Host, *arguments: str) -> None:
        host.run(
            [RAY, "start", *arguments, f"--node-ip-address={host.address}", f"--num-cpus={self._num_cpus}",
             f"--object-store-memory={_OBJECT_STORE_BYTES}", "--disable-usage-stats", *self._more],
            environment=self.environment, timeout_s=120, cwd="/",
        )  # fmt: skip

    @property
    def client_environment(self) -> dict[str, str]:
        """Of a user on the head host."""
        return {**self.environment, "RAY_API_SERVER_ADDRESS": f"http://{self.head.address}:{DASHBOARD_PORT}"}

    def job(self, *arguments: str, check: bool = True, timeout_s: float = 120) -> str:
        """Output of `ray job ARGUMENTS` on the head host."""
        command = [RAY, "job", *arguments]
        return self.head.run(command, environment=self.client_environment, check=check, timeout_s=timeout_s).stdout

    def submit(self, job_id: str, *entry: str, options: Sequence[str] = ()) -> HostProcess:
        """`ray job submit`, which prints the job's output until the job ends."""
        command = [RAY, "job", "submit", "--submission-id", job_id, *options, "--", *entry]
        return self.head.popen(
            command, environment=self.client_environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def log(self, name: str) -> str:
        """A file of the head node's logs."""
        session = self.head.path(f"{self.head.temporary}/ray/session_latest").readlink()
        return self.head.path(session / "logs" / name).read_text()
