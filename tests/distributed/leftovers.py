"""What a test may leave behind on this machine, and does not: processes, sockets, shared memory, temporary files."""

from __future__ import annotations

import contextlib
import gc
import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from epruntime.testing.patience import PATIENCE_S


@dataclass(frozen=True)
class Leftovers:
    """What there is now of things that a test could leave behind."""

    processes: frozenset[tuple[int, float]]
    files: frozenset[str]
    shared_memory: frozenset[str]
    descriptors: int

    @classmethod
    def now(cls) -> Leftovers:
        me = psutil.Process()
        shared = Path("/dev/shm")
        return cls(
            # dead orphans, which this process may have adopted, are nothing that runs
            processes=frozenset((p.pid, p.create_time()) for p in me.children(recursive=True) if is_alive(p.pid)),
            files=frozenset(str(p) for p in Path(tempfile.gettempdir()).iterdir()),
            shared_memory=frozenset(p.name for p in shared.iterdir()) if shared.is_dir() else frozenset(),
            descriptors=me.num_fds(),
        )

    def grown_by(self, *, seconds: float = PATIENCE_S / 2, descriptors: bool = True) -> dict[str, Any]:
        """What is there and was not in `self`, after it has had up to `seconds` to go away.

        `descriptors`: count this process's open files too.
        """
        deadline = time.monotonic() + seconds
        while True:
            gc.collect()
            now = Leftovers.now()
            grown: dict[str, Any] = {
                name: new
                for name in ("processes", "files", "shared_memory")
                if (new := getattr(now, name) - getattr(self, name))
            }
            # another program of this machine may use shared memory meanwhile
            if "shared_memory" in grown and not (grown["shared_memory"] - _held_by_strangers()):
                del grown["shared_memory"]
            if descriptors and now.descriptors > self.descriptors:
                grown["descriptors"] = now.descriptors - self.descriptors
            if not grown or time.monotonic() > deadline:
                return grown
            time.sleep(0.05)


def _held_by_strangers() -> set[str]:
    """Names in /dev/shm that a living process which does not descend from this one has open or mapped."""
    ours = {os.getpid(), *(p.pid for p in psutil.Process().children(recursive=True))}
    held = set()
    for pid in set(psutil.pids()) - ours:
        with contextlib.suppress(OSError):  # ended meanwhile, or not ours to look at
            links = [str(link.readlink()) for link in Path(f"/proc/{pid}/fd").iterdir()]
            mapped = [line.split(maxsplit=5)[-1] for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
            held |= {path.removeprefix("/dev/shm/") for path in links + mapped if path.startswith("/dev/shm/")}
    return held


def is_alive(pid: int) -> bool:
    """True while the process runs or sleeps; a zombie is dead."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_dead(pids: list[int], seconds: float = PATIENCE_S / 2) -> list[int]:
    """Those of `pids` that are still alive after at most `seconds`."""
    deadline = time.monotonic() + seconds
    while (alive := [pid for pid in pids if is_alive(pid)]) and time.monotonic() < deadline:
        time.sleep(0.02)
    return alive
