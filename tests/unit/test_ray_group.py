"""RayGroup waits for room: it warns late, in words of a wait, and fails in words of a failure."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from epruntime.errors import LaunchError

ray_group = pytest.importorskip("epruntime.launchers.ray_group", reason="needs ray")

TEXT = "asked for 2 ranks of 1 CPU each. The cluster has: nothing"


class _SameThread:
    async def run(self, function: Callable[[], Any]) -> Any:
        return function()


def _wait(monkeypatch: pytest.MonkeyPatch, *, room_after_s: float, timeout_s: float, ray_start_s: float) -> None:
    """Reserves on a clock of its own, on which each look takes half a second."""
    clock = SimpleNamespace(now=ray_start_s)
    monkeypatch.setattr(ray_group, "time", SimpleNamespace(monotonic=lambda: clock.now, sleep=time.sleep))

    def look(*_: Any) -> str:
        clock.now += 0.5
        return "" if clock.now >= ray_start_s + room_after_s else TEXT

    group = ray_group.RayGroup(_SameThread(), device="cpu")
    monkeypatch.setattr(group, "_make", look)
    asyncio.run(group.reserve(2, threads_per_rank=1, timeout_s=timeout_s, began=0.0))


def test_room_that_comes_soon_after_a_slow_start_of_ray_is_no_matter_for_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "epruntime.launchers.ray_group"):
        _wait(monkeypatch, room_after_s=8, timeout_s=120, ray_start_s=20)
    assert not caplog.records


def test_a_long_wait_is_told_once_as_a_wait(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "epruntime.launchers.ray_group"):
        _wait(monkeypatch, room_after_s=40, timeout_s=120, ray_start_s=20)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage() == f"no room yet after 36 s of 120 s: {TEXT}"  # 20, and the first look past 15


def test_the_end_is_told_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LaunchError) as caught:
        _wait(monkeypatch, room_after_s=1000, timeout_s=30, ray_start_s=20)
    assert str(caught.value) == f"no room within 30 s: {TEXT}"
