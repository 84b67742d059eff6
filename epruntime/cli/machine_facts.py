"""Facts about the machine: system, CPU, memory, GPUs, network, limits. Each is a function to call; Linux first."""

from __future__ import annotations

import fcntl
import os
import platform
import resource
import shutil
import socket
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

_GIB = 2**30
_PROC, _SYS = Path("/proc"), Path("/sys")
_SIOCGIFADDR = 0x8915  # linux/sockios.h
#: CPU features that kernels here or in torch choose by
_FEATURES = (
    "avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512_vnni", "avx512_bf16", "amx_bf16", "asimd", "bf16",
    "sve",
)  # fmt: skip


def _os_release() -> str:
    for line in Path("/etc/os-release").read_text().splitlines():
        if line.startswith("PRETTY_NAME="):
            return line.partition("=")[2].strip('"')
    raise LookupError("/etc/os-release names no system")


def _compiler() -> str:
    command = os.environ.get("CXX") or "c++"
    if shutil.which(command.split()[0]) is None:
        return f"none ({command} is not there)"
    return _first_line([*command.split(), "--version"])


def _nvcc() -> str:
    return _last_line(["nvcc", "--version"]) if shutil.which("nvcc") else "none (nvcc is not there)"


def _container() -> str:
    if Path("/.dockerenv").exists():
        return "Docker"
    if Path("/run/.containerenv").exists():
        return "Podman"
    return "Kubernetes" if "KUBERNETES_SERVICE_HOST" in os.environ else "no sign of one"


def _cpu_model() -> str:
    fields = _cpuinfo()
    return fields.get("model name") or f"{fields.get('CPU implementer', '?')}, part {fields.get('CPU part', '?')} (ARM)"


def _cpu_features() -> list[str] | str:
    fields = _cpuinfo()
    flags = set((fields.get("flags") or fields.get("Features") or "").split())
    return " ".join(name for name in _FEATURES if name in flags) or "none of those that matter here"


def _cpuinfo() -> dict[str, str]:
    """The first processor of /proc/cpuinfo."""
    first = (_PROC / "cpuinfo").read_text().split("\n\n", 1)[0]
    return {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in first.splitlines())}


def _affinity() -> str:
    return f"{len(os.sched_getaffinity(0))}: {ranges(os.sched_getaffinity(0))}"


def ranges(numbers: set[int]) -> str:
    """{0, 1, 2, 5} -> "0-2,5"."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][-1] + 1:
            parts[-1] = [parts[-1][0], number]
        else:
            parts.append([number])
    return ",".join("-".join(map(str, part)) for part in parts)


def _group(name_v2: str, *names_v1: str) -> str:
    """Value of a control group file at the top of what this process sees; version 2, else version 1."""
    for path in (_SYS / "fs/cgroup" / name_v2, *(_SYS / "fs/cgroup" / name for name in names_v1)):
        if path.exists():
            return path.read_text().strip()
    return "none set at this level"


def _memory(key: str) -> str:
    for line in (_PROC / "meminfo").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return f"{int(line.split()[1]) * 1024 / _GIB:.1f} GiB"
    raise LookupError(f"/proc/meminfo has no {key}")


def _numa() -> list[str]:
    nodes = sorted((_SYS / "devices/system/node").glob("node[0-9]*"), key=lambda node: int(node.name[4:]))
    if not nodes:
        return ["one node"]
    return [f"{node.name}: cores {(node / 'cpulist').read_text().strip()}, {_node_memory(node)}" for node in nodes]


def _node_memory(node: Path) -> str:
    for line in (node / "meminfo").read_text().splitlines():
        if "MemTotal:" in line:
            return f"{int(line.split()[-2]) * 1024 / _GIB:.1f} GiB"
    return "memory unknown"


def _shm() -> str:
    stat = os.statvfs("/dev/shm")
    return f"{stat.f_bavail * stat.f_frsize / _GIB:.1f} GiB free of {stat.f_blocks * stat.f_frsize / _GIB:.1f} GiB"


def _gpus() -> list[str] | str:
    if shutil.which("nvidia-smi") is None:
        return "none (nvidia-smi is not there)"
    query = "--query-gpu=index,name,memory.total,memory.used,driver_version,compute_cap"
    return _output(["nvidia-smi", query, "--format=csv,noheader"]).splitlines()


def _gpu_links() -> list[str] | str:
    if shutil.which("nvidia-smi") is None:
        return "none"
    return _output(["nvidia-smi", "topo", "-m"]).splitlines()


def _driver() -> str:
    path = _PROC / "driver/nvidia/version"
    return path.read_text().splitlines()[0] if path.exists() else "none loaded"


def _interfaces() -> dict[str, str]:
    """Name -> state, MTU, speed and addresses."""
    six: dict[str, list[str]] = {}
    if (_PROC / "net/if_inet6").exists():
        for line in (_PROC / "net/if_inet6").read_text().splitlines():
            words = line.split()
            six.setdefault(words[-1], []).append(socket.inet_ntop(socket.AF_INET6, bytes.fromhex(words[0])))
    found = {}
    for _, name in socket.if_nameindex():
        folder = _SYS / "class/net" / name
        facts = [_file(folder / "operstate"), f"MTU {_file(folder / 'mtu')}"]
        speed = _file(folder / "speed")
        if speed.isdigit():
            facts.append(f"{speed} Mbit/s")
        found[name] = ", ".join(facts + _four(name) + six.get(name, []))
    return found


def _four(name: str) -> list[str]:
    """The first IPv4 address of an interface, if it has one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            answer = fcntl.ioctl(sock.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        except OSError:
            return []  # it has none
    return [socket.inet_ntoa(answer[20:24])]


def _file(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return "unknown"  # a speed cannot be read while a link is down, for example


def _infiniband() -> str:
    folder = _SYS / "class/infiniband"
    return ", ".join(sorted(path.name for path in folder.iterdir())) if folder.is_dir() else "none"


def _limit(kind: int) -> str:
    def words(value: int) -> str:
        return "unlimited" if value == resource.RLIM_INFINITY else str(value)

    soft, hard = resource.getrlimit(kind)
    return f"{words(soft)} (hard: {words(hard)})"


def _first_line(command: list[str]) -> str:
    return _output(command).splitlines()[0]


def _last_line(command: list[str]) -> str:
    return _output(command).splitlines()[-1]


def _output(command: list[str]) -> str:
    return subprocess.run(
        command, capture_output=True, text=True, timeout=20, check=True, stdin=subprocess.DEVNULL
    ).stdout.strip()


SYSTEM: dict[str, Callable[[], Any]] = {
    "platform": platform.platform,
    "distribution": _os_release,
    "libc": lambda: " ".join(platform.libc_ver()) or "unknown (no glibc)",
    "compiler": _compiler,
    "nvcc": _nvcc,
    "container": _container,
    "host name": socket.gethostname,
}

CPU: dict[str, Callable[[], Any]] = {
    "model": _cpu_model,
    "features": _cpu_features,
    "cores": os.cpu_count,
    "affinity": _affinity,
    "control group quota": lambda: _group("cpu.max", "cpu/cpu.cfs_quota_us"),
    "load": lambda: " ".join(f"{load:.2f}" for load in os.getloadavg()),
}

MEMORY: dict[str, Callable[[], Any]] = {
    "total": lambda: _memory("MemTotal"),
    "available": lambda: _memory("MemAvailable"),
    "swap": lambda: _memory("SwapTotal"),
    "control group limit": lambda: _group("memory.max", "memory/memory.limit_in_bytes"),
    "control group use": lambda: _group("memory.current", "memory/memory.usage_in_bytes"),
    "NUMA": _numa,
    "/dev/shm": _shm,
}

GPU: dict[str, Callable[[], Any]] = {"GPUs": _gpus, "driver": _driver, "links": _gpu_links}

NETWORK: dict[str, Callable[[], Any]] = {"interfaces": _interfaces, "InfiniBand": _infiniband}

LIMITS: dict[str, Callable[[], Any]] = {
    "open files": lambda: _limit(resource.RLIMIT_NOFILE),
    "locked memory, bytes": lambda: _limit(resource.RLIMIT_MEMLOCK),
    "processes": lambda: _limit(resource.RLIMIT_NPROC),
    "address space, bytes": lambda: _limit(resource.RLIMIT_AS),
    "stack, bytes": lambda: _limit(resource.RLIMIT_STACK),
    "core file, bytes": lambda: _limit(resource.RLIMIT_CORE),
}
