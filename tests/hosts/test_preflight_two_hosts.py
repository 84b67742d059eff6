"""Preflight across two hosts: how long it takes, a link that is limited to 100 Mbit/s, a firewall, and that of each
there is one verdict. Ranks are started once, by torchrun."""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from epruntime.testing import tiny_models
from epruntime.testing.hosts import Host, StandInHosts
from epruntime.testing.patience import PATIENCE_S, soon
from epruntime.testing.torchrun_job import TorchrunJob

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

PROGRAM = str(Path(__file__).with_name("preflight_program.py"))
START_S, VERDICT_S = 120.0, 10.0
#: 100 Mbit/s are 12.5 MB/s with all headers; the shaper lets a burst of 64 kB of each probe through at once.
RATE, MOST_MB_PER_S = "100mbit", 16.0


class World:
    def __init__(self, hosts: StandInHosts, job: TorchrunJob, folder: Path) -> None:
        self.hosts, self._job, self._folder, self._count = hosts, job, folder, 0

    def preflight(self) -> dict[str, Any]:
        """The verdict, as JSON has it, and `took_s`, with the ranks' meeting."""
        (self._folder / f"go-{self._count}").touch()
        # a call that is dropped is given up after 3 s
        found = self._job.wait_for(rf"verdict {self._count} (\{{.*\}})", PATIENCE_S)
        self._count += 1
        return json.loads(found[1])

    def end(self) -> None:
        (self._folder / f"go-{self._count}").write_text("end")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    _, made = tiny_models.build("mixtral", 0)
    model = tiny_models.save(made, tmp_path_factory.mktemp("tiny"))
    folder = tmp_path_factory.mktemp("orders")
    with StandInHosts() as hosts, contextlib.ExitStack() as stack:
        options = [
            "--nnodes",
            "2",
            "--nproc-per-node",
            "1",
            "--master-addr",
            hosts[0].address,
            "--master-port",
            "29500",
        ]
        jobs = [
            stack.enter_context(
                TorchrunJob(
                    [*options, "--node-rank", str(number)], [PROGRAM, str(model), str(folder)], popen=host.popen
                )
            )
            for number, host in enumerate(hosts)
        ]
        jobs[0].wait_for("^ranks are up", START_S)
        world = World(hosts, jobs[0], folder)
        yield world
        world.end()
        assert [job.wait(PATIENCE_S) for job in jobs] == [0, 0]


def ids(verdict: dict[str, Any], severity: str) -> list[str]:
    return sorted(finding["id"] for finding in verdict["findings"] if finding["severity"] == severity)


def test_two_healthy_hosts_in_less_than_ten_seconds(world: World) -> None:
    a, b = world.hosts
    before = b.bytes_received
    verdict = world.preflight()
    assert verdict["ok"], verdict["findings"]
    assert verdict["took_s"] < soon(VERDICT_S)
    assert verdict["transport"] == "gloo"
    assert [(rank["host"], rank["address"], rank["interface"]) for rank in verdict["ranks"]] == [
        ("host-a", a.address, "eth0"), ("host-b", b.address, "eth0"),
    ]  # fmt: skip
    assert len({rank["boot_id"] for rank in verdict["ranks"]}) == 2
    assert [(pair["source"], pair["destination"]) for pair in verdict["pairs"]] == [(0, 1), (1, 0)]
    # two probes of 64 KiB in each direction, and the payloads
    assert b.bytes_received - before > 2 * 64 * 1024 + 200_000


def test_a_limited_link_is_slow_in_its_direction(world: World) -> None:
    """Host b may send 100 Mbit/s."""
    with changed(
        world.hosts[1],
        f"tc qdisc add dev eth0 root tbf rate {RATE} burst 64kb latency 400ms",
        "tc qdisc del dev eth0 root",
    ):
        verdict = world.preflight()
    assert verdict["ok"]
    assert verdict["took_s"] < soon(VERDICT_S)
    rates = {(pair["source"], pair["destination"]): pair["mb_per_s"] for pair in verdict["pairs"]}
    assert 1 < rates[1, 0] < MOST_MB_PER_S
    assert rates[0, 1] > 2 * rates[1, 0]
    (slow,) = [
        finding for finding in verdict["findings"] if finding["id"] == "bandwidth-low" and finding["slots"] == [1, 0]
    ]
    assert slow["hosts"] == ["host-b", "host-a"]
    assert "GLOO_SOCKET_IFNAME" in slow["remedy"]


def test_a_firewall_is_found_before_the_ranks_wait_for_each_other(world: World) -> None:
    """Host b drops what opens new connections; those that there are, as the control channel, go on."""
    rule = "INPUT -i eth0 -p tcp --syn -j DROP"
    with changed(world.hosts[1], f"iptables -A {rule}", f"iptables -D {rule}"):
        verdict = world.preflight()
    assert not verdict["ok"]
    assert verdict["took_s"] < soon(VERDICT_S)
    assert ids(verdict, "error") == ["unreachable"]
    (finding,) = [finding for finding in verdict["findings"] if finding["severity"] == "error"]
    assert finding["found"].startswith(
        f"rank 0 on host host-a cannot reach rank 1 on host host-b at {world.hosts[1].address}:"
    )
    assert "no answer within 3 s" in finding["found"]
    assert verdict["transport"] == ""


def test_the_ranks_are_of_use_afterwards(world: World) -> None:
    assert world.preflight()["ok"]


@contextlib.contextmanager
def changed(host: Host, command: str, undo: str) -> Iterator[None]:
    """Changes the host's network for a while. Skips the test where this kernel has not what it takes."""
    try:
        host.run(command.split())
    except (AssertionError, subprocess.SubprocessError) as error:
        pytest.skip(f"{command}: {error}")
    try:
        yield
    finally:
        host.run(undo.split())
