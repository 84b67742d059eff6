"""How many cores this process may use, and how ranks share them."""

from __future__ import annotations

import math
import os
from pathlib import Path

#: variables that thread pools read when their library loads.
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def usable_cores(cpu_max: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """Cores of this process's affinity mask, at most what the container's CPU quota (cgroup v2) lets it use."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    try:
        quota, period = cpu_max.read_text().split()
    except (OSError, ValueError):
        return cores  # no cgroup v2, or no limit set at this level
    if quota != "max":
        cores = min(cores, max(1, math.ceil(int(quota) / int(period))))
    return cores


def threads_each(cores: int, num_ranks: int) -> int:
    """Threads per rank when `num_ranks` share `cores`; at least one, then they share cores too."""
    return max(1, cores // num_ranks)


def thread_environment(threads: int) -> dict[str, str]:
    """Environment that makes native thread pools of a rank as large as its share, and lets idle threads sleep.

    By default OpenMP threads spin for milliseconds at the end of each parallel region. Where something else needs the
    core of one of them, the others then burn theirs in waiting, and a step can take many times as long. A wait policy
    that the user has set is kept.
    """
    environment = dict.fromkeys(THREAD_VARIABLES, str(threads))
    if not os.environ.keys() & {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"}:
        environment["OMP_WAIT_POLICY"] = "PASSIVE"
    return environment
