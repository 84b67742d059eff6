"""The runner's prompt log-probabilities: what the history alone gives, in any chunks, company and order of steps."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from history_model import NAN_HISTORY_END, VOCABULARY, Collected, expected_tokens, logits_after, make_runner, new, spec

from epruntime.config import SchedulerConfig
from epruntime.engine.scheduler import GroupScheduler
from epruntime.errors import ProtocolError
from epruntime.plan import FINISH_ERROR, NewRequest, StepPlan, StepResult, TokenLogprobs
from epruntime.worker import prompt_logprobs

LONG = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6, 2, 6, 4, 3, 3, 8, 3, 2, 7, 9, 5, 0, 2, 8, 8, 4]


def check(entries: list[TokenLogprobs] | tuple[TokenLogprobs, ...], prompt: list[int], num_top: int) -> None:
    """One entry per position from the second on: torch's log-softmax in fp64 of the logits behind what comes before."""
    assert len(entries) == len(prompt) - 1
    for position, entry in enumerate(entries, start=1):
        exact = torch.log_softmax(logits_after(prompt[:position]).double(), -1)
        assert entry.chosen == pytest.approx(exact[prompt[position]].item(), abs=1e-12)
        top = torch.topk(exact, num_top)
        assert list(entry.top_ids) == top.indices.tolist()
        assert list(entry.top_values) == pytest.approx(top.values.tolist(), abs=1e-12)


def all_blocks(rid: int) -> range:
    return range(rid * 12, rid * 12 + 12)


@pytest.mark.parametrize("chunks", [[37], [1] * 37, [10, 20, 7], [36, 1], [35, 1, 1]])
def test_in_any_chunks(chunks):
    runner, _, _ = make_runner()
    collected = Collected(runner)
    s = spec(max_tokens=3, prompt_logprobs=4)
    entering: tuple[NewRequest, ...] = (new(1, LONG, s, all_blocks(1)),)
    done = 0
    for count in chunks:
        result = collected.run(new=entering, prefill={1: count})
        entering = ()
        assert len(result.prompt_logprobs.get(1, ())) == min(done + count, 36) - done
        done += count
        assert result.rids.tolist() == ([1] if done == 37 else [])
    while runner.num_requests:
        assert not collected.run().prompt_logprobs
    check(collected.prompt_logprobs[1], LONG, 4)
    assert collected.tokens[1] == expected_tokens(LONG, s)[0], "the tokens are as without"


def test_beside_requests_that_do_not_ask_and_for_prompts_of_one_and_two_tokens():
    runner, model, _ = make_runner()
    collected = Collected(runner)
    prompts = {1: LONG[:9], 2: LONG[:11], 3: [7], 4: [7, 9]}
    asked = {1: -1, 2: 0, 3: 5, 4: 20}
    collected.run(
        new=tuple(new(r, p, spec(max_tokens=2, prompt_logprobs=asked[r]), all_blocks(r)) for r, p in prompts.items()),
        prefill={rid: len(p) for rid, p in prompts.items()},
    )
    assert set(collected.prompt_logprobs) == {2, 4}
    check(collected.prompt_logprobs[2], prompts[2], 0)
    check(collected.prompt_logprobs[4], prompts[4], 20)
    assert model.head_rows == [11]
    collected.run()
    assert model.head_rows == [11], "decoding asks for none"


def test_the_head_runs_on_a_bounded_number_of_rows(monkeypatch):
    """Room for no more than 32 rows: 36 and 16 of two prompts take two runs, one of them across both prompts."""
    monkeypatch.setattr(prompt_logprobs, "_LOGITS_BYTES", 32 * 4 * VOCABULARY)
    runner, model, _ = make_runner()
    collected = Collected(runner)
    s = spec(max_tokens=1, prompt_logprobs=1)
    collected.run(new=(new(1, LONG, s, all_blocks(1)), new(2, LONG[20:], s, all_blocks(2))), prefill={1: 37, 2: 17})
    assert model.head_rows == [32, 20]
    check(collected.prompt_logprobs[1], LONG, 1)
    check(collected.prompt_logprobs[2], LONG[20:], 1)


def test_rows_of_a_run():
    for vocabulary in (128, 32000, 151936, 262144):
        rows = prompt_logprobs.rows_at_a_time(vocabulary)
        assert rows * vocabulary * 4 <= 64 * 2**20 < (rows + 1) * vocabulary * 4
    assert prompt_logprobs.rows_at_a_time(10**8) == 1, "at least one row, however wide"


def test_a_readmitted_request_goes_on_where_the_coordinator_is():
    runner, _, _ = make_runner()
    collected = Collected(runner)
    s = spec(max_tokens=2, prompt_logprobs=2)
    collected.run(new=(new(1, LONG, s, all_blocks(1)),), prefill={1: 10})
    assert len(collected.prompt_logprobs[1]) == 10
    collected.run(drop=(1,))
    # computed again from the start, in chunks of which the first reports nothing and the second a part
    collected.run(new=(new(1, LONG, s, all_blocks(2), num_prompt_logprobs=10),), prefill={1: 7})
    assert len(collected.prompt_logprobs[1]) == 10
    collected.run(prefill={1: 13})
    assert len(collected.prompt_logprobs[1]) == 20
    collected.run(drop=(1,))
    # this time the first 12 tokens are in the prefix cache
    collected.run(new=(new(1, LONG, s, all_blocks(2), num_computed=12, num_prompt_logprobs=20),), prefill={1: 25})
    check(collected.prompt_logprobs[1], LONG, 2)
    # preempted once more while decoding: the coordinator has all, and any computed prefix will do
    known = LONG + collected.tokens[1]
    collected.run(drop=(1,))
    again = new(1, known, s, all_blocks(2), num_prompt=37, num_computed=36, num_prompt_logprobs=36)
    assert not collected.run(new=(again,), prefill={1: 2}).prompt_logprobs
    assert collected.tokens[1] == expected_tokens(LONG, s)[0]


def test_more_computed_than_reported_is_refused():
    runner, _, _ = make_runner()
    s = spec(prompt_logprobs=0)
    entering = new(1, LONG, s, all_blocks(1), num_computed=12, num_prompt_logprobs=11)
    with pytest.raises(ProtocolError, match="request 1 wants log-probabilities of its prompt from position 12 on"):
        Collected(runner).run(new=(entering,))


@pytest.mark.parametrize("last_chunk", [False, True])
def test_nan_in_a_prompt_row_ends_that_request_only(last_chunk):
    runner, _, _ = make_runner()
    collected = Collected(runner)
    broken = [5, 6, NAN_HISTORY_END, 7, 8]
    s = spec(max_tokens=3, prompt_logprobs=1, logprobs=0)
    result = collected.run(
        new=(new(1, broken, s, all_blocks(1)), new(2, LONG[:6], s, all_blocks(2)), new(3, LONG, s, all_blocks(3))),
        prefill={1: 5 if last_chunk else 4, 2: 6, 3: 12},
    )
    assert result.rids.tolist() == [2, 1]
    assert result.finish.tolist() == [0, FINISH_ERROR]
    assert result.tokens[1] == -1
    assert "position 2 are not finite" in result.errors[1]
    assert set(result.prompt_logprobs) == {2, 3}
    assert list(result.logprobs) == [0], "the index is the entry's"
    collected.run(blocks={1: (60,)}, prefill={3: 25})  # a plan made before the result came back
    collected.run()
    check(collected.prompt_logprobs[2], LONG[:6], 1)
    check(collected.prompt_logprobs[3], LONG, 1)
    for rid, prompt in ((2, LONG[:6]), (3, LONG)):
        assert collected.tokens[rid] == expected_tokens(prompt, s)[0][: len(collected.tokens[rid])]


def test_bias_ids_outside_the_vocabulary_are_an_error_of_that_request():
    runner, _, _ = make_runner()
    s = spec(logit_bias=((1, 2.0), (VOCABULARY, 1.0)))
    result = Collected(runner).run(
        new=(new(1, [3], s, all_blocks(1)), new(2, [3], spec(), all_blocks(2))), prefill={2: 1}
    )
    assert result.rids.tolist() == [2, 1]
    assert str(VOCABULARY) in result.errors[1]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("num_kv_blocks", [11, 60])
def test_under_the_real_scheduler_with_every_kind_of_request(depth, num_kv_blocks):
    """Penalties, bias, min_tokens and prompt log-probabilities, chunked, preempted, with shared prefixes."""
    random = np.random.default_rng(depth + num_kv_blocks)
    scheduler = GroupScheduler(
        SchedulerConfig(max_num_seqs=6, max_num_batched_tokens=10),
        block_size=4,
        num_kv_blocks=num_kv_blocks,
        prefix_caching=True,
        max_model_len=40,
        generation=0,
    )
    runner, _, _ = make_runner(max_num_batched_tokens=10)
    shared = random.integers(0, 48, 9).tolist()
    prompts = {
        r: (shared if r % 2 else []) + random.integers(0, 48, random.integers(1, 12)).tolist() for r in range(16)
    }
    specs = {
        rid: spec(
            int(random.integers(6, 16)),
            temperature=float(rid % 2),
            seed=rid,
            stop_ids=(1, 2, 3, 4, 5, 6, 7, 8),
            min_tokens=int(random.integers(0, 6)),
            repetition_penalty=float(random.choice([1.0, 1.5])),
            presence_penalty=float(random.choice([0.0, 0.7])),
            frequency_penalty=float(random.choice([0.0, 0.7])),
            logit_bias=((9, 1.5),) if rid % 4 == 0 else (),
            min_p=float(random.choice([0.0, 0.02])),
            prompt_logprobs=rid % 3 - 1,
        )
        for rid in prompts
    }
    for rid, prompt in prompts.items():
        scheduler.add(rid, prompt, specs[rid])
    tokens: dict[int, list[int]] = {}
    finish: dict[int, int] = {}
    found, in_flight, step = {}, [], 0
    while len(finish) < len(prompts):
        assert step < 500
        in_flight.append(
            StepResult.from_wire(runner.step(StepPlan.from_wire(scheduler.plan(step).to_wire())).to_wire())
        )
        step += 1
        if len(in_flight) < depth:
            continue
        for update in scheduler.apply(in_flight.pop(0)):
            if update.prompt_logprobs is not None:
                found[update.rid] = update.prompt_logprobs
            tokens.setdefault(update.rid, []).append(update.token)
            if update.finish:
                finish[update.rid] = update.finish
    for rid, prompt in prompts.items():
        assert (tokens[rid], finish[rid]) == expected_tokens(prompt, specs[rid])
        assert (rid in found) == (specs[rid].prompt_logprobs >= 0)
        if rid in found:
            check(found[rid], prompt, specs[rid].prompt_logprobs)
    assert scheduler.counters.chunks > 0
    assert num_kv_blocks > 11 or scheduler.counters.preemptions > 0
    assert num_kv_blocks == 11 or scheduler.counters.prefix_hit_tokens > 0
