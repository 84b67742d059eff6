"""How ranks share the cores that this process may use."""

from __future__ import annotations

import os

from epruntime.worker.cores import usable_cores

__all__ = ["THREAD_VARIABLES", "thread_environment", "threads_each", "usable_cores"]

#: variables that thread pools read when their library loads.
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


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
