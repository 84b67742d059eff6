"""How many cores this process may use."""

from __future__ import annotations

import math
import os
from pathlib import Path


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
