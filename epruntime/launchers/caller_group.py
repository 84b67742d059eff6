"""The Ray placement group of whoever calls, where there is one."""

from __future__ import annotations

import dataclasses
import sys

from epruntime.config import ParallelConfig


def callers_group(launcher: object, given: object | None) -> object | None:
    """The placement group in which `launcher` is to start ranks: the given one; else, with "ray", that of the Ray task
    or actor that this thread runs; else None.

    To be called on the caller's own thread, before anything goes to another: Ray does not know a task's group there.
    """
    if given is not None or launcher != "ray" or "ray" not in sys.modules:
        return given
    from epruntime.launchers.ray_group import current_group

    return current_group()


def with_callers_group(parallel: ParallelConfig) -> ParallelConfig:
    """The settings with `callers_group`."""
    group = callers_group(parallel.launcher, parallel.placement_group)
    return dataclasses.replace(parallel, placement_group=group)
