"""Two hosts as a Ray cluster with token authentication: served by a job, and by a program on a node."""

from __future__ import annotations

import itertools
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from programs import ROOT, Output, client, start, start_client
from ray_cluster import RayCluster, ray_environment

from epruntime.testing import tiny_models
from epruntime.testing.hosts import StandInHosts
from epruntime.testing.patience import PATIENCE_S, soon
from epruntime.testing.reference import greedy_reference

pytest.importorskip("ray")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

PROMPTS = [[5, 17, 99, 3], [1, 2, 3, 4, 5, 6, 7, 8, 9], [100, 50, 25]]
COUNT = 8
LONG = 300  # tokens of a prompt whose rows are counted on the wire
JOIN = """
import asyncio, sys, time
from epruntime.errors import LaunchError
from epruntime.launchers.pool import RankPool
began = time.monotonic()
try:
    asyncio.run(RankPool.start(2, launcher="ray", ray_address=sys.argv[1]))
except LaunchError as error:
    print(time.monotonic() - began, error)
"""
GRPC, READY = "127.0.0.1:50051", r"epruntime is ready: gRPC on (\S+)"


@dataclass(frozen=True)
class Site:
    """The hosts, the Ray cluster on them, and the model that is served."""

    hosts: StandInHosts
    cluster: RayCluster
    model: Path
    expected: list[list[int]]

    def program(self, *arguments: str) -> Output:
        """launch/ray_serve.py in the foreground of the head host."""
        argv = [sys.executable, "launch/ray_serve.py", "--model", str(self.model), *arguments]
        return start(self.cluster.head, argv, self.cluster.environment)

    def ranks(self, index: int) -> list[int]:
        """Processes of ranks on a host."""
        return [pid for pid in self.hosts[index].processes() if b"ray::RankActor" in _command_line(pid)]


def _command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("ray")
    _, made = tiny_models.build("mixtral", 0)
    expected = greedy_reference(made, PROMPTS, max_new_tokens=COUNT).tokens
    model = tiny_models.save(made, folder / "tiny")
    with StandInHosts(("host-a", "host-b", "outside")) as hosts:
        # As on real nodes: epruntime is installed, and what a job uploads comes before it.
        cluster = RayCluster(hosts.hosts[:2], {**ray_environment(folder), "PYTHONPATH": str(ROOT)})
        cluster.start()
        yield Site(hosts, cluster, model, expected)


def test_a_job_serves_what_one_process_computes_and_drains(site):
    head, cluster = site.cluster.head, site.cluster
    options = ["--working-dir", str(ROOT), "--runtime-env-json", '{"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "90"}}']
    entry = ["python", "launch/ray_serve.py", "--model", str(site.model), "--expert-parallel-size", "2"]
    job = Output(cluster.submit("first", *entry, options=options))
    job.wait_for(READY, 120)

    # every rank runs the native kernels, though the upload leaves them out, and ranks are in node order
    info = client(head, GRPC, "info")
    assert [rank["host"] for rank in info["ranks"]] == ["host-a", "host-b"]
    signatures = [rank["signature"]["extension"] for rank in info["ranks"]]
    assert signatures[0].startswith("native:"), job.text
    assert signatures[0] == signatures[1]
    assert info["engine"]["transport"] == "gloo"
    assert "interface eth0" in job.text
    assert client(head, GRPC, "generate", prompts=PROMPTS, max_tokens=COUNT) == site.expected

    _rows_cross_the_wire(site)

    # a second server on this host, and one on this cluster
    busy = site.program("--expert-parallel-size", "2")
    full = site.program("--expert-parallel-size", "2", "--port=0", "--grpc-port=0", "--start-timeout-s=3")
    assert busy.wait_end(PATIENCE_S) == full.wait_end(PATIENCE_S) == 1
    assert "50051" in busy.text
    assert "in use" in busy.text
    for words in ("no room within 3 s: asked for 2 ranks of 1 CPU each", "host-a", "host-b", "CPU 0 free of 1"):
        assert words in full.text

    # `ray job stop` lets the running request end, and leaves nothing
    assert len(site.ranks(0)) == len(site.ranks(1)) == 1
    request = start_client(head, GRPC, "stream", prompt=PROMPTS[0], max_tokens=480)
    request.wait_begun()
    assert "Job 'first' was stopped" in cluster.job("stop", "first")
    (ended,) = request.result()
    assert (ended["tokens"], ended["finish"], ended["error"]) == (480, "length", "")
    # in the file: what `ray job submit` shows of it may come later
    lines = [line for line in cluster.log("job-driver-first.log").splitlines() if "draining: " in line]
    assert any("draining: 1 request is running, and may for 30 s" in line for line in lines), lines
    assert "terminated gracefully with SIGTERM" in cluster.log("jobs/supervisor-first.log")
    job.wait_end(PATIENCE_S)
    _nothing_left(site)


def _rows_cross_the_wire(site: Site) -> None:
    """One request at a time: its rank sends rows, the other one sends results back, and the veth counters have both."""
    a, b, _ = site.hosts
    generator = random.Random(0)  # no prompt shares a prefix with another
    prompts = [[generator.randrange(1, 127) for _ in range(LONG)] for _ in range(20)]
    wire, began = (a.bytes_sent, b.bytes_sent), time.monotonic()
    trace = client(site.cluster.head, GRPC, "trace", prompts=prompts)
    seconds, grown = time.monotonic() - began, a.bytes_sent + b.bytes_sent - sum(wire)
    crossed, crossed_bytes = 0, 0.0
    for before, after in itertools.pairwise(trace):
        counts = [_grown(x, y) for x, y in zip(before, after, strict=True)]
        (worker,) = (c for c in counts if c["rows_sent"])
        (other,) = (c for c in counts if not c["rows_sent"])
        # whatever the other rank received came over the wire, and whatever it computed went back
        crossed += int(other["rows_received"])
        crossed_bytes += other["rows_received"] * worker["dispatch_bytes"] / worker["rows_sent"]
        crossed_bytes += other["combine_bytes"]
    assert crossed > LONG * len(prompts) / 2  # experts of both ranks are chosen
    assert grown > crossed_bytes
    # and it is not Ray's own talk that the counters show
    wire, began = (a.bytes_sent, b.bytes_sent), time.monotonic()
    time.sleep(1.0)
    idle = (a.bytes_sent + b.bytes_sent - sum(wire)) / (time.monotonic() - began)
    assert crossed_bytes > 2 * idle * seconds


def _grown(before: dict[str, Any], after: dict[str, Any]) -> dict[str, float]:
    names = ("rows_sent", "rows_received", "dispatch_bytes", "combine_bytes")
    sums = [{n: sum(layer[n] for layer in rank["moe"]["layers"].values()) for n in names} for rank in (before, after)]
    return {n: sums[1][n] - sums[0][n] for n in names}


def _nothing_left(site: Site) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while site.ranks(0) or site.ranks(1):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    while True:
        status = site.cluster.head.run(["ray", "status"], environment=site.cluster.environment).stdout
        if "0.0/2.0 CPU" in status and "(no resource demands)" in status and "placement" not in status:
            return
        assert time.monotonic() < deadline, status
        time.sleep(0.3)


def test_a_cluster_that_cannot_be_joined_is_told_in_seconds(site, tmp_path):
    """Ray's own attempts take 20 s without a token, and a minute from a machine that is no node."""
    wrong = tmp_path / "token"
    wrong.write_text("0" * 64)
    address, head = site.cluster.address, site.cluster.head.address
    # the file that `ray start` leaves behind where its machine loses power
    stale = Path(site.hosts[2].temporary, "stale", "ray")
    site.hosts[2].path(stale).mkdir(parents=True)
    site.hosts[2].path(stale / "ray_current_cluster").write_text(f"{head}:6380")
    cases: list[tuple[dict[str, Any], list[str]]] = [
        (
            {"environment": {"RAY_AUTH_MODE": "", "RAY_AUTH_TOKEN_PATH": ""}},
            [f"the Ray cluster at {address} ('auto'", "refuses this process", "needs RAY_AUTH_MODE=token"],
        ),
        (
            {"environment": {"RAY_AUTH_TOKEN_PATH": str(wrong)}},
            [f"the Ray cluster at {address} ('auto'", "refuses this process", f"RAY_AUTH_TOKEN_PATH={wrong}"],
        ),
        (
            {"host": 2, "address": address},
            [f"this machine is no node of the Ray cluster at {address}", "10.77.0.1, 10.77.0.2", "ray start --address"],
        ),
        ({"host": 2}, ["ray_address='auto' finds no Ray cluster", "RAY_ADDRESS is not set"]),
        (
            {"host": 2, "environment": {"RAY_TMPDIR": str(stale.parent)}},
            [f"listens at ray_address='{head}:6380' ('auto'", "ray_current_cluster", "That cluster has ended"],
        ),
        ({"address": f"{head}:8265"}, [f"what listens at {head}:8265 does not answer as a Ray cluster does", "6379"]),
        ({"address": f"{head}:6380"}, [f"no Ray cluster listens at ray_address='{head}:6380'", "refused"]),
    ]
    for options, expected in cases:
        argv = [sys.executable, "-c", JOIN, options.get("address", "auto")]
        environment = {**site.cluster.environment, **options.get("environment", {})}
        done = site.hosts[options.get("host", 0)].run(argv, environment=environment)
        seconds, _, text = done.stdout.partition(" ")
        for words in expected:
            assert words in text
        assert float(seconds) < soon(10), done.stdout


def test_a_cut_link_and_a_dead_host_end_like_dead_ranks(site):
    head = site.cluster.head
    server = site.program(
        "--expert-parallel-size=2", "--restart", "--heartbeat-timeout-s=2", "--step-timeout-s=8",
        "--start-timeout-s=60", "--max-restarts=1", "--no-http",
    )  # fmt: skip
    server.wait_for(READY, 120)
    request = start_client(head, GRPC, "stream", prompt=PROMPTS[0], max_tokens=480)
    request.wait_begun()
    site.hosts.link_down(1)
    cut = time.time()
    try:
        (ended,) = request.result()
    finally:
        site.hosts.link_up(1)
    assert (ended["rank"], ended["host"]) == (1, "host-b"), ended
    assert "RankLostError" in ended["error"]
    assert ended["at"] - cut < soon(8.0)
    server.wait_for(r"restarted in [\d.]+ s: generation 1 on ranks 0 .*, 1 \(incarnation 1\)", 120)
    assert client(head, GRPC, "generate", prompts=PROMPTS, max_tokens=COUNT) == site.expected

    requests = start_client(head, GRPC, "stream", prompt=PROMPTS[1], max_tokens=400, at_once=4)
    requests.wait_begun()
    site.hosts[1].end()
    cut = time.time()
    for ended in requests.result():
        assert (ended["rank"], ended["host"]) == (1, "host-b"), ended
        assert ended["at"] - cut < soon(8.0)
    assert server.wait_end(120) == 1
    assert "not replaced after 1 restarts" in server.text
