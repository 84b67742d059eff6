"""How long a test waits, and how soon is soon, on a machine that others use as on a quiet one.

What comes by itself is waited for with PATIENCE_S: that costs nothing where it comes, and shows as much. A bound that
tells one cause from another (an end by a rank's death from the end by the step's deadline) is `soon`.
"""

from __future__ import annotations

import os
from pathlib import Path

#: seconds; far beyond what anything here takes on two busy cores.
PATIENCE_S = 60.0


def soon(seconds: float) -> float:
    """`seconds` where every process that wants a core has one; as many times more as processes have to share one.

    Counts the last minute's load and this moment's, whichever is more.
    """
    cores = len(os.sched_getaffinity(0))
    try:
        minute, _, _, now, _ = Path("/proc/loadavg").read_text().split()
        wanting = max(float(minute), float(now.partition("/")[0]))
    except (OSError, ValueError):  # no Linux
        wanting = os.getloadavg()[0]
    return seconds * max(1.0, wanting / cores)
