"""A deadline for code that may never end: it is cut off, what ends in time is left alone, and others go on."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from epruntime.engine.time_limit import Overdue, time_limit


def _loop(seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            sum(range(100))
        except Exception:  # noqa: BLE001  a template's filters may swallow what they like, but not this
            continue


def test_a_loop_is_cut_off_and_its_thread_works_on() -> None:
    with ThreadPoolExecutor(max_workers=1) as pool:

        def bounded() -> str:
            with time_limit(0.2):
                _loop()
            return "ended"

        began = time.monotonic()
        with pytest.raises(Overdue):
            pool.submit(bounded).result(timeout=30)
        assert time.monotonic() - began < 30
        names = {pool.submit(lambda: threading.current_thread().name).result(timeout=10) for _ in range(50)}
        assert len(names) == 1


def test_what_ends_in_time_is_left_alone() -> None:
    for _ in range(300):
        with time_limit(0.5):
            pass
    time.sleep(0.8)  # their deadlines pass


@pytest.mark.skipif(not hasattr(time, "pthread_getcpuclockid"), reason="threads have no clock of their own here")
def test_waiting_is_not_counted() -> None:
    """As on a machine under load: it is the time on a processor that counts."""
    with time_limit(0.2):
        time.sleep(0.6)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_other_errors_pass(error) -> None:
    with pytest.raises(error), time_limit(5):
        raise error


def test_the_edge_is_one_or_the_other() -> None:
    """Blocks that end just as their deadline passes: Overdue comes out of the block or not at all, never later."""
    outcomes = []

    def many() -> None:
        for i in range(60):
            limit = 0.002 + i * 1e-5
            try:
                with time_limit(limit):
                    _loop(limit)
                outcomes.append("ended")
            except Overdue:
                outcomes.append("overdue")
            _loop(0.002)  # where a late one would arrive

    threads = [threading.Thread(target=many) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(outcomes) == 180


def test_several_threads_have_deadlines_of_their_own() -> None:
    def bounded(seconds: float) -> float:
        began = time.monotonic()
        with pytest.raises(Overdue), time_limit(seconds):
            _loop()
        return time.monotonic() - began

    with ThreadPoolExecutor(max_workers=4) as pool:
        limits = (0.4, 0.1, 0.3, 0.2)
        took = list(pool.map(bounded, limits))
    assert all(limit <= seconds < limit + 20 for limit, seconds in zip(limits, took, strict=True))
