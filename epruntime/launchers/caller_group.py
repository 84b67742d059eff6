"""The Ray placement group of whoever calls, where there is one."""

from __future__ import annotations

import dataclasses
import sys

from epruntime.config import ParallelConfig


def with_callers_group(parallel: ParallelConfig) -> ParallelConfig:
    """The settings, with the placement group of the Ray task or actor that this thread runs, if ranks would be started
    by Ray and no group is given. To be called on the caller's own thread, before anything goes to another.
    """
    if parallel.launcher != "ray" or parallel.placement_group is not None or "ray" not in sys.modules:
        return parallel
    from epruntime.launchers.ray_group import current_group

    return dataclasses.replace(parallel, placement_group=current_group())
