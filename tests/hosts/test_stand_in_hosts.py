"""Stand-in hosts are told apart by what tells real ones apart, and nothing of them stays."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from epruntime.testing import hosts as hosts_module
from epruntime.testing.hosts import HostsUnavailable, StandInHosts
from epruntime.testing.patience import PATIENCE_S

RECEIVER = """
import socket, sys
listener = socket.create_server(("0.0.0.0", 7000))
print("listening", flush=True)
connection, peer = listener.accept()
total = 0
while data := connection.recv(65536):
    total += len(data)
print(peer[0], total, flush=True)
"""
SENDER = """
import socket, sys
with socket.create_connection((sys.argv[1], 7000), timeout=float(sys.argv[3])) as s:
    s.settimeout(float(sys.argv[3]))
    s.sendall(bytes(int(sys.argv[2])))
"""


def alive(pids: list[int], seconds: float = PATIENCE_S / 2) -> list[int]:
    """Those of `pids` that still run after so many seconds at most."""
    deadline = time.monotonic() + seconds
    while True:
        left = [pid for pid in pids if _state(pid) not in ("", "Z")]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.02)


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def test_hosts_share_nothing_but_files():
    with StandInHosts() as (a, b):
        kinds = ("net", "uts", "ipc", "pid", "mnt")
        for kind in kinds:
            assert len({Path(f"/proc/{pid}/ns/{kind}").stat().st_ino for pid in (a.pid, b.pid, os.getpid())}) == 3, kind
        facts = "hostname; cat /proc/sys/kernel/random/boot_id; ls /sys/class/net; ls /dev/shm; echo $TMPDIR"
        seen = [host.run(["sh", "-c", facts]).stdout.split("\n") for host in (a, b)]
        assert [lines[0] for lines in seen] == ["host-a", "host-b"]
        boot_ids = {Path("/proc/sys/kernel/random/boot_id").read_text().strip(), seen[0][1], seen[1][1]}
        assert len(boot_ids) == 3
        assert seen[0][2:] == ["eth0", "lo", "tmp", "/dev/shm/tmp", ""]
        # one cannot see the other's shared memory, processes and listeners
        a.run(["sh", "-c", "echo secret > /dev/shm/segment"])
        assert a.path("/dev/shm/segment").read_text() == "secret\n"
        assert b.run(["cat", "/dev/shm/segment"], check=False).returncode != 0
        assert not Path("/dev/shm/segment").exists()
        with a.popen(["sleep", "60"]) as sleeper:
            listed = b.run(["ls", "/proc"]).stdout.split()
            assert len([entry for entry in listed if entry.isdigit()]) == 2  # its first process, and ls
            assert len(a.processes()) == 1
            sleeper.terminate()
        assert sleeper.returncode == -signal.SIGTERM
        # names resolve
        resolve = "import socket; print(socket.gethostbyname(socket.gethostname()), socket.gethostbyname('host-a'))"
        assert b.run([sys.executable, "-S", "-c", resolve]).stdout.split() == [b.address, a.address]


def test_the_wire_is_counted_and_can_be_cut():
    size = 3_000_000
    with StandInHosts() as hosts:
        a, b = hosts
        before = a.bytes_sent, a.bytes_received, b.bytes_received
        with b.popen([sys.executable, "-S", "-c", RECEIVER], stdout=subprocess.PIPE, text=True) as receiver:
            assert receiver.stdout.readline() == "listening\n"
            a.run([sys.executable, "-S", "-c", SENDER, b.address, str(size), "10"])
            assert receiver.stdout.readline().split() == [a.address, str(size)]
        # payload, and at most a tenth of headers
        assert size < a.bytes_sent - before[0] < 1.1 * size
        assert size < b.bytes_received - before[2] < 1.1 * size
        assert a.bytes_received - before[1] < 0.1 * size

        hosts.link_down()
        done = a.run([sys.executable, "-S", "-c", SENDER, b.address, "1", "0.5"], check=False)
        assert "timed out" in done.stdout or "No route to host" in done.stdout, done.stdout
        assert b.address in b.run(["ip", "addr"]).stdout  # the cable is out; the host keeps its address
        hosts.link_up()
        with b.popen([sys.executable, "-S", "-c", RECEIVER], stdout=subprocess.PIPE, text=True) as receiver:
            assert receiver.stdout.readline() == "listening\n"
            a.run([sys.executable, "-S", "-c", SENDER, b.address, "5", "10"])
            assert receiver.stdout.readline().split() == [a.address, "5"]


def test_three_hosts_reach_each_other_and_runs_do_not_meet():
    names = ("one", "two", "three")
    with StandInHosts(names) as hosts, StandInHosts(names) as others:
        for receiver_host, sender_host in ((hosts[0], hosts[2]), (hosts[1], hosts[0])):
            with receiver_host.popen([sys.executable, "-S", "-c", RECEIVER], stdout=subprocess.PIPE, text=True) as it:
                assert it.stdout.readline() == "listening\n"
                sender_host.run([sys.executable, "-S", "-c", SENDER, receiver_host.address, "9", "10"])
                assert it.stdout.readline().split() == [sender_host.address, "9"]
        # the same addresses on the other network: nobody listens there
        refused = others[2].run([sys.executable, "-S", "-c", SENDER, others[0].address, "9", "5"], check=False)
        assert "Connection refused" in refused.stdout


def test_a_power_cut_ends_all_of_one_host():
    with StandInHosts() as (a, b):
        daemon = "setsid sleep 100 & setsid sleep 100 & exit 0"  # what daemons do: their parent is gone
        for host in (a, b):
            host.run(["sh", "-c", daemon], stdout=subprocess.DEVNULL)
        lost, kept = b.processes(), a.processes()
        assert len(lost) == len(kept) == 2
        b.end()
        assert alive(lost) == []
        assert alive(kept, 0.0) == kept
        assert a.run(["hostname"]).stdout == "host-a\n"
        b.end()  # again is no error


def _traces() -> set[str]:
    """Shared memory and network devices of this host."""
    devices = Path("/proc/net/dev").read_text().splitlines()[2:]
    return {path.name for path in Path("/dev/shm").iterdir()} | {line.split(":")[0].strip() for line in devices}


@pytest.mark.parametrize("how", ["raise", "kill"])
def test_nothing_stays_when_the_program_fails_or_is_killed(how):
    program = f"""
import os, signal, subprocess, sys
from epruntime.testing.hosts import StandInHosts
with StandInHosts() as hosts:
    processes = [host.popen(["sleep", "100"]) for host in hosts]
    pids = []
    for host in hosts:
        while not (found := host.processes()):
            pass
        pids += [host.pid, *found]
    print(*pids, flush=True)
    {"raise ValueError" if how == "raise" else "os.kill(os.getpid(), signal.SIGKILL)"}
"""
    before = _traces()
    done = subprocess.run(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.returncode == (1 if how == "raise" else -signal.SIGKILL)
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == 4
    assert alive(pids) == []
    deadline = time.monotonic() + PATIENCE_S / 2  # a kernel takes namespaces down in its own time
    while (left := _traces() - before) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left


def test_output_status_and_timeout_of_a_program():
    with StandInHosts(("only",)) as (host,):
        done = host.run(["sh", "-c", "echo out; echo $GREETING >&2; pwd; exit 3"], check=False, cwd="/",
                        environment={"GREETING": "hello"})  # fmt: skip
        assert (done.returncode, done.stdout) == (3, "out\nhello\n/\n")
        with pytest.raises(AssertionError, match=r"on only ended with status 3:\nout"):
            host.run(["sh", "-c", "echo out; exit 3"])
        with pytest.raises(subprocess.TimeoutExpired):
            host.run(["sleep", "60"], timeout_s=0.3)
        assert alive(host.processes()) == []


@pytest.mark.without_hosts
class TestWhyNot:
    """The reasons for a skip, in places that have what these tests lack."""

    def test_not_root(self, monkeypatch):
        monkeypatch.setattr(os, "geteuid", lambda: 1000)
        with pytest.raises(HostsUnavailable, match="need root"), StandInHosts():
            pass

    def test_no_tools(self, monkeypatch, tmp_path):
        monkeypatch.setenv("PATH", str(tmp_path))
        with pytest.raises(HostsUnavailable, match=r"not installed: ip, unshare, .*iproute2"), StandInHosts():
            pass

    def test_not_permitted(self, monkeypatch, tmp_path):
        for tool in ("ip", "unshare", "nsenter", "mount", "env"):
            path = tmp_path / tool
            path.write_text("#!/bin/sh\necho 'unshare failed: Operation not permitted' >&2\nexit 1\n")
            path.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
        monkeypatch.setattr(os, "geteuid", lambda: 0)
        hosts_module.why_not.cache_clear()
        try:
            reason = hosts_module.why_not()
        finally:
            hosts_module.why_not.cache_clear()
        assert reason is not None
        assert "unshare failed: Operation not permitted" in reason
