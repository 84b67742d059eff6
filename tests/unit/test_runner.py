"""ModelRunner with a model that reads its history back through the KV slots and block tables it is given."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from history_model import (
    BLOCK,
    BLOCKS,
    NAN_HISTORY_END,
    VOCABULARY,
    Collected,
    expected_tokens,
    logits_after,
    make_runner,
    new,
    spec,
)

from epruntime.config import SchedulerConfig
from epruntime.engine.scheduler import GroupScheduler
from epruntime.errors import ProtocolError
from epruntime.models.batch import ForwardBatch
from epruntime.plan import FINISH_ERROR, FINISH_LENGTH, FINISH_NONE, FINISH_STOP, StepPlan, StepResult

FINISH_ABORTED = 9  # the test's own mark
PROMPTS = {1: [3, 1, 4], 2: [1, 5, 9, 2, 6, 5, 3, 5, 8], 3: [9], 4: [7, 9, 3, 2]}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_batch_equals_each_request_by_itself(temperature):
    runner, model, context = make_runner()
    specs = {rid: spec(max_tokens=3 + rid, temperature=temperature, seed=rid * 17) for rid in PROMPTS}
    collected = Collected(runner)
    first = collected.run(
        new=tuple(new(rid, p, specs[rid], range(rid * 5, rid * 5 + 5)) for rid, p in PROMPTS.items()),
        prefill={rid: len(p) for rid, p in PROMPTS.items()},
    )
    assert first.num_prefill_tokens == sum(map(len, PROMPTS.values()))
    assert first.num_decode_tokens == 0
    assert context.num_tokens == 17
    assert model.rows[-1] == 17
    while runner.num_requests:
        assert collected.run().num_prefill_tokens == 0
    for rid, prompt in PROMPTS.items():
        assert (collected.tokens[rid], collected.finish[rid]) == expected_tokens(prompt, specs[rid])


def test_chunked_prefill_beside_decode_and_blocks_granted_as_needed():
    runner, _, context = make_runner()
    a, b = spec(max_tokens=8), spec(max_tokens=4)
    collected = Collected(runner)
    collected.run(new=(new(1, PROMPTS[1], a, (60,)),), prefill={1: 3})
    assert collected.run(new=(new(2, PROMPTS[2], b, (7,)),), prefill={2: 4}).num_decode_tokens == 1
    mixed = collected.run(blocks={2: (2,), 1: (0,)}, prefill={2: 3})
    assert (mixed.num_prefill_tokens, mixed.num_decode_tokens, context.num_tokens) == (3, 1, 4)
    assert 2 not in collected.tokens
    idle_b = collected.run()  # a request in the middle of its prefill sits out when it is not named
    assert (idle_b.num_prefill_tokens, idle_b.num_decode_tokens) == (0, 1)
    collected.run(blocks={2: (33,)}, prefill={2: 1})
    assert 2 not in collected.tokens
    last = collected.run(prefill={2: 1})  # the last chunk, of one token, samples
    assert last.num_prefill_tokens == 1
    assert len(collected.tokens[2]) == 1
    collected.run(blocks={1: (5,)})
    while runner.num_requests:
        collected.run(blocks={2: (11,)} if 2 not in collected.finish and len(collected.tokens[2]) == 3 else {})
    assert (collected.tokens[1], collected.finish[1]) == expected_tokens(PROMPTS[1], a)
    assert (collected.tokens[2], collected.finish[2]) == expected_tokens(PROMPTS[2], b)


def test_hold_sits_out_and_changes_nothing():
    runner, _, _ = make_runner()
    s = spec(max_tokens=6, temperature=1.0, seed=5)
    collected = Collected(runner)
    collected.run(new=(new(1, PROMPTS[1], s, range(4)),), prefill={1: 3})
    for _ in range(3):
        result = collected.run(hold=(1,))
        assert result.rids.size == 0
        assert result.num_decode_tokens == 0
    collected.run()
    collected.run(hold=(1,))
    while runner.num_requests:
        collected.run()
    assert (collected.tokens[1], collected.finish[1]) == expected_tokens(PROMPTS[1], s)


def test_preempted_and_readmitted_with_other_blocks_goes_on_where_it_was():
    runner, _, _ = make_runner()
    s = spec(max_tokens=7, temperature=1.0, seed=99)
    collected = Collected(runner)
    collected.run(
        new=(new(1, PROMPTS[2], s, range(3)), new(2, PROMPTS[3], spec(20), range(20, 30))), prefill={1: 9, 2: 1}
    )
    collected.run()
    collected.run()
    known = PROMPTS[2] + collected.tokens[1]
    assert len(known) == 12
    collected.run(drop=(1,))
    assert len(collected.tokens[1]) == 3
    collected.run()
    collected.run(new=(new(1, known, s, range(40, 45), num_prompt=9),), prefill={1: 5})
    collected.run(prefill={1: 7})
    while 1 not in collected.finish:
        collected.run()
    assert (collected.tokens[1], collected.finish[1]) == expected_tokens(PROMPTS[2], s)
    while runner.num_requests:
        collected.run()
    assert (collected.tokens[2], collected.finish[2]) == expected_tokens(PROMPTS[3], spec(20))


def test_a_cached_prefix_is_not_computed_again():
    runner, _, _ = make_runner()
    prompt, s = PROMPTS[2], spec(max_tokens=3)
    collected = Collected(runner)
    collected.run(new=(new(1, prompt, s, (1, 2, 3)),), prefill={1: 9})
    # The second request reads two blocks of the first, and one token of its own is left.
    result = collected.run(new=(new(2, prompt, s, (1, 2, 9), num_computed=8),), prefill={2: 1})
    assert (result.num_prefill_tokens, result.num_decode_tokens) == (1, 1)
    while runner.num_requests:
        collected.run()
    assert collected.tokens[1] == collected.tokens[2] == expected_tokens(prompt, s)[0]
    # One uncomputed token is a prefill like any other: it waits until it is named.
    collected.run(new=(new(3, prompt, s, (1, 2, 9), num_computed=8),))
    assert 3 not in collected.tokens
    assert runner.num_requests == 1


def test_a_request_that_ended_leaves_nothing_to_do_for_plans_in_flight():
    runner, _, _ = make_runner()
    tokens, _ = expected_tokens(PROMPTS[1], spec(max_tokens=10))
    stop = spec(max_tokens=10, stop_ids=(tokens[2],))
    collected = Collected(runner)
    collected.run(new=(new(1, PROMPTS[1], stop, range(4)),), prefill={1: 3})
    while runner.num_requests:
        collected.run()
    assert collected.tokens[1] == tokens[: tokens.index(tokens[2]) + 1]
    assert collected.finish[1] == FINISH_STOP
    late = collected.run(blocks={1: (9,)}, hold=(1,))
    assert late.rids.size == 0
    assert late.num_decode_tokens == 0
    collected.run(drop=(1,))
    for _ in range(20):
        collected.run()
    with pytest.raises(ProtocolError, match="request 1"):
        collected.run(blocks={1: (9,)})


def test_zero_work_still_makes_one_forward():
    runner, model, context = make_runner()
    context.num_tokens = 7
    result = Collected(runner).run()
    assert result.rids.size == result.tokens.size == result.finish.size == 0
    assert context.num_tokens == 0
    assert model.rows == [1]


def test_a_batch_has_no_rows_but_those_of_its_requests():
    runner, model, _ = make_runner()
    seen: list[ForwardBatch] = []
    forward = model.forward
    model.forward = lambda batch: (seen.append(batch), forward(batch))[1]  # type: ignore[method-assign]
    Collected(runner).run(
        new=(new(1, list(range(33)), spec(), range(9)), new(2, [5, 6], spec(), range(10, 12))), prefill={1: 33, 2: 2}
    )
    (batch,) = seen
    assert batch.num_tokens == 35
    assert batch.input_ids_T.numel() == 35
    assert batch.logits_rows_N.tolist() == [32, 34]
    assert batch.query_starts_S1.tolist() == [0, 33, 35]
    assert batch.seq_lens_S.tolist() == [33, 2]
    assert batch.slots_T[33:].tolist() == [40, 41]
    wide = (batch.input_ids_T, batch.positions_T, batch.slots_T, batch.logits_rows_N)
    assert all(t.dtype == torch.int64 for t in wide)
    assert all(t.dtype == torch.int32 for t in (batch.query_starts_S1, batch.seq_lens_S, batch.block_tables_SB))


def test_stop_wins_over_length_and_max_tokens_of_one():
    tokens, _ = expected_tokens(PROMPTS[4], spec(max_tokens=1))
    for s, finish in ((spec(1), FINISH_LENGTH), (spec(1, stop_ids=(tokens[0],)), FINISH_STOP)):
        runner, _, _ = make_runner()
        collected = Collected(runner)
        collected.run(new=(new(1, PROMPTS[4], s, range(4)),), prefill={1: 4})
        assert collected.tokens[1] == tokens
        assert collected.finish[1] == finish
        assert runner.num_requests == 0


def test_the_model_length_ends_a_request_that_max_tokens_would_let_go_on():
    runner, _, _ = make_runner()
    collected = Collected(runner)
    collected.run(new=(new(1, [1] * 60, spec(max_tokens=10**9), range(26)),), prefill={1: 60})
    while runner.num_requests:
        collected.run()
    assert len(collected.tokens[1]) == 40
    assert collected.finish[1] == FINISH_LENGTH


def test_an_error_ends_its_own_request_only():
    runner, _, _ = make_runner()
    collected = Collected(runner)
    s = spec(max_tokens=3, logprobs=0)
    result = collected.run(
        new=(
            new(1, PROMPTS[1], s, range(4)),
            new(2, [5, NAN_HISTORY_END], s, range(4, 8)),
            new(3, [5, VOCABULARY], s, range(8, 12)),
            new(4, [-1], s, range(12, 16)),
        ),
        prefill={1: 3, 2: 2, 3: 2, 4: 1},
    )
    assert result.rids.tolist() == [1, 2, 3, 4]
    assert result.tokens[1:].tolist() == [-1, -1, -1]
    assert result.finish.tolist() == [FINISH_NONE, FINISH_ERROR, FINISH_ERROR, FINISH_ERROR]
    assert set(result.errors) == {2, 3, 4}
    assert list(result.logprobs) == [0]
    assert "finite" in result.errors[2]
    assert "50" in result.errors[3]
    assert "-1" in result.errors[4]
    collected.run(blocks={2: (30,), 3: (31,)}, hold=(4,), drop=(3,))  # made before the result came back
    collected.run()
    assert (collected.tokens[1], collected.finish[1]) == expected_tokens(PROMPTS[1], s)
    assert runner.num_requests == 0


def test_logprobs_belong_to_the_entry_that_asked():
    runner, _, _ = make_runner()
    collected = Collected(runner)
    entering = (new(1, PROMPTS[1], spec(), range(4)), new(2, PROMPTS[4], spec(logprobs=2), range(4, 8)))
    result = collected.run(new=entering, prefill={1: 3, 2: 4})
    exact = torch.log_softmax(logits_after(PROMPTS[4]).double(), 0)
    assert list(result.logprobs) == [1]
    assert result.logprobs[1].chosen == pytest.approx(exact.max().item(), abs=1e-12)
    assert result.logprobs[1].top_ids == tuple(torch.topk(exact, 2).indices.tolist())


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"prefill": {1: 4}}, "request 1, which has 3 left"),
        ({"prefill": {1: 0}}, "computes 0 tokens"),
        ({"prefill": {9: 1}}, "names request 9"),
        ({"hold": (9,)}, "names request 9"),
        ({"blocks": {9: (1,)}}, "names request 9"),
        ({"blocks": {1: (64,)}}, r"blocks 0\.\.63"),
        ({"prefill": {2: 1}}, "request 2, which is decoding"),
        ({"prefill": {1: 3}}, "up to position 6, but its 1 KV blocks of 4"),
        ({"new": (new(1, [1], spec(), (5,)),)}, "is here already"),
        ({"new": (new(5, [1], spec(), (5,), num_computed=1),)}, "1 computed tokens of 1"),
    ],
)
def test_a_plan_that_contradicts_the_rank_is_refused(fields, words):
    runner, _, _ = make_runner()
    collected = Collected(runner)
    collected.run(new=(new(1, [1, 2, 3, 4, 5, 6, 7], spec(), (0,)), new(2, [1], spec(), (2, 3))), prefill={1: 4, 2: 1})
    with pytest.raises(ProtocolError, match=words):
        collected.run(**fields)


def test_a_plan_above_the_token_budget_is_refused():
    runner, _, _ = make_runner(max_num_batched_tokens=8)
    with pytest.raises(ProtocolError, match=r"max_num_batched_tokens=8 .*\(9 at request 1\)"):
        Collected(runner).run(new=(new(1, [1] * 9, spec(), range(3)),), prefill={1: 9})


def test_many_requests_with_random_chunks_holds_and_preemptions():
    """A small scheduler of dice: every request must end with the tokens that it has by itself."""
    random = np.random.default_rng(7)
    runner, _, _ = make_runner(max_num_batched_tokens=24)
    collected = Collected(runner)
    prompts = {rid: random.integers(0, 48, random.integers(1, 16)).tolist() for rid in range(12)}
    specs = {
        rid: spec(int(random.integers(1, 9)), temperature=float(rid % 2), seed=rid, stop_ids=(1, 2, 3))
        for rid in prompts
    }
    done: dict[int, int] = {}  # rid -> computed tokens, of requests on the rank
    waiting, free, preemptions = list(prompts), list(range(BLOCKS)), 0
    table: dict[int, list[int]] = {}
    sampled_here: dict[int, bool] = {}

    def history(rid: int) -> list[int]:
        return prompts[rid] + collected.tokens.get(rid, [])

    while waiting or done:
        assert collected.step < 400
        drop, entering, prefill, hold, budget = [], [], {}, [], 24
        for rid in list(done):
            if random.random() < 0.1:
                drop.append(rid)
                waiting.append(rid)
                free += table.pop(rid)
                del done[rid]
                preemptions += 1
        while waiting and len(done) < 5:
            rid = waiting.pop(0)
            needed = -(-(len(prompts[rid]) + specs[rid].max_tokens) // BLOCK)
            random.shuffle(free)
            table[rid] = [free.pop() for _ in range(needed)]
            done[rid], sampled_here[rid] = 0, False
            entering.append(new(rid, history(rid), specs[rid], tuple(table[rid]), num_prompt=len(prompts[rid])))
        decoding = {rid for rid in done if sampled_here[rid]}
        for rid in done:
            if rid in decoding:
                if random.random() < 0.2:
                    hold.append(rid)
                else:
                    budget -= 1
        for rid in done:
            left = len(history(rid)) - done[rid]
            if rid not in decoding and left and budget > 0:
                prefill[rid] = int(random.integers(1, min(left, budget) + 1))
                budget -= prefill[rid]
        result = collected.run(drop=tuple(drop), new=tuple(entering), prefill=prefill, hold=tuple(hold))
        for rid, count in prefill.items():
            done[rid] += count
        for rid in decoding - set(hold):
            done[rid] += 1
        for rid in result.rids.tolist():
            sampled_here[rid] = True
            if rid in collected.finish:
                free += table.pop(rid)
                del done[rid]
    assert preemptions > 3
    for rid, prompt in prompts.items():
        assert (collected.tokens[rid], collected.finish[rid]) == expected_tokens(prompt, specs[rid])


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("num_kv_blocks", [10, 40])
def test_under_the_real_scheduler_with_plans_in_flight(depth, num_kv_blocks):
    """`depth` plans are executed before the first result is applied: what a pipeline does to the scheduler."""
    random = np.random.default_rng(depth * 100 + num_kv_blocks)
    config = SchedulerConfig(max_num_seqs=6, max_num_batched_tokens=12)
    scheduler = GroupScheduler(
        config, block_size=BLOCK, num_kv_blocks=num_kv_blocks, prefix_caching=True, max_model_len=36, generation=3
    )
    runner, _, _ = make_runner(max_num_batched_tokens=12)
    shared = random.integers(0, 48, 9).tolist()
    prompts = {
        rid: (shared if rid % 3 else []) + random.integers(0, 49, random.integers(1, 12)).tolist() for rid in range(14)
    }
    specs = {
        rid: spec(int(random.integers(1, 14)), temperature=float(rid % 2), seed=rid, stop_ids=(1, 2)) for rid in prompts
    }
    arriving, tokens, finish, in_flight, step = list(prompts), {}, {}, [], 0
    while len(finish) < len(prompts):
        assert step < 500
        for rid in arriving[: int(random.integers(0, 4))]:
            scheduler.add(rid, prompts[rid], specs[rid])
            arriving.remove(rid)
        plan = StepPlan.from_wire(scheduler.plan(step).to_wire())
        in_flight.append(StepResult.from_wire(runner.step(plan).to_wire()))
        step += 1
        if len(in_flight) == depth:
            for update in scheduler.apply(in_flight.pop(0)):
                tokens.setdefault(update.rid, []).append(update.token)
                if update.finish:
                    finish[update.rid] = update.finish
            if step % 9 == 0 and scheduler.num_running:  # the front end gives one up, which has been here for long
                gone = min(rid for rid in prompts if rid not in finish and rid not in arriving)
                scheduler.drop(gone)
                finish[gone] = FINISH_ABORTED
    for rid, prompt in prompts.items():
        expected = expected_tokens(prompt, specs[rid])
        if finish[rid] == FINISH_ABORTED:
            assert tokens.get(rid, []) == expected[0][: len(tokens.get(rid, []))]
        else:
            assert (tokens[rid], finish[rid]) == expected
    runner.step(scheduler.plan(step))  # the last drop may still be on its way
    assert runner.num_requests == 0
    counters = scheduler.counters
    assert min(counters.chunks, counters.mixed_steps, counters.prefix_hit_tokens) > 0
    assert num_kv_blocks > 10 or counters.preemptions > 0
