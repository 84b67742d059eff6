"""Keys that depend on the length of their sequence: the same tokens, chunked, preempted, shared or recomputed.

FakeRank's positions then hash with the frequencies that they were written with, so a block of a history with other
frequencies, or one that should have been computed anew, shows as foreign KV and as a wrong token.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from epruntime.engine import scheduler as scheduler_module
from epruntime.engine.scheduler import GroupScheduler
from epruntime.models.info import RopeLengths
from epruntime.testing.scheduler_sim import VOCAB_SIZE, SchedulerSim, make_spec

#: longrope, longrope computed anew, dynamic NTK
RULES = {
    "kept": RopeLengths(longest_original=6),
    "recomputed": RopeLengths(longest_original=6, recompute=True),
    "every length": RopeLengths(longest_original=6, every_length=True),
}
STEMS = tuple([random.Random(i).randrange(VOCAB_SIZE) for _ in range(16)] for i in range(2))


def crowd(seed: int, rope: RopeLengths, *, depth: int = 2, **options: Any) -> SchedulerSim:
    """Requests on both sides of the length, and passing it, that share prefixes in a cache too small for them."""
    rng = random.Random(seed)
    sim = SchedulerSim(
        depth=depth,
        block_size=rng.randint(1, 3),
        num_kv_blocks=rng.randint(12, 20),
        max_num_seqs=4,
        max_num_batched_tokens=rng.randint(4, 9),
        late=True,
        rope=rope,
        **options,
    )
    for _ in range(20):
        length, max_tokens = rng.randint(1, 9), rng.randint(1, 3)
        if rng.random() < 0.5:
            max_tokens = rng.randint(1, 12 - length)
        prompt = rng.choice(STEMS)[:length]
        stop_ids = (rng.randrange(VOCAB_SIZE),) if rng.random() < 0.3 else ()
        asked = 0 if rng.random() < 0.3 else -1
        spec = make_spec(max_tokens=max_tokens, seed=rng.randrange(2), stop_ids=stop_ids, prompt_logprobs=asked)
        sim.add(prompt, spec)
        if rng.random() < 0.5 and sim.num_in_flight < depth:
            sim.send()
        if rng.random() < 0.5 and sim.num_in_flight:
            sim.collect()
        if rng.random() < 0.05 and sim.live:
            sim.drop(rng.choice(sim.live))
    sim.finish()
    return sim


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("name", RULES)
def test_a_crowd_on_both_sides_of_the_length(name: str, depth: int) -> None:
    counters = [crowd(seed, RULES[name], depth=depth).schedulers[0].counters for seed in range(40)]
    for what in ("preemptions", "chunks", "prefix_hit_tokens"):
        assert sum(getattr(c, what) for c in counters) > 10, what


@pytest.mark.parametrize("name", RULES)
def test_with_room_for_all_only_a_recomputed_one_leaves_the_rank(name: str) -> None:
    sim = SchedulerSim(num_kv_blocks=60, max_num_seqs=8, max_num_batched_tokens=64, rope=RULES[name])
    for length, max_tokens in ((6, 1), (6, 2), (2, 9), (7, 5), (1, 5), (1, 6), (1, 7)):
        sim.add(STEMS[0][:length], make_spec(max_tokens=max_tokens))
    sim.finish()
    passing = 3  # those that compute a seventh token, and had fewer when they came
    assert sim.schedulers[0].counters.preemptions == (passing if name == "recomputed" else 0)


def test_long_prompts_share_blocks_with_long_ones_only() -> None:
    def hits(rope: RopeLengths, lengths: tuple[int, ...]) -> int:
        sim = SchedulerSim(num_kv_blocks=60, max_num_batched_tokens=64, rope=rope)
        for length in lengths:
            sim.add(STEMS[0][:length], make_spec(max_tokens=1))
            sim.finish()
        return sim.schedulers[0].counters.prefix_hit_tokens

    for rope in (RULES["kept"], RULES["recomputed"]):
        assert hits(rope, (10, 12)) == 10
        assert hits(rope, (5, 12)) == hits(rope, (12, 5)) == 0
        assert hits(rope, (5, 6)) == 4
    assert hits(RULES["every length"], (10, 12)) == hits(RULES["every length"], (12, 12)) == 0
    assert hits(RULES["every length"], (5, 6)) == 4


def _share_across(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_module, "marked", lambda token_ids: token_ids)


def _never_recompute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GroupScheduler, "_file_recompute", lambda *_: None)


@pytest.mark.parametrize(
    ("broken", "name"), [(_share_across, "kept"), (_share_across, "recomputed"), (_never_recompute, "recomputed")]
)
def test_a_scheduler_broken_on_purpose_is_caught(broken: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> None:
        for seed in range(40):
            crowd(seed, RULES[name])

    broken(monkeypatch)
    with pytest.raises(AssertionError):  # PlanViolation is one
        run()
