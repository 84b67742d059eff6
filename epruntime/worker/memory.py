"""Memory of a rank: how much is free on this host, how much this process holds, and giving it back."""

from __future__ import annotations

import ctypes
import gc
import logging
import resource
import sys
from pathlib import Path

logger = logging.getLogger("epruntime.worker.memory")


def free_memory_bytes(root: Path = Path("/")) -> int:
    """Bytes that this process can still take without pushing anybody out (Linux).

    The least of what the kernel calls available and of the room left in each memory control group
    that holds this process (versions 1 and 2), where page cache that can be dropped counts as room.

    Args:
        root: where `proc` and `sys` are; for tests.
    """
    free = _kilobytes(root / "proc/meminfo", "MemAvailable:")
    for limit_file, usage_file, cache_key in _group_files(root):
        try:
            limit = limit_file.read_text().strip()
            if limit == "max":
                continue
            cache = _number(limit_file.parent / "memory.stat", cache_key)
            free = min(free, int(limit) - int(usage_file.read_text()) + cache)
        except FileNotFoundError:
            continue  # this level has no memory controller, or the path is outside this container's view
    return max(free, 0)


def resident_memory_bytes(root: Path = Path("/proc/self")) -> int:
    """`rss` of this process in bytes, as the kernel keeps it: quick, and off by some pages."""
    return int((root / "statm").read_text().split()[1]) * resource.getpagesize()


def process_memory_bytes(root: Path = Path("/proc/self")) -> dict[str, int]:
    """`rss` and `pss` (shared pages divided by their users) of this process, bytes.

    The kernel looks at every page for it, so it takes longer the more the process holds.
    """
    rollup = root / "smaps_rollup"
    return {"rss": _kilobytes(rollup, "Rss:"), "pss": _kilobytes(rollup, "Pss:")}


def give_back() -> None:
    """Collects what is unreachable and returns free heap pages to the system (glibc keeps them otherwise)."""
    gc.collect()
    if sys.platform != "linux":
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is None:
        logger.debug("this C library has no malloc_trim: freed memory may stay with the process")
    else:
        trim(0)


def _group_files(root: Path) -> list[tuple[Path, Path, str]]:
    """(limit, usage, key of droppable cache in memory.stat) of this process's groups and all above them."""
    membership = root / "proc/self/cgroup"
    if not membership.exists():
        return []
    files = []
    for line in membership.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            mount, names = root / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            mount = root / "sys/fs/cgroup/memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        parts = [part for part in path.split("/") if part]
        for depth in range(len(parts), -1, -1):
            level = mount.joinpath(*parts[:depth])
            files.append((level / names[0], level / names[1], names[2]))
    return files


def _number(path: Path, key: str) -> int:
    """The integer after `key` in a file of "key value" lines; 0 if it is not there."""
    for line in path.read_text().splitlines():
        words = line.split()
        if words and words[0] == key:
            return int(words[1])
    return 0


def _kilobytes(path: Path, key: str) -> int:
    return _number(path, key) * 1024
