"""GroupScheduler: plans worked out on paper, one rule at a time. Random schedules: test_scheduler_properties.py."""

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from epruntime.errors import InvalidRequestError, ProtocolError
from epruntime.plan import FINISH_ERROR, FINISH_LENGTH, FINISH_STOP, StepPlan
from epruntime.testing.scheduler_sim import VOCAB_SIZE, SchedulerSim, make_spec, unbatched


def is_empty(plan: StepPlan) -> bool:
    return plan == StepPlan(step=plan.step)


def seed_that_stops_at(prompt: list[int], num_output: int, max_tokens: int) -> tuple[int, int]:
    """(seed, stop id) with which the request stops at exactly its `num_output`-th token."""
    for seed in range(1000):
        tokens, _ = unbatched(prompt, make_spec(max_tokens=max_tokens, seed=seed), VOCAB_SIZE)
        stop = tokens[num_output - 1]
        if stop not in tokens[: num_output - 1]:
            return seed, stop
    raise AssertionError("no such seed")


def test_a_decode_is_named_only_where_it_enters_a_block():
    sim = SchedulerSim(depth=1, block_size=4, num_kv_blocks=8)
    rid = sim.add([1, 2, 3, 4, 5], make_spec(max_tokens=8))
    plans = []
    while sim.has_work:
        plans += sim.send()
        sim.collect()
    first, *decodes = plans
    assert (first.new[0].block_ids, first.prefill) == ((0, 1), {rid: 5})  # 5 tokens: 2 blocks, positions 0..7
    # step s writes position 4 + s: position 8 is the first of the third block, position 11 the last one written
    assert [p.step for p in decodes if not is_empty(p)] == [4]
    assert decodes[3].blocks == {rid: (2,)}
    assert len(decodes) == 7  # 8 output tokens, the first from the prefill
    sim.finish()


def test_decodes_first_then_running_prefills_then_admissions():
    sim = SchedulerSim(depth=1, block_size=4, num_kv_blocks=16, max_num_seqs=4, max_num_batched_tokens=6)
    a = sim.add([1, 2], make_spec(max_tokens=9))
    (plan,) = sim.send()
    assert plan.prefill == {a: 2}
    sim.collect()
    b = sim.add([3] * 8, make_spec(max_tokens=9))
    c = sim.add([4] * 3, make_spec(max_tokens=9))
    (plan,) = sim.send()  # one token for a's decode, five for b, none left for c
    assert (plan.prefill, [n.rid for n in plan.new]) == ({b: 5}, [b])
    sim.collect()
    (plan,) = sim.send()  # a decodes, b's last 3, then 2 of c
    assert (plan.prefill, [n.rid for n in plan.new]) == ({b: 3, c: 2}, [c])
    sim.collect()
    (plan,) = sim.send()  # a and b decode
    assert plan.prefill == {c: 1}
    counters = sim.schedulers[0].counters
    assert (counters.chunks, counters.mixed_steps, counters.empty_plans) == (2, 3, 0)
    assert (counters.prefill_tokens, counters.decode_tokens) == (13, 4)
    sim.collect()
    sim.finish()


def test_max_num_seqs_bounds_what_runs_and_a_slot_is_free_once_the_last_token_is_planned():
    sim = SchedulerSim(depth=2, block_size=4, num_kv_blocks=16, max_num_seqs=2)
    a = sim.add([1], make_spec(max_tokens=2))
    b = sim.add([2], make_spec(max_tokens=5))
    c = sim.add([3], make_spec(max_tokens=2))
    assert set(sim.send()[0].prefill) == {a, b}
    assert is_empty(sim.send()[0])  # decodes; a's last token is in this plan
    assert sim.schedulers[0].num_running == 2
    sim.collect()
    assert set(sim.send()[0].prefill) == {c}  # without waiting for a's last result
    assert sim.schedulers[0].num_running == 3
    sim.finish()


def test_depth_2_counts_on_tokens_in_flight_and_plans_nothing_past_the_length():
    sim = SchedulerSim(depth=2)
    sim.add([1, 2, 3], make_spec(max_tokens=2))
    sim.send()
    assert sim.has_work
    sim.send()  # samples token 2 of 2
    assert not sim.has_work
    assert [u.finish for u in sim.collect() + sim.collect()] == [0, FINISH_LENGTH]
    assert sim.schedulers[0].num_running == 0


def test_a_stop_is_found_out_late_and_the_blocks_wait_for_the_plan_that_counted_on_it():
    prompt = [1, 2, 3]
    seed, stop = seed_that_stops_at(prompt, 2, 6)
    sim = SchedulerSim(depth=2, block_size=8, num_kv_blocks=2, late=True)
    rid = sim.add(prompt, make_spec(max_tokens=6, seed=seed, stop_ids=(stop,)))
    sim.send()
    sim.send()  # samples the stop token
    sim.collect()
    sim.send()  # counts on one more decode
    (update,) = sim.collect()
    assert (update.rid, update.token, update.finish) == (rid, stop, FINISH_STOP)
    scheduler = sim.schedulers[0]
    assert scheduler.num_running == 0
    assert scheduler.kv_usage == 0.5  # step 2 may still write it
    assert not scheduler.has_work
    other = sim.add([9] * 9, make_spec(max_tokens=1))  # needs both blocks
    assert not scheduler.has_work
    assert is_empty(sim.send()[0])
    assert scheduler.counters.empty_plans == 1
    assert sim.collect() == []
    assert scheduler.kv_usage == 0.0
    assert [n.rid for n in sim.send()[0].new] == [other]
    sim.finish()


def test_preemption_at_depth_2_step_by_step():
    # 4 blocks of 2; each request needs 3 of them to write positions 0..5
    sim = SchedulerSim(depth=2, block_size=2, num_kv_blocks=4, max_num_seqs=2, late=True)
    a = sim.add([1, 2, 3], make_spec(max_tokens=4))
    b = sim.add([4, 5, 6], make_spec(max_tokens=4))
    scheduler = sim.schedulers[0]
    assert sim.send()[0].prefill == {a: 3, b: 3}
    assert is_empty(sim.send()[0])  # both write position 3
    sim.collect()
    (plan,) = sim.send()  # both enter a third block: b, who came last, goes; a waits for its blocks
    assert (plan.drop, plan.hold, plan.blocks, plan.new) == ((b,), (a,), {}, ())
    assert (scheduler.num_running, scheduler.num_waiting) == (1, 1)
    assert [u.rid for u in sim.collect()] == [a, b]  # b's token that was in flight is accepted
    assert len(sim.outputs[b]) == 2
    (plan,) = sim.send()
    assert set(plan.blocks) == {a}
    assert (plan.hold, plan.new) == ((), ())
    sim.collect()
    sim.send()  # a's fourth and last token
    assert not scheduler.has_work  # b needs 3 blocks, and a's are in use until its result is back
    sim.collect()
    sim.collect()
    (plan,) = sim.send()
    (new,) = plan.new
    assert list(new.token_ids) == [4, 5, 6, *sim.outputs[b]]
    assert (new.rid, new.num_prompt_tokens, new.num_computed_tokens) == (b, 3, 2)  # its first block was still cached
    assert scheduler.counters.preemptions == scheduler.counters.holds == 1
    sim.finish()
    assert (len(sim.outputs[a]), len(sim.outputs[b])) == (4, 4)


def test_preemption_at_depth_1_frees_at_once():
    sim = SchedulerSim(depth=1, block_size=2, num_kv_blocks=4, max_num_seqs=2)
    a = sim.add([1, 2, 3], make_spec(max_tokens=4))
    b = sim.add([4, 5, 6], make_spec(max_tokens=4))
    for _ in range(2):
        sim.send()
        sim.collect()
    (plan,) = sim.send()
    assert (plan.drop, set(plan.blocks), plan.hold, plan.new) == ((b,), {a}, (), ())
    sim.collect()
    sim.finish()
    assert sim.schedulers[0].counters.holds == 0


def test_the_last_arrived_preempts_itself_and_comes_back_before_later_arrivals():
    # a writes positions 0..8 (3 blocks of 4), b 0..11 (3 blocks); 5 blocks in all
    sim = SchedulerSim(depth=1, block_size=4, num_kv_blocks=5, max_num_seqs=2, prefix_caching=False)
    a = sim.add([1] * 6, make_spec(max_tokens=4))
    b = sim.add([2] * 8, make_spec(max_tokens=5))
    order = []
    late = None
    while sim.has_work:
        (plan,) = sim.send()
        order += [n.rid for n in plan.new]
        if plan.drop and late is None:
            assert plan.drop == (b,)
            late = sim.add([3], make_spec(max_tokens=1))
        sim.collect()
    assert order == [a, b, b, late]
    sim.finish()


def test_equal_prefixes_share_blocks_only_when_confirmed():
    sim = SchedulerSim(depth=2, block_size=2, num_kv_blocks=8)
    prompt = [1, 2, 3, 4, 5]
    sim.add(prompt, make_spec(max_tokens=3))
    sim.send()
    sim.add(prompt, make_spec(max_tokens=3))
    (plan,) = sim.send()  # the first one's result is not back
    assert plan.new[0].num_computed_tokens == 0
    sim.collect()
    c = sim.add(prompt[:4], make_spec(max_tokens=3))
    (plan,) = sim.send()
    (new,) = plan.new
    assert (new.num_computed_tokens, plan.prefill) == (2, {c: 2})  # its last token is computed, hence its block too
    assert sim.schedulers[0].counters.prefix_hit_tokens == 2
    assert new.block_ids[0] == sim.plans[0][0].new[0].block_ids[0]
    sim.finish()


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("num_plans", [0, 1, 2, 3, 4])
def test_drop_in_every_state_leaves_nothing(depth, num_plans):
    """After 0 to 4 plans the request waits, prefills (2 chunks), decodes, has its last token in flight, has ended."""
    sim = SchedulerSim(depth=depth, max_num_batched_tokens=4, late=True)
    rid = sim.add([1, 2, 3, 4, 5, 6], make_spec(max_tokens=2))
    for _ in range(num_plans):
        while sim.num_in_flight >= depth:
            sim.collect()
        sim.send()
    if rid not in sim.ended:
        sim.drop(rid)
        if num_plans:
            assert sim.send()[0].drop == (rid,)
    sim.finish()
    sim.schedulers[0].drop(rid)  # long gone: nothing to do


def test_an_idle_group_gets_empty_plans_in_step_with_the_others():
    sim = SchedulerSim(num_groups=3, depth=2)
    rid = sim.add([1, 2, 3], make_spec(max_tokens=6))
    sim.finish()
    assert all(is_empty(plan) for plans in sim.plans for plan in plans[1:])
    assert all(p.step == step for step, plans in enumerate(sim.plans) for p in plans)
    assert sim.schedulers[1].counters.empty_plans == len(sim.plans)
    assert len(sim.outputs[rid]) == 6


def test_a_request_that_the_rank_refuses_ends_with_its_words_and_harms_nobody():
    sim = SchedulerSim(depth=2, max_num_batched_tokens=6)
    good = sim.add([1, 2], make_spec(max_tokens=4))
    bad = sim.add([1] * 6 + [VOCAB_SIZE], make_spec(max_tokens=4))
    sim.send()
    sim.send()  # the second chunk of the bad one is already planned
    updates = {u.rid: u for u in sim.collect()}
    assert updates[bad][1:5] == (-1, FINISH_ERROR, None, "token id outside the vocabulary")
    assert updates[good].error is None
    sim.finish()
    assert len(sim.outputs[good]) == 4
    again = sim.add([1] * 6 + [2], make_spec(max_tokens=1))  # nothing of the bad one was published
    assert sim.send()[0].new[0].num_computed_tokens == 0
    sim.collect()
    sim.finish()
    assert len(sim.outputs[again]) == 1


def test_logprobs_and_preemptions_come_with_the_token():
    sim = SchedulerSim(depth=1)
    sim.add([1, 2], make_spec(max_tokens=1))
    sim.add([1, 2], make_spec(max_tokens=1, logprobs=0))
    sim.send()
    plain, asked = sim.collect()
    assert plain.logprobs is None
    assert asked.logprobs.chosen == -float(asked.token)
    assert asked.num_preemptions == 0


def test_one_request_may_fill_the_whole_cache_to_the_last_position():
    sim = SchedulerSim(depth=2, block_size=2, num_kv_blocks=3, late=True)
    assert sim.schedulers[0].max_request_tokens == 7  # 6 positions, and a last token that is not computed
    sim.add([1, 2, 3], make_spec(max_tokens=4))
    sim.add([4], make_spec(max_tokens=6))
    sim.finish()


def test_what_can_never_run_is_refused_when_it_arrives():
    scheduler = SchedulerSim(block_size=2, num_kv_blocks=3, max_model_len=20).schedulers[0]
    with pytest.raises(InvalidRequestError, match="needs 8 tokens and the KV cache holds 7"):
        scheduler.add(1, [1, 2, 3], make_spec(max_tokens=5))
    with pytest.raises(InvalidRequestError, match=r"0 tokens.*1 to 19"):
        scheduler.add(1, [], make_spec(max_tokens=1))
    with pytest.raises(InvalidRequestError, match=r"20 tokens.*1 to 19"):
        scheduler.add(1, [1] * 20, make_spec(max_tokens=1))
    with pytest.raises(InvalidRequestError, match="at least 1"):
        scheduler.add(1, [1], make_spec(max_tokens=0))
    scheduler.add(1, [1], make_spec(max_tokens=1))
    with pytest.raises(ValueError, match="in use"):
        scheduler.add(1, [1], make_spec(max_tokens=1))
    assert scheduler.num_waiting == 1


def test_output_ends_at_max_model_len():
    sim = SchedulerSim(max_model_len=6)
    sim.add([1, 2], make_spec(max_tokens=4))
    rid = sim.add([1, 2], make_spec(max_tokens=99))
    plan = sim.send()[0]
    assert [n.sampling.max_tokens for n in plan.new] == [4, 4]
    sim.prompts[rid] = [1, 2], make_spec(max_tokens=4)
    sim.router.release(rid)
    sim.router.assign(rid, 6)
    sim.finish()


def test_plans_follow_step_by_step():
    scheduler = SchedulerSim().schedulers[0]
    scheduler.plan(5)
    with pytest.raises(ValueError, match="plan of step 7 asked after that of step 5"):
        scheduler.plan(7)


def test_a_result_that_does_not_answer_the_plan_is_refused():
    def fresh():
        sim = SchedulerSim(depth=1)
        sim.add([1, 2, 3], make_spec(max_tokens=2))
        sim.send()
        return sim.schedulers[0], sim.ranks[0].collect()

    scheduler, result = fresh()
    with pytest.raises(ProtocolError, match="step 1, generation 0, where that of step 0"):
        scheduler.apply(replace(result, step=1))
    with pytest.raises(ProtocolError, match="generation 4"):
        scheduler.apply(replace(result, generation=4))
    none = replace(result, rids=result.rids[:0], tokens=result.tokens[:0], finish=result.finish[:0])
    with pytest.raises(ProtocolError, match="up to token 3 of 3 and no token came back"):
        scheduler.apply(none)

    scheduler, result = fresh()
    two = replace(result, rids=np.array([1, 1]), tokens=np.array([1, 1]), finish=np.array([0, 0]))
    with pytest.raises(ProtocolError, match="holds 2 tokens; its plan can yield 1"):
        scheduler.apply(two)
    scheduler.apply(result)
    with pytest.raises(ProtocolError, match="no plan is in flight"):
        scheduler.apply(result)
    scheduler.plan(1)
    endless = replace(result, step=1, finish=np.array([0]))
    with pytest.raises(ProtocolError, match="has reached max_tokens=2 and the rank has not ended it"):
        scheduler.apply(endless)


def test_a_token_from_the_middle_of_a_prompt_is_refused():
    sim = SchedulerSim(depth=1, max_num_seqs=2, max_num_batched_tokens=2)
    rid = sim.add([1, 2, 3], make_spec(max_tokens=2))
    sim.send()
    result = sim.ranks[0].collect()
    with pytest.raises(ProtocolError, match="up to token 2 of 3 and a token came back"):
        sim.schedulers[0].apply(replace(result, rids=np.array([rid]), tokens=np.array([1]), finish=np.array([0])))


def test_scheduling_needs_no_torch():
    code = "import sys, epruntime.engine.scheduler, epruntime.engine.router; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
