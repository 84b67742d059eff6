"""What scheduling costs, against what one Python object per token would cost on the same machine at the same time."""

import statistics
import time

import pytest

from epruntime.engine import kv_cache
from epruntime.engine.token_updates import TokenUpdate
from epruntime.testing.mirrored_kv import native_kv_cache
from epruntime.testing.scheduler_load import SchedulerLoad

#: times the yardstick, three times what is printed on an idle machine as on an overloaded one
BOUNDS = {("c++", "decode"): 1.5, ("c++", "churn"): 3.0, ("python", "decode"): 4.5, ("python", "churn"): 7.5}

NUM_GROUPS, NUM_SEQS, NUM_STEPS = 16, 128, 60

needs_native = pytest.mark.skipif(native_kv_cache() is None, reason="the C++ extension is not built")


def yardstick_ms() -> float:
    """CPU milliseconds for one TokenUpdate per sequence of all groups, looked up and kept by rid."""
    rids = list(range(10_000, 10_000 + NUM_GROUPS * NUM_SEQS))
    kept: dict[int, list[TokenUpdate]] = {rid: [] for rid in rids}
    start = time.process_time()
    for rid in rids:
        kept[rid].append(TokenUpdate(rid, 1, 0))
    return 1e3 * (time.process_time() - start)


@pytest.mark.parametrize("books", [pytest.param("c++", marks=needs_native), "python"])
@pytest.mark.parametrize("load", ["decode", "churn"])
def test_a_step_costs_little_more_than_its_tokens(load, books, monkeypatch):
    """CPU time, compared within each step and then by the median: other processes slow both sides alike."""
    if books == "python":
        monkeypatch.setattr(kv_cache, "_native", lambda: None)
    running = SchedulerLoad(churn=load == "churn", num_groups=NUM_GROUPS, num_seqs=NUM_SEQS, num_steps=NUM_STEPS)
    running.warm_up()
    ratios = []
    for _ in range(NUM_STEPS):
        cost = running.step()
        ratios.append(cost.scheduling / yardstick_ms())
    print(f"{load}, books in {books}: {statistics.median(ratios):.2f} times the yardstick")
    assert statistics.median(ratios) < BOUNDS[books, load]


def test_decodes_that_merely_continue_are_in_no_plan():
    running = SchedulerLoad(churn=False, num_groups=1, num_seqs=64, num_steps=64)
    running.warm_up()
    granted = 0
    for _ in range(32):
        running.step()
        flight = running.schedulers[0]._in_flight[-1]
        assert not any((flight.new, flight.prefill, flight.hold, flight.pieces))
        granted += len(flight.blocks)
    assert granted == 2 * 64  # one block per sequence and 16 steps
