"""A dropped request's KV blocks are free as soon as no plan in flight may touch them, whatever state it was in."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from epruntime.engine.request import RequestState
from epruntime.testing.scheduler_sim import SchedulerSim, make_spec

PROMPT = [1, 2, 3, 4, 5, 6]


def state_of(sim: SchedulerSim, rid: int) -> RequestState:
    return sim.schedulers[0]._requests[rid].state


def waiting() -> tuple[SchedulerSim, int]:
    sim = SchedulerSim(max_num_seqs=1, late=True)
    sim.add(PROMPT, make_spec(max_tokens=4))
    rid = sim.add(PROMPT, make_spec(max_tokens=4))
    sim.send()
    return sim, rid


def prefilling() -> tuple[SchedulerSim, int]:
    sim = SchedulerSim(max_num_batched_tokens=4, late=True)
    rid = sim.add(PROMPT, make_spec(max_tokens=4, prompt_logprobs=0))
    sim.send()
    return sim, rid


def decoding() -> tuple[SchedulerSim, int]:
    sim = SchedulerSim(late=True)
    rid = sim.add(PROMPT, make_spec(max_tokens=6))
    sim.send()
    sim.send()
    return sim, rid


def ending() -> tuple[SchedulerSim, int]:
    sim = SchedulerSim(late=True)
    rid = sim.add(PROMPT, make_spec(max_tokens=2))
    sim.send()
    sim.send()
    return sim, rid


def _two_in_a_cache_for_less() -> tuple[SchedulerSim, int, int]:
    """4 blocks of 2; both requests want a third one in step 2: the last arrived is preempted, the first one waits."""
    sim = SchedulerSim(block_size=2, num_kv_blocks=4, max_num_seqs=2, late=True)
    first = sim.add([1, 2, 3], make_spec(max_tokens=4))
    last = sim.add([4, 5, 6], make_spec(max_tokens=4))
    sim.send()
    sim.send()
    sim.collect()
    (plan,) = sim.send()
    assert (plan.drop, plan.hold) == ((last,), (first,))
    return sim, first, last


def held() -> tuple[SchedulerSim, int]:
    sim, first, _ = _two_in_a_cache_for_less()
    return sim, first


def preempted() -> tuple[SchedulerSim, int]:
    sim, _, last = _two_in_a_cache_for_less()
    return sim, last


STATES = {
    waiting: RequestState.WAITING,
    prefilling: RequestState.PREFILL,
    decoding: RequestState.DECODE,
    ending: RequestState.ENDING,
    held: RequestState.DECODE,
    preempted: RequestState.WAITING,
}


def release_all_but(sim: SchedulerSim, rid: int) -> None:
    for other in sim.live:
        if other != rid:
            sim.drop(other)


@pytest.mark.parametrize("reach", STATES, ids=lambda reach: reach.__name__)
def test_blocks_are_free_once_the_plans_in_flight_have_ended(reach: Callable[[], tuple[SchedulerSim, int]]) -> None:
    sim, rid = reach()
    assert state_of(sim, rid) is STATES[reach]
    scheduler, rank = sim.schedulers[0], sim.ranks[0]
    release_all_but(sim, rid)
    sim.drop(rid)
    while sim.num_in_flight:
        assert all(update.rid != rid for update in sim.collect())
    assert scheduler.num_free_kv_blocks == scheduler.num_kv_blocks  # not a step later
    assert (scheduler.num_running, scheduler.num_waiting) == (0, 0)
    # a plan for the rank's sake alone, exactly if the rank knows the request still or may do so
    assert not scheduler.has_work
    if scheduler.wants_plan:
        sim.send()
        sim.collect()
    assert rank.num_requests == 0
    assert not scheduler.wants_plan
    sim.finish()


@pytest.mark.parametrize("reach", STATES, ids=lambda reach: reach.__name__)
def test_the_next_plan_may_use_the_blocks(reach: Callable[[], tuple[SchedulerSim, int]]) -> None:
    """And the rank, which executes plans in order, has forgotten the request by then: FakeRank checks both."""
    sim, rid = reach()
    release_all_but(sim, rid)
    sim.drop(rid)
    while sim.num_in_flight:
        sim.collect()
    whole_cache = sim.schedulers[0].max_request_tokens - 1
    new = sim.add([7] * whole_cache, make_spec(max_tokens=1))
    (plan,) = sim.send()
    assert [n.rid for n in plan.new] == [new]
    assert len(plan.new[0].block_ids) == sim.schedulers[0].num_kv_blocks
    sim.collect()
    sim.finish()


def test_a_request_that_was_never_on_the_rank_makes_no_step() -> None:
    sim = SchedulerSim()
    rid = sim.add(PROMPT, make_spec(max_tokens=2))
    sim.drop(rid)
    assert not sim.schedulers[0].wants_plan


def test_log_probabilities_of_a_dropped_prompt_are_dropped_too() -> None:
    sim, rid = prefilling()
    sim.collect()
    request = sim.schedulers[0]._requests[rid]
    assert len(request.prompt_logprobs) == 4
    sim.send()
    sim.drop(rid)
    assert sim.collect() == []
    assert not sim.schedulers[0]._requests
    sim.finish()
