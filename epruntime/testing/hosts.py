"""StandInHosts: several hosts on this machine, told apart by all that tells real ones apart. Linux, as root.

switch (a bridge in a network namespace of its own) ==veth== eth0 of each host; a host = network, UTS, IPC, PID and
mount namespaces with its own host name, boot id, shared memory, /sys and /etc/hosts

Nothing of it has a name on this machine: namespaces and links live in the first process of each host, which ends when
this process does, even by SIGKILL, and takes all processes of the host along. So runs side by side cannot collide, and
nothing can be left behind.
"""

from __future__ import annotations

import contextlib
import functools
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from epruntime.testing.host_init import TEMPORARY

_INIT = Path(__file__).with_name("host_init.py")
_TOOLS = ("ip", "unshare", "nsenter", "mount", "env")
_READY_S, _END_S = 20.0, 10.0
_INTERFACE = "eth0"


class HostsUnavailable(RuntimeError):
    """Hosts cannot be made here; says why."""


class HostProcess(subprocess.Popen[Any]):
    """A process on a host. `pid` is that of the helper that entered the host; signals go to the program itself."""

    def send_signal(self, sig: int) -> None:
        if self.poll() is None:
            for pid in _children(self.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, sig)


class Host:
    """One host of a StandInHosts.

    Attributes:
        name: host name; address: IPv4 address on eth0, which the other hosts reach.
        pid: of its first process, as this process sees it.
        temporary: folder for temporary files on the host (in its shared memory); TMPDIR of its processes.
    """

    temporary = TEMPORARY

    def __init__(self, name: str, address: str, hosts_file: str) -> None:
        self.name, self.address = name, address
        self._unshare = subprocess.Popen(
            ["unshare", "--net", "--uts", "--ipc", "--pid", "--mount", "--fork", "--kill-child", "--mount-proc",
             sys.executable, "-I", "-S", str(_INIT), name, hosts_file],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        self.pid = 0

    def __repr__(self) -> str:
        return f"Host({self.name!r}, {self.address}, pid={self.pid})"

    def command(
        self, argv: Sequence[str], *, cwd: str | os.PathLike[str] | None = None, environment: Mapping[str, str] = {}
    ) -> list[str]:
        """The command line that runs `argv` on this host. Standard streams and exit status are passed through.

        Args:
            cwd: working directory; default: this process's own.
            environment: added to that of whoever runs it.
        """
        variables = [f"{name}={value}" for name, value in {"TMPDIR": self.temporary, **environment}.items()]
        enter = ["nsenter", "--target", str(self.pid), "--net", "--uts", "--ipc", "--pid", "--mount"]
        return [*enter, "--", "env", "-C", os.fspath(cwd or Path.cwd()), *variables, *argv]

    def popen(
        self,
        argv: Sequence[str],
        *,
        cwd: str | os.PathLike[str] | None = None,
        environment: Mapping[str, str] = {},
        **options: Any,
    ) -> HostProcess:
        """Starts a program on this host; `options` are those of subprocess.Popen."""
        return HostProcess(self.command(argv, cwd=cwd, environment=environment), **options)

    def run(
        self,
        argv: Sequence[str],
        *,
        timeout_s: float = 60.0,
        check: bool = True,
        cwd: str | os.PathLike[str] | None = None,
        environment: Mapping[str, str] = {},
        **options: Any,
    ) -> subprocess.CompletedProcess[str]:
        """Runs a program on this host to its end; its output is captured as text, standard error with it.

        Raises:
            AssertionError: with `check`, it failed; the message has its output.
            subprocess.TimeoutExpired: it was still running after `timeout_s` seconds, and was killed.
        """
        options = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT} | options
        with self.popen(argv, cwd=cwd, environment=environment, text=True, **options) as process:
            try:
                output, _ = process.communicate(timeout=timeout_s)
            except BaseException:
                process.kill()
                raise
        if check and process.returncode != 0:
            raise AssertionError(f"{argv} on {self.name} ended with status {process.returncode}:\n{output}")
        return subprocess.CompletedProcess(list(argv), process.returncode, output)

    def path(self, path: str | os.PathLike[str]) -> Path:
        """A file of this host as this process can open it."""
        return Path(f"/proc/{self.pid}/root", os.fspath(path).lstrip("/"))

    @property
    def bytes_sent(self) -> int:
        """Bytes that went out through eth0 so far, with all headers."""
        return self._counters()[8]

    @property
    def bytes_received(self) -> int:
        """Bytes that came in through eth0 so far, with all headers."""
        return self._counters()[0]

    def end(self) -> None:
        """Ends the host at once, as a power cut does: all its processes are killed, and its links are gone."""
        if self._unshare.poll() is None:
            for pid in _children(self._unshare.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, 9)
            self._wait()

    def processes(self) -> list[int]:
        """Pids of all its living processes but the first, as this process sees them."""
        namespace = Path(f"/proc/{self.pid}/ns/pid").stat().st_ino
        return [pid for pid in _pids() if pid != self.pid and _pid_namespace(pid) == namespace]

    def _start(self) -> None:
        """Waits until it is furnished."""
        assert self._unshare.stdout is not None
        assert self._unshare.stderr is not None
        readable, _, _ = select.select([self._unshare.stdout], [], [], _READY_S)
        if not readable or self._unshare.stdout.readline() != b"ready\n":
            self._unshare.kill()
            self._unshare.wait()
            words = self._unshare.stderr.read().decode(errors="replace").strip()
            raise HostsUnavailable(f"host {self.name} could not be made: {words or 'it did not answer'}")
        (self.pid,) = _children(self._unshare.pid)

    def _close(self) -> None:
        """Ends it in order: its first process leaves, and the kernel ends the others."""
        assert self._unshare.stdin is not None
        self._unshare.stdin.close()
        self._wait()

    def _wait(self) -> None:
        try:
            self._unshare.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._unshare.kill()  # takes the first process along
            self._unshare.wait()
        for stream in (self._unshare.stdin, self._unshare.stdout, self._unshare.stderr):
            if stream is not None:
                stream.close()

    def _counters(self) -> list[int]:
        for line in Path(f"/proc/{self.pid}/net/dev").read_text().splitlines():
            name, _, numbers = line.partition(":")
            if name.strip() == _INTERFACE:
                return [int(number) for number in numbers.split()]
        raise HostsUnavailable(f"host {self.name} has no {_INTERFACE}")


class StandInHosts:
    """Two or more hosts on one network. Use as a context manager; iterate or index it for the hosts.

        with StandInHosts() as (a, b):
            a.run(["ping", "-c1", b.address])

    Args:
        names: host names; they resolve on every host.
        network: first three numbers of the addresses; hosts are .1, .2, ...

    Raises:
        HostsUnavailable: not permitted, or a tool is missing; `why_not` tells without trying twice.
    """

    def __init__(self, names: Sequence[str] = ("host-a", "host-b"), *, network: str = "10.77.0") -> None:
        self._names, self._network = tuple(names), network
        self.hosts: tuple[Host, ...] = ()
        self._switch: Host | None = None

    def __enter__(self) -> StandInHosts:
        _check_tools()
        addresses = [f"{self._network}.{number}" for number in range(1, len(self._names) + 1)]
        lines = ["127.0.0.1 localhost", *(f"{a} {n}" for a, n in zip(addresses, self._names, strict=True))]
        try:
            self._switch = Host("switch", "", "127.0.0.1 localhost\n")
            pairs = zip(self._names, addresses, strict=True)
            self.hosts = tuple(Host(name, address, "\n".join(lines) + "\n") for name, address in pairs)
            for host in (self._switch, *self.hosts):
                host._start()
            self._connect()
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def __iter__(self) -> Iterator[Host]:
        return iter(self.hosts)

    def __getitem__(self, index: int) -> Host:
        return self.hosts[index]

    def link_down(self, index: int = -1) -> None:
        """Pulls the cable of a host out of the switch: its addresses and routes stay, and nothing gets through."""
        self._ip(self._the_switch, "link", "set", self._port(index), "down")

    def link_up(self, index: int = -1) -> None:
        """Puts it back."""
        self._ip(self._the_switch, "link", "set", self._port(index), "up")

    @property
    def _the_switch(self) -> Host:
        assert self._switch is not None
        return self._switch

    def _port(self, index: int) -> str:
        return f"port{index % len(self.hosts)}"

    def _connect(self) -> None:
        self._ip(self._the_switch, "link", "add", "bridge", "up", "type", "bridge")
        for index, host in enumerate(self.hosts):
            port = self._port(index)
            self._ip(
                self._the_switch, "link", "add", port, "up", "type", "veth",
                "peer", "name", _INTERFACE, "netns", str(host.pid),
            )  # fmt: skip
            self._ip(self._the_switch, "link", "set", port, "master", "bridge")
            self._ip(host, "addr", "add", f"{host.address}/24", "dev", _INTERFACE)
            self._ip(host, "link", "set", _INTERFACE, "up")

    def _ip(self, host: Host, *arguments: str) -> None:
        """`ip` in a host's network, but with this process's pids."""
        command = ["nsenter", "--target", str(host.pid), "--net", "--", "ip", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=_READY_S)
        if done.returncode != 0:
            raise HostsUnavailable(f"ip {' '.join(arguments)}: {done.stderr.strip()}")

    def _close(self) -> None:
        for host in (*self.hosts, *(() if self._switch is None else (self._switch,))):
            host._close()


@functools.cache
def why_not() -> str | None:
    """Why no stand-in hosts can be made here; None if they can. Tries once."""
    try:
        with StandInHosts():
            return None
    except HostsUnavailable as error:
        return str(error)


def _check_tools() -> None:
    if sys.platform != "linux":
        raise HostsUnavailable(f"namespaces are Linux's; this is {sys.platform}")
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing:
        raise HostsUnavailable(f"not installed: {', '.join(missing)} (packages iproute2 and util-linux)")
    if os.geteuid() != 0:
        raise HostsUnavailable("namespaces need root; this user is not")


def _children(pid: int) -> list[int]:
    """Pids of a process's children; a moment is given to one that was started just now."""
    for _ in range(100):
        with contextlib.suppress(OSError):
            found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
            if found:
                return [int(child) for child in found]
        time.sleep(0.01)
    return []


def _pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _pid_namespace(pid: int) -> int:
    """Inode of its pid namespace; 0 if it is gone or dead."""
    try:
        return Path(f"/proc/{pid}/ns/pid").stat().st_ino
    except OSError:
        return 0
