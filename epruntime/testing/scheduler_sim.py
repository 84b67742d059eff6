"""SchedulerSim: group schedulers and fake ranks in lockstep, one event at a time, everything checked.

add / drop / send / collect in any order a test likes; `finish` runs the rest. Outputs are compared
with `unbatched`, and after every event the books of each block pool are audited.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from epruntime.config import SchedulerConfig
from epruntime.engine.kv_reference import ReferenceKVCache
from epruntime.engine.router import Router
from epruntime.engine.scheduler import GroupScheduler
from epruntime.engine.token_updates import TokenUpdate
from epruntime.models.info import LENGTH_HAS_NO_EFFECT, RopeLengths
from epruntime.plan import FINISH_ERROR, FINISH_NONE, SamplingSpec, StepPlan, StepResult, TokenLogprobs
from epruntime.testing.fake_rank import FakeRank, unbatched, unbatched_prompt_logprobs
from epruntime.testing.mirrored_kv import MirroredKVCache

VOCAB_SIZE = 11


def make_spec(*, max_tokens: int, seed: int = 0, stop_ids: tuple[int, ...] = (), **others: Any) -> SamplingSpec:
    return SamplingSpec(
        temperature=1.0, top_k=0, top_p=1.0, seed=seed, stop_ids=stop_ids, max_tokens=max_tokens, **others
    )


def reference_kv(scheduler: GroupScheduler) -> ReferenceKVCache:
    """The Python side of a simulated scheduler's books."""
    kv = scheduler._kv
    if isinstance(kv, MirroredKVCache):
        return kv.reference
    assert isinstance(kv, ReferenceKVCache), "a simulated scheduler's books are never in C++ alone"
    return kv


def audit(scheduler: GroupScheduler) -> None:
    """Every block is free, cached, or referenced exactly as often as tables and quarantine say; none is lost."""
    kv = reference_kv(scheduler)
    pool = kv.pool
    assert kv._sequences.keys() == scheduler._requests.keys(), "histories of requests that have ended"
    expected: Counter[int] = Counter()
    for sequence in kv._sequences.values():
        expected.update(sequence.block_ids)
    for blocks in pool._quarantine.values():
        expected.update(blocks)
    assert pool._refs == [expected[block] for block in range(pool.num_blocks)], "reference counts"
    assert pool.num_quarantined == sum(map(len, pool._quarantine.values())), "quarantine count"
    idle = pool._free + list(pool._cached)
    assert sorted(idle) == [b for b in range(pool.num_blocks) if not expected[b]], "a block is lost or free twice"
    assert all(pool._key_of[b] is None for b in pool._free), "a free block is published"
    assert all(pool._key_of[b] is not None for b in pool._cached), "a cached block has no content"
    assert {b: k for k, b in pool._block_of.items()} == {b: k for b, k in enumerate(pool._key_of) if k}, "content index"
    contents = [pool._content_of[b] for b, k in enumerate(pool._key_of) if k]
    assert len(contents) == len(set(contents)), "two blocks of one content"


class SchedulerSim:
    """`num_groups` schedulers with a FakeRank each, `depth` plans in flight at most.

    The depth may be any; beyond 2 it puts rules to the test that 2 never strains.

    Args:
        mirrored: keep the KV books in C++ too, and compare; else in Python only.
        late, check, rope: see FakeRank.
    """

    def __init__(
        self,
        *,
        num_groups: int = 1,
        depth: int = 2,
        block_size: int = 2,
        num_kv_blocks: int = 8,
        max_num_seqs: int = 4,
        max_num_batched_tokens: int = 8,
        max_model_len: int = 1000,
        prefix_caching: bool = True,
        late: bool = False,
        check: bool = True,
        mirrored: bool = True,
        rope: RopeLengths = LENGTH_HAS_NO_EFFECT,
    ) -> None:
        self.rope = rope
        config = SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens)
        self.depth = depth
        self.schedulers = [
            GroupScheduler(
                config,
                block_size=block_size,
                num_kv_blocks=num_kv_blocks,
                prefix_caching=prefix_caching,
                max_model_len=max_model_len,
                rope=rope,
            )
            for _ in range(num_groups)
        ]
        make_books = MirroredKVCache if mirrored else ReferenceKVCache
        for scheduler in self.schedulers:
            scheduler._kv = make_books(num_blocks=num_kv_blocks, block_size=block_size, prefix_caching=prefix_caching)
        self.ranks = [
            FakeRank(
                num_blocks=num_kv_blocks,
                block_size=block_size,
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max_num_batched_tokens,
                vocab_size=VOCAB_SIZE,
                late=late,
                check=check,
                rope=rope,
            )
            for _ in range(num_groups)
        ]
        self.router = Router(num_groups)
        self.prompts: dict[int, tuple[list[int], SamplingSpec]] = {}
        self.outputs: dict[int, list[int]] = {}
        self.prompt_logprobs: dict[int, tuple[TokenLogprobs, ...]] = {}
        self.ended: dict[int, int] = {}  # rid -> FINISH_*, or -1 dropped
        self.num_in_flight = 0
        self.step = 0
        self.plans: list[list[StepPlan]] = []

    @property
    def live(self) -> list[int]:
        return [rid for rid in self.prompts if rid not in self.ended]

    @property
    def has_work(self) -> bool:
        return any(s.has_work for s in self.schedulers)

    def add(self, prompt: Sequence[int], spec: SamplingSpec) -> int:
        rid = len(self.prompts) + 1
        group = self.router.assign(rid, len(prompt) + spec.max_tokens)
        self.schedulers[group].add(rid, prompt, spec)
        self.prompts[rid] = list(prompt), spec
        self.outputs[rid] = []
        return rid

    def drop(self, rid: int) -> None:
        """What the front end does on an abort, an expiry or a stop string."""
        group = self.router.release(rid)
        assert group is not None
        self.schedulers[group].drop(rid)
        self.ended[rid] = -1
        self.audit()

    def send(self) -> list[StepPlan]:
        """Makes the next plan of every group and lets the ranks execute it. Through the wire format, as in life."""
        plans = [s.plan(self.step) for s in self.schedulers]
        for rank, plan in zip(self.ranks, plans, strict=True):
            read = StepPlan.from_wire(plan.to_wire())
            assert read.to_wire() == plan.to_wire()
            rank.step(read)
        self.plans.append(plans)
        self.step += 1
        self.num_in_flight += 1
        self.audit()
        return plans

    def collect(self) -> list[TokenUpdate]:
        """Applies every group's result of the oldest step in flight."""
        updates: list[TokenUpdate] = []
        for scheduler, rank in zip(self.schedulers, self.ranks, strict=True):
            updates += scheduler.apply(StepResult.from_wire(rank.collect().to_wire()))
        self.num_in_flight -= 1
        for update in updates:
            assert update.rid not in self.ended, f"update for the ended request {update.rid}"
            if update.prompt_logprobs is not None:
                assert not self.outputs[update.rid], "prompt log-probabilities come with the first token"
                self.prompt_logprobs[update.rid] = update.prompt_logprobs
            if update.finish != FINISH_ERROR:
                self.outputs[update.rid].append(update.token)
            if update.finish != FINISH_NONE:
                self.ended[update.rid] = update.finish
                self.router.release(update.rid)
        self.audit()
        return updates

    def finish(self, max_steps: int = 10_000) -> None:
        """Runs until all requests have ended, as an engine does; then checks outputs and that nothing is left."""
        for _ in range(max_steps):
            while self.num_in_flight < self.depth and any(s.wants_plan for s in self.schedulers):
                self.send()
            if not self.num_in_flight:
                break
            self.collect()
        assert not self.live, f"stuck: requests {self.live} live, no work, nothing in flight"
        for scheduler, rank in zip(self.schedulers, self.ranks, strict=True):
            assert scheduler.num_running == scheduler.num_waiting == rank.num_requests == 0
            assert scheduler.kv_usage == 0.0
            assert not scheduler._due._buckets
            assert not scheduler._ends._buckets
            assert not scheduler._recomputes._buckets
        assert set(self.router.loads) == {0}
        self.check_outputs()

    def check_outputs(self) -> None:
        """Every request has exactly the tokens that it gets alone; a dropped one a leading part of them.

        So with the prompt's log-probabilities, which are there with the first token where they are asked for.
        """
        for rid, (prompt, spec) in self.prompts.items():
            asked = spec.prompt_logprobs >= 0 and self.outputs[rid]
            expected = unbatched_prompt_logprobs(prompt, self.rope) if asked else None
            assert self.prompt_logprobs.get(rid) == expected, f"request {rid}"
            if self.ended.get(rid) == FINISH_ERROR:
                assert not self.outputs[rid]
                continue
            tokens, finish = unbatched(prompt, spec, VOCAB_SIZE, self.rope)
            if rid in self.ended and self.ended[rid] >= 0:
                assert (self.outputs[rid], self.ended[rid]) == (tokens, finish), f"request {rid}"
            else:
                assert self.outputs[rid] == tokens[: len(self.outputs[rid])], f"request {rid}"

    def audit(self) -> None:
        for scheduler in self.schedulers:
            audit(scheduler)
