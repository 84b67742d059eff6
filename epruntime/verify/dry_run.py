"""A run without ranks: what the schedulers would do, in milliseconds, to choose settings in which enough happens.

RunSettings -> one rank's GroupScheduler <-> InputBatch, tokens made up -> who was preempted, and when
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace

import numpy as np

from epruntime.engine.scheduler import GroupScheduler
from epruntime.models.info import RopeLengths
from epruntime.plan import StepPlan, StepResult, TokenLogprobs
from epruntime.verify.requests import Shape
from epruntime.verify.session import RunSettings, Submission
from epruntime.worker.input_batch import InputBatch

_VOCABULARY = 2**31 - 1


@dataclass(kw_only=True)
class DryRun:
    """What would happen.

    Attributes:
        preempted_at: request index -> output tokens that it had each time that it was preempted.
        unfinished: prefills that a preemption broke off when one KV block that the prefix cache may hold had been
            computed, and another one had not.
        reported: prompts that a preemption broke off when some of the log-probabilities that are asked for had come.
        resumed: pieces of a history with output in it that was computed anew, where it took several.
        num_steps, num_rows: of the ranks.
    """

    preempted_at: dict[int, list[int]] = field(default_factory=dict)
    unfinished: int = 0
    reported: int = 0
    resumed: int = 0
    prefix_hit_tokens: int = 0
    num_steps: int = 0
    num_rows: int = 0


def dry_run(settings: RunSettings, shape: Shape, rope: RopeLengths, *, num_kv_blocks: int) -> DryRun:
    """Runs the submissions of the first rank.

    Args:
        num_kv_blocks: if the settings name no fewer.
    """
    blocks = min(num_kv_blocks, settings.num_kv_blocks or num_kv_blocks)
    scheduler = GroupScheduler(
        settings.scheduler,
        block_size=shape.block_size,
        num_kv_blocks=blocks,
        prefix_caching=settings.prefix_caching,
        max_model_len=shape.max_model_len,
        rope=rope,
    )
    inputs = InputBatch(
        block_size=shape.block_size,
        num_kv_blocks=blocks,
        max_num_batched_tokens=settings.scheduler.max_num_batched_tokens,
        max_model_len=shape.max_model_len,
        vocab_size=_VOCABULARY,
        rope=rope,
    )
    run = _Run(scheduler, inputs, shape)
    for wave in settings.waves:
        run.wave([submission for submission in wave if submission.rank == 0], settings.scheduler.pipeline_depth)
    run.found.prefix_hit_tokens = scheduler.counters.prefix_hit_tokens
    return run.found


class _Run:
    def __init__(self, scheduler: GroupScheduler, inputs: InputBatch, shape: Shape) -> None:
        self.found = DryRun()
        self._scheduler, self._inputs, self._shape = scheduler, inputs, shape
        self._submissions: list[Submission] = []  # by rid
        self._num_output: list[int] = []  # the same
        self._computed: dict[int, int] = {}  # rid -> known tokens computed so far, of running prefills
        self._open: set[int] = set()
        self._step = 0

    def wave(self, submissions: list[Submission], depth: int) -> None:
        for submission in submissions:
            rid, request = len(self._submissions), submission.request
            self._submissions.append(submission)
            self._num_output.append(0)
            self._open.add(rid)
            self._scheduler.add(rid, request.token_ids, replace(request.spec, logprobs=-1))
        in_flight: deque[StepPlan] = deque()
        while self._open or in_flight:
            while len(in_flight) < depth and self._scheduler.wants_plan:
                in_flight.append(self._scheduler.plan(self._step))
                self._step += 1
            if not in_flight:
                return  # nothing can be admitted
            self._apply(in_flight.popleft())

    def _apply(self, plan: StepPlan) -> None:
        for rid in plan.drop:
            if rid in self._open:
                self._note_preemption(rid)
        for new in plan.new:
            self._computed[new.rid] = new.num_computed_tokens
        self._inputs.apply(plan)
        batch = self._inputs.build(plan)
        for rid, count in plan.prefill.items():
            if rid in self._computed:
                self._computed[rid] += count
        pieces = [r for r in batch.scheduled if r.rid in plan.prefill and self._num_output[r.rid]]
        self.found.resumed += sum(request not in batch.sampling for request in pieces)
        tokens, finish = [], []
        for request in batch.sampling:
            rid = request.rid
            self._computed.pop(rid, None)
            tokens.append(self._token(rid))
            finish.append(request.accept(tokens[-1]))
            self._num_output[rid] += 1
            if finish[-1]:
                self._open.discard(rid)
                self._inputs.end(request, plan.step)
        self.found.num_steps += 1
        self.found.num_rows += batch.forward.num_tokens
        self._scheduler.apply(
            StepResult(
                step=plan.step,
                rids=np.array([request.rid for request in batch.sampling], np.int64),
                tokens=np.array(tokens, np.int32),
                finish=np.array(finish, np.int8),
                prompt_logprobs={
                    piece.request.rid: (TokenLogprobs(chosen=0.0),) * len(piece.token_ids) for piece in batch.prompts
                },
                num_prefill_tokens=batch.num_prefill_tokens,
                num_decode_tokens=batch.num_decode_tokens,
            )
        )

    def _note_preemption(self, rid: int) -> None:
        request, block = self._submissions[rid].request, self._shape.block_size
        self.found.preempted_at.setdefault(request.index, []).append(self._num_output[rid])
        num_full = (len(request.token_ids) + self._num_output[rid] - 1) // block
        computed = self._computed.pop(rid, 0)
        self.found.unfinished += 1 <= computed // block < num_full
        wants = request.spec.prompt_logprobs >= 0 and not self._num_output[rid]
        self.found.reported += wants and 0 < computed < len(request.token_ids) - 1

    def _token(self, rid: int) -> int:
        """The same for the same request at the same place, and its end where one is sure to come."""
        request, number = self._submissions[rid].request, self._num_output[rid]
        if request.spec.stop_ids and number + 1 >= request.num_tokens:
            return request.spec.stop_ids[0]
        return _VOCABULARY // 2 + request.index * 4096 + number % 4096
