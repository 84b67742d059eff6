"""Whatever the order of events: no block lost, shared wrongly, or reused while a plan in flight may write it; every
request gets exactly the tokens that it gets alone. And broken schedulers, which the same checks must catch."""

import random
from dataclasses import asdict

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from epruntime.engine.block_pool import BlockPool
from epruntime.engine.kv_reference import ReferenceKVCache
from epruntime.engine.request import NEVER, SchedulerRequest
from epruntime.engine.scheduler import GroupScheduler
from epruntime.errors import ProtocolError
from epruntime.plan import NewRequest
from epruntime.testing.fake_rank import PlanViolation
from epruntime.testing.scheduler_sim import VOCAB_SIZE, SchedulerSim, make_spec, reference_kv

TOKENS = st.integers(0, VOCAB_SIZE - 1)
#: prompts begin with a part of one of these, so that prefixes are shared
STEMS = tuple([random.Random(i).randrange(VOCAB_SIZE) for _ in range(64)] for i in range(2))


class SchedulerMachine(RuleBasedStateMachine):
    """Arbitrary interleavings of arrivals, drops, plans and results. SchedulerSim and FakeRank check each of them."""

    @initialize(data=st.data())
    def start(self, data):
        seqs = data.draw(st.integers(1, 5), "max_num_seqs")
        self.sim = SchedulerSim(
            num_groups=data.draw(st.integers(1, 3), "groups"),
            depth=data.draw(st.sampled_from([1, 2, 2, 3]), "depth"),
            block_size=data.draw(st.integers(1, 4), "block_size"),
            num_kv_blocks=data.draw(st.integers(2, 12), "num_kv_blocks"),
            max_num_seqs=seqs,
            max_num_batched_tokens=seqs + data.draw(st.integers(0, 8), "more tokens"),
            prefix_caching=data.draw(st.booleans(), "prefix_caching"),
            late=data.draw(st.booleans(), "late"),
        )

    @rule(data=st.data(), stem=st.sampled_from(STEMS), stop_ids=st.lists(TOKENS, max_size=2), seed=st.integers(0, 2))
    def add(self, data, stem, stop_ids, seed):
        room = self.sim.schedulers[0].max_request_tokens
        length = data.draw(st.integers(1, room - 1), "prompt length")
        shared = data.draw(st.integers(0, length), "of which shared")
        rest = data.draw(st.lists(TOKENS, min_size=length - shared, max_size=length - shared), "rest")
        max_tokens = data.draw(st.integers(1, room - length), "max_tokens")
        spec = make_spec(
            max_tokens=max_tokens,
            seed=seed,
            stop_ids=tuple(stop_ids),
            min_tokens=data.draw(st.integers(0, max_tokens), "min_tokens"),
            prompt_logprobs=data.draw(st.sampled_from([-1, 0]), "prompt_logprobs"),
        )
        self.sim.add(stem[:shared] + rest, spec)

    @precondition(lambda self: self.sim.live)
    @rule(data=st.data())
    def drop(self, data):
        self.sim.drop(data.draw(st.sampled_from(self.sim.live), "rid"))

    @precondition(lambda self: self.sim.num_in_flight < self.sim.depth)
    @rule()
    def send(self):
        had_work = [s.has_work for s in self.sim.schedulers]
        plans = self.sim.send()
        for scheduler, had, plan in zip(self.sim.schedulers, had_work, plans, strict=True):
            flight = scheduler._in_flight[-1]
            assert had or not (flight.num_decodes or plan.prefill), "a plan computes something, and has_work said no"

    @precondition(lambda self: self.sim.num_in_flight)
    @rule()
    def collect(self):
        self.sim.collect()

    @precondition(lambda self: self.sim.live)
    @rule()
    def abandon(self):
        """Everybody leaves: once the plans in flight have ended no KV block is in use, and a plan tells the ranks."""
        for rid in self.sim.live:
            self.sim.drop(rid)
        while self.sim.num_in_flight:
            self.sim.collect()
        assert all(s.num_free_kv_blocks == s.num_kv_blocks for s in self.sim.schedulers)
        if any(s.wants_plan for s in self.sim.schedulers):
            self.sim.send()
            self.sim.collect()
        assert all(rank.num_requests == 0 for rank in self.sim.ranks)
        assert not any(s.wants_plan for s in self.sim.schedulers)

    def teardown(self):
        if hasattr(self, "sim"):
            self.sim.finish()


SchedulerMachine.TestCase.settings = settings(max_examples=120, stateful_step_count=40, deadline=None, derandomize=True)
TestSchedulerMachine = SchedulerMachine.TestCase


def crowd(
    seed: int, *, depth: int = 2, check: bool = True, logprobs: bool = False, mirrored: bool = True
) -> SchedulerSim:
    """Far more requests than a small cache holds, with random stops and drops, run to their end."""
    rng = random.Random(seed)
    sim = SchedulerSim(
        depth=depth,
        block_size=2,
        num_kv_blocks=9,
        max_num_seqs=5,
        max_num_batched_tokens=9,
        late=True,
        check=check,
        mirrored=mirrored,
    )
    for _ in range(24):
        length, max_tokens = rng.randint(1, 9), rng.randint(1, 9)
        shared = rng.randint(0, length)
        prompt = rng.choice(STEMS)[:shared] + [rng.randrange(VOCAB_SIZE) for _ in range(length - shared)]
        stop_ids = (rng.randrange(VOCAB_SIZE),) if rng.random() < 0.5 else ()
        asked = 0 if logprobs and rng.random() < 0.5 else -1
        spec = make_spec(max_tokens=max_tokens, seed=rng.randrange(3), stop_ids=stop_ids, prompt_logprobs=asked)
        sim.add(prompt, spec)
        if rng.random() < 0.5 and sim.num_in_flight < depth:
            sim.send()
        if rng.random() < 0.5 and sim.num_in_flight:
            sim.collect()
        if rng.random() < 0.1 and sim.live:
            sim.drop(rng.choice(sim.live))
    sim.finish()
    return sim


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_crowd_in_a_small_cache_preempts_chunks_mixes_and_reuses(depth):
    total: dict[str, int] = {}
    for seed in range(25):
        for name, value in asdict(crowd(seed, depth=depth).schedulers[0].counters).items():
            total[name] = total.get(name, 0) + value
    assert min(total[n] for n in ("preemptions", "chunks", "mixed_steps", "prefix_hit_tokens")) > 10
    for name in ("holds", "empty_plans"):  # both come of results that are still on their way
        assert total[name] == 0 if depth == 1 else total[name] > 10


def test_prompt_logprobs_survive_chunks_preemptions_and_cached_prefixes():
    sims = [crowd(seed, logprobs=True) for seed in range(25)]
    for name in ("preemptions", "chunks", "prefix_hit_tokens"):
        assert sum(getattr(sim.schedulers[0].counters, name) for sim in sims) > 10
    again = [new for sim in sims for (plan,) in sim.plans for new in plan.new if new.num_prompt_logprobs > 0]
    assert again, "no request came back for the rest of them"


def test_the_first_arrival_is_never_preempted():
    for seed in range(10):
        rng = random.Random(seed)
        sim = SchedulerSim(depth=2, block_size=2, num_kv_blocks=8, max_num_seqs=4)
        for _ in range(8):
            sim.add([rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 6))], make_spec(max_tokens=10))
        while sim.live:
            while sim.num_in_flight < 2 and sim.has_work:
                oldest = min(sim.live)
                running = list(reference_kv(sim.schedulers[0])._sequences[oldest].block_ids)
                (plan,) = sim.send()
                assert not running or oldest not in plan.drop
            sim.collect()
        assert sim.schedulers[0].counters.preemptions > 0


# ---- broken schedulers: each must be caught by the checks above, and (where KV is at stake) by wrong tokens alone


def skip_quarantine(monkeypatch):
    monkeypatch.setattr(BlockPool, "quarantine", lambda self, blocks, until_step: self.release(blocks))


def end_quarantine_a_step_early(monkeypatch):
    end_step = BlockPool.end_step
    monkeypatch.setattr(BlockPool, "end_step", lambda self, step: (end_step(self, step), end_step(self, step + 1)))


def share_without_reference(monkeypatch):
    monkeypatch.setattr(BlockPool, "share", lambda self, blocks: None)


def free_a_block_too_many(monkeypatch):
    allocate = BlockPool.allocate

    def allocate_and_keep_one(self, count):
        blocks = allocate(self, count)
        self._free.append(blocks[-1])
        return blocks

    monkeypatch.setattr(BlockPool, "allocate", allocate_and_keep_one)


def lose_a_block(monkeypatch):
    release = BlockPool.release
    monkeypatch.setattr(BlockPool, "release", lambda self, blocks: release(self, list(blocks)[1:]))


def publish_before_it_is_computed(monkeypatch):
    admit = ReferenceKVCache.admit

    def admit_and_publish(self, rid, num_skippable):
        admitted = admit(self, rid, num_skippable)
        if admitted is not None:
            self.confirm(rid, len(self._sequences[rid].token_ids))
        return admitted

    monkeypatch.setattr(ReferenceKVCache, "admit", admit_and_publish)


def publish_one_position_early(monkeypatch):
    confirm = ReferenceKVCache.confirm
    monkeypatch.setattr(
        ReferenceKVCache,
        "confirm",
        lambda self, rid, n: confirm(self, rid, n + (n < len(self._sequences[rid].token_ids))),
    )


def find_by_the_block_alone(monkeypatch):
    monkeypatch.setattr("epruntime.engine.block_pool.content_key", lambda parent, token_ids: token_ids)


def number_contents_twice(monkeypatch):
    publish = BlockPool.publish

    def publish_and_start_over(self, block, parent, token_ids):
        self._num_contents %= 4
        return publish(self, block, parent, token_ids)

    monkeypatch.setattr(BlockPool, "publish", publish_and_start_over)


def keep_the_key_of_an_evicted_block(monkeypatch):
    monkeypatch.setattr(BlockPool, "_forget", lambda self, block: None)


def readmit_at_once(monkeypatch):
    preempt = GroupScheduler._preempt

    def preempt_and_forget(self, request):
        preempt(self, request)
        request.ready_after = -1

    monkeypatch.setattr(GroupScheduler, "_preempt", preempt_and_forget)


def lose_the_token_in_flight_of_a_preempted_request(monkeypatch):
    append = ReferenceKVCache.append

    def append_to_tables_only(self, rids, token_ids):
        lost = {rid for rid, sequence in self._sequences.items() if not sequence.block_ids}
        kept = [i for i, rid in enumerate(rids.tolist()) if rid not in lost]
        append(self, rids[kept], token_ids[kept])
        return [i for i, rid in enumerate(rids.tolist()) if rid not in self._sequences]

    monkeypatch.setattr(ReferenceKVCache, "append", append_to_tables_only)


def grant_a_step_late(monkeypatch):
    file_due = GroupScheduler._file_due
    monkeypatch.setattr(GroupScheduler, "_file_due", lambda self, request, step: file_due(self, request, step + 1))


def forget_to_tell_of_drops(monkeypatch):
    drop = GroupScheduler.drop

    def silent(self, rid):
        drop(self, rid)
        self._drops = [r for r in self._drops if r != rid]

    monkeypatch.setattr(GroupScheduler, "drop", silent)


def skip_prompt_tokens_whose_logprobs_are_due(monkeypatch):
    monkeypatch.setattr(SchedulerRequest, "num_skippable_tokens", NEVER)


def forget_prompt_logprobs_when_preempted(monkeypatch):
    preempt = GroupScheduler._preempt

    def preempt_and_lose(self, request):
        preempt(self, request)
        request.prompt_logprobs.clear()

    monkeypatch.setattr(GroupScheduler, "_preempt", preempt_and_lose)


def ask_for_all_prompt_logprobs_again(monkeypatch):
    monkeypatch.setattr(
        "epruntime.engine.scheduler.NewRequest", lambda **fields: NewRequest(**fields | {"num_prompt_logprobs": 0})
    )


BREAKAGES = [
    skip_quarantine,
    end_quarantine_a_step_early,
    share_without_reference,
    free_a_block_too_many,
    lose_a_block,
    publish_before_it_is_computed,
    publish_one_position_early,
    find_by_the_block_alone,
    number_contents_twice,
    keep_the_key_of_an_evicted_block,
    readmit_at_once,
    lose_the_token_in_flight_of_a_preempted_request,
    grant_a_step_late,
    forget_to_tell_of_drops,
    skip_prompt_tokens_whose_logprobs_are_due,
    forget_prompt_logprobs_when_preempted,
    ask_for_all_prompt_logprobs_again,
]
WRONG_TOKENS = [
    skip_quarantine,
    end_quarantine_a_step_early,
    publish_before_it_is_computed,
    publish_one_position_early,
    find_by_the_block_alone,
    number_contents_twice,
    lose_the_token_in_flight_of_a_preempted_request,
]
CAUGHT = (PlanViolation, AssertionError, ValueError, KeyError, ProtocolError)


def run_until_caught(**options):
    for seed in range(40):
        crowd(seed, mirrored=False, **options)


@pytest.mark.parametrize("breakage", BREAKAGES, ids=lambda f: f.__name__)
def test_a_broken_scheduler_is_caught(breakage, monkeypatch):
    breakage(monkeypatch)
    # at depth 2 the plan in which a request may come back is made after the last result that may hold its token
    depth = 3 if breakage is readmit_at_once else 2
    with pytest.raises(CAUGHT) as caught:
        run_until_caught(depth=depth, logprobs="logprobs" in breakage.__name__)
    print(breakage.__name__, "->", type(caught.value).__name__, str(caught.value).split("; plan")[0][:150])


@pytest.mark.parametrize("breakage", WRONG_TOKENS, ids=lambda f: f.__name__)
def test_wrong_kv_also_shows_as_wrong_tokens(breakage, monkeypatch):
    """The rank checks nothing here, and the books are not audited: the tokens alone must tell."""
    breakage(monkeypatch)
    monkeypatch.setattr(SchedulerSim, "audit", lambda self: None)
    with pytest.raises(AssertionError, match=r"request [0-9]+") as caught:
        run_until_caught(check=False)
    assert not isinstance(caught.value, PlanViolation)
