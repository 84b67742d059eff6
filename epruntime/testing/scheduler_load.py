"""SchedulerLoad: group schedulers under a steady load, with the CPU time of each part of a step. No ranks, no KV.

decode: long outputs, nobody comes or goes; a KV block is granted every 16th step per sequence.
churn: outputs of 64 to 192 tokens; whoever ends is replaced by a new request with a prompt of 256 tokens.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

import numpy as np

from epruntime.config import SchedulerConfig
from epruntime.engine.scheduler import GroupScheduler
from epruntime.engine.token_updates import TokenUpdates
from epruntime.plan import FINISH_LENGTH, FINISH_NONE, SamplingSpec, StepPlan, StepResult

BLOCK_SIZE = 16
PROMPT_TOKENS = 256
MAX_NUM_BATCHED_TOKENS = 2048


class CountingRank:
    """Answers plans with tokens that mean nothing; only counts what each request has left."""

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng
        self._prefill: dict[int, int] = {}
        self._output: dict[int, int] = {}

    def step(self, plan: StepPlan) -> StepResult:
        for rid in plan.drop:
            self._prefill.pop(rid, None)
            self._output.pop(rid, None)
        sampled = [rid for rid in self._output if rid not in self._prefill and rid not in plan.hold]
        for new in plan.new:
            self._prefill[new.rid] = len(new.token_ids) - new.num_computed_tokens
            self._output[new.rid] = new.sampling.max_tokens - (len(new.token_ids) - new.num_prompt_tokens)
        for rid, count in plan.prefill.items():
            self._prefill[rid] -= count
            if not self._prefill[rid]:
                del self._prefill[rid]
                sampled.append(rid)
        finish = []
        for rid in sampled:
            self._output[rid] -= 1
            finish.append(FINISH_NONE if self._output[rid] else FINISH_LENGTH)
            if not self._output[rid]:
                del self._output[rid]
        return StepResult(
            step=plan.step,
            rids=np.array(sampled, np.int64),
            tokens=self._rng.integers(0, 32000, len(sampled), np.int32),
            finish=np.array(finish, np.int8),
        )


@dataclass(frozen=True, kw_only=True)
class StepCost:
    """CPU milliseconds of one step, all groups together.

    Attributes:
        plan, wire, apply: GroupScheduler.plan, StepPlan.to_wire, GroupScheduler.apply.
        read: going through the updates one by one, as a front end does; no part of scheduling.
    """

    plan: float
    wire: float
    apply: float
    read: float

    @property
    def scheduling(self) -> float:
        return self.plan + self.wire + self.apply


class SchedulerLoad:
    """`num_groups` schedulers with `num_seqs` running sequences each, two plans in flight.

    Args:
        churn: the load, see above. num_steps: how many steps outputs must last without churn.
    """

    def __init__(self, *, churn: bool, num_groups: int, num_seqs: int, num_steps: int) -> None:
        self._churn = churn
        self._rng = np.random.default_rng(0)
        self._warm_up = num_seqs * PROMPT_TOKENS // (MAX_NUM_BATCHED_TOKENS // 2) + 64
        self._max_output = 192 if churn else num_steps + self._warm_up + 64
        max_model_len = PROMPT_TOKENS + self._max_output
        self.schedulers = [
            GroupScheduler(
                SchedulerConfig(max_num_seqs=num_seqs, max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS),
                block_size=BLOCK_SIZE,
                num_kv_blocks=num_seqs * (max_model_len // BLOCK_SIZE + 2),
                prefix_caching=True,
                max_model_len=max_model_len,
            )
            for _ in range(num_groups)
        ]
        self._ranks = [CountingRank(self._rng) for _ in range(num_groups)]
        self._results: deque[list[StepResult]] = deque()
        self._next_rid = 1
        self._next_step = 0
        for scheduler in self.schedulers:
            for _ in range(num_seqs):
                self._add(scheduler)

    def warm_up(self) -> None:
        """Until all sequences run and those that end do so at different times."""
        for _ in range(self._warm_up):
            self.step()

    def step(self) -> StepCost:
        """One step of all groups."""
        start = time.process_time()
        plans = [scheduler.plan(self._next_step) for scheduler in self.schedulers]
        planned = time.process_time()
        wires = [plan.to_wire() for plan in plans]
        encoded = time.process_time()
        del wires
        self._next_step += 1
        self._results.append([rank.step(plan) for rank, plan in zip(self._ranks, plans, strict=True)])
        if len(self._results) < 2:
            return StepCost(plan=1e3 * (planned - start), wire=1e3 * (encoded - planned), apply=0.0, read=0.0)
        results = self._results.popleft()
        begin = time.process_time()
        updates = [scheduler.apply(result) for scheduler, result in zip(self.schedulers, results, strict=True)]
        applied = time.process_time()
        _read(updates)
        read = time.process_time()
        for scheduler, of_group in zip(self.schedulers, updates, strict=True):
            for _ in of_group.finished if self._churn else ():
                self._add(scheduler)
        return StepCost(
            plan=1e3 * (planned - start),
            wire=1e3 * (encoded - planned),
            apply=1e3 * (applied - begin),
            read=1e3 * (read - applied),
        )

    def _add(self, scheduler: GroupScheduler) -> None:
        spec = SamplingSpec(
            temperature=0.0,
            top_k=0,
            top_p=1.0,
            seed=0,
            stop_ids=(2,),
            max_tokens=int(self._rng.integers(64, 193)) if self._churn else self._max_output - 1,
        )
        scheduler.add(self._next_rid, self._rng.integers(0, 32000, PROMPT_TOKENS).tolist(), spec)
        self._next_rid += 1


def _read(updates: list[TokenUpdates]) -> None:
    for of_group in updates:
        for _ in of_group:
            pass
