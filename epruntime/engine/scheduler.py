"""GroupScheduler: decides, step by step, what one group's rank computes. Pure bookkeeping: no torch, no I/O, no clock.

add -> waiting -> (admit) -> prefill chunks -> decode -> ending -> finished
          ^--------- preempt (KV blocks ran out) ----'

A plan is filled in this order, within max_num_batched_tokens: every running decode (one token each),
then the next chunks of running prefills, then admissions, first come first served.

What keeps a step cheap: a decode that merely continues is not touched by `plan`, and `apply` only
appends its token. It advances by one position in every plan, so the step at which it needs its next
KV block (`due`) and the last step it can reach (`end`) are known when it starts to decode; requests
wait in buckets under those two step numbers. Histories and block tables are the KV cache's.

What makes several plans in flight safe: a plan counts on what earlier plans may do (upper bounds),
and `apply` corrects. Blocks given up go through the quarantine (kv_cache.py); a preempted request
takes its token still in flight into its history and is readmitted only when no plan in flight may
have computed it.

Why it cannot get stuck: a request gets all blocks of its known history when it is admitted, so only
a decode can run out of them. It then waits (`hold`) for blocks in quarantine or of requests about to
end, and otherwise preempts the running request that arrived last, possibly itself. The one that
arrived first is preempted by nobody, and one request alone always fits (checked by `add`).

Where keys depend on the length of a sequence (models/info.py, RopeLengths), one that passes the
original length is preempted once if its keys are to be computed anew, and histories whose keys
differ share no blocks (history_marks.py).
"""

from __future__ import annotations

from array import array
from collections import OrderedDict, deque
from collections.abc import Sequence
from itertools import chain

import numpy as np

from epruntime.config import SchedulerConfig
from epruntime.engine.history_marks import marked
from epruntime.engine.in_flight import InFlightPlan
from epruntime.engine.kv_cache import make_kv_cache
from epruntime.engine.request import NEVER, RequestState, SchedulerRequest, StepBuckets
from epruntime.engine.request_limits import RequestLimits
from epruntime.engine.scheduler_counters import SchedulerCounters
from epruntime.engine.token_updates import TokenUpdates
from epruntime.errors import ProtocolError
from epruntime.models.info import LENGTH_HAS_NO_EFFECT, RopeLengths
from epruntime.plan import FINISH_ERROR, NewRequest, SamplingSpec, StepPlan, StepResult


class GroupScheduler:
    """Continuous batching for one group of ranks that shares a KV cache (today: one rank).

    Args:
        config: max_num_seqs and max_num_batched_tokens are obeyed; how many plans are kept in flight is
            the caller's choice, step by step.
        block_size, num_kv_blocks: geometry of the KV cache. prefix_caching: reuse blocks of equal histories.
        max_model_len: longest prompt plus output in tokens.
        rope: how keys depend on the length of their sequence.
        generation: stamped on every plan; results of another one are refused.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        block_size: int,
        num_kv_blocks: int,
        prefix_caching: bool,
        max_model_len: int,
        rope: RopeLengths = LENGTH_HAS_NO_EFFECT,
        generation: int = 0,
    ) -> None:
        # every decode needs a token per step, so more sequences than tokens could never run at once
        self._max_num_seqs = min(config.max_num_seqs, config.max_num_batched_tokens)
        self._max_num_batched_tokens = config.max_num_batched_tokens
        self.generation = generation
        self.placement_version = 0
        self.counters = SchedulerCounters()
        self._kv = make_kv_cache(num_blocks=num_kv_blocks, block_size=block_size, prefix_caching=prefix_caching)
        # the last token is sampled and never computed: hence + 1
        longest = min(max_model_len, num_kv_blocks * block_size + 1)
        self._rope = rope
        self._limits = RequestLimits(max_model_len=max_model_len, max_request_tokens=longest)
        self._num_added = 0
        self._requests: dict[int, SchedulerRequest] = {}
        self._num_preemptions: dict[int, int] = {}  # of live requests that were preempted
        self._waiting: OrderedDict[int, SchedulerRequest] = OrderedDict()
        self._prefilling: dict[SchedulerRequest, None] = {}
        self._decoding: set[SchedulerRequest] = set()
        self._ending: set[SchedulerRequest] = set()
        self._due = StepBuckets()
        self._ends = StepBuckets()
        self._recomputes = StepBuckets()
        self._drops: list[int] = []
        self._in_flight: deque[InFlightPlan] = deque()
        self._planned_step = -1
        self._applied_step = -1

    # ---- what the caller asks and tells

    @property
    def max_request_tokens(self) -> int:
        """Longest prompt plus output that `add` accepts."""
        return self._limits.max_request_tokens

    @property
    def num_running(self) -> int:
        """Requests on the rank. May exceed max_num_seqs by those whose last token is in flight."""
        return len(self._prefilling) + len(self._decoding) + len(self._ending)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def kv_usage(self) -> float:
        """Share of KV blocks in use, 0 to 1; cached blocks that nobody references count as free."""
        return 1.0 - self._kv.num_free_blocks / self._kv.num_blocks

    @property
    def num_kv_blocks(self) -> int:
        return self._kv.num_blocks

    @property
    def num_free_kv_blocks(self) -> int:
        """Includes cached blocks that nobody references."""
        return self._kv.num_free_blocks

    @property
    def wants_plan(self) -> bool:
        """Whether a plan should be made now: it would compute something, or the rank has to be told of drops."""
        return bool(self._drops) or self.has_work

    @property
    def has_work(self) -> bool:
        """Whether a plan made now would compute something, if every token in flight is one that does not stop."""
        if self._decoding or self._prefilling:
            return True
        if not self._waiting:
            return False
        request = next(iter(self._waiting.values()))
        return self._may_enter(request) and self._kv.can_admit(request.rid, request.num_skippable_tokens)

    def add(self, rid: int, prompt_token_ids: Sequence[int], spec: SamplingSpec) -> None:
        """Queues a request. Its output ends at max_model_len at the latest.

        Raises:
            InvalidRequestError: the prompt is empty, leaves no room for output, or could never fit in the KV cache.
            ValueError: `rid` is in use.
        """
        if rid in self._requests:
            raise ValueError(f"rid={rid} is in use")
        num_prompt = len(prompt_token_ids)
        request = SchedulerRequest(
            rid=rid,
            arrival=self._num_added,
            num_tokens=num_prompt,
            num_prompt_tokens=num_prompt,
            spec=self._limits.capped(num_prompt, spec),
            marked=self._rope.beyond(num_prompt),
        )
        request.shares = not (request.marked and self._rope.every_length)
        self._kv.add(rid, marked(prompt_token_ids) if request.marked else prompt_token_ids)
        self._num_added += 1
        self._requests[rid] = self._waiting[rid] = request

    def drop(self, rid: int) -> None:
        """Forgets a request in any state; results still to come for it are ignored. Nothing to do if it has ended."""
        request = self._requests.get(rid)
        if request is None:
            return
        if request.state is not RequestState.WAITING:
            self._drops.append(rid)
        self._remove(request)

    def plan(self, step: int) -> StepPlan:
        """The rank's part of lockstep step `step`, counted as in flight from now on. An idle group's plan is empty.

        Raises:
            ValueError: `step` does not follow the last one.
        """
        if self._planned_step >= 0 and step != self._planned_step + 1:
            raise ValueError(f"plan of step {step} asked after that of step {self._planned_step}")
        draft = InFlightPlan(step, self.generation)
        for request in self._recomputes.pop(step):
            self._preempt(request)
        preempted = self._grant_due_blocks(draft)
        draft.num_decodes = len(self._decoding) - len(draft.hold)
        budget = self._max_num_batched_tokens - draft.num_decodes
        for request in list(self._prefilling):
            budget -= self._prefill(draft, request, budget)
        if not preempted and not draft.hold:  # else blocks are short: those who run come first
            self._admit(draft, budget)
        for request in self._ends.pop(step):
            self._decoding.remove(request)
            self._ending.add(request)
            request.state = RequestState.ENDING
            draft.ending.append(request)

        counters, num_prefill = self.counters, sum(draft.prefill.values())
        counters.prefill_tokens += num_prefill
        counters.decode_tokens += draft.num_decodes
        counters.mixed_steps += bool(num_prefill and draft.num_decodes)
        counters.empty_plans += not (num_prefill or draft.num_decodes)
        plan = draft.to_plan(drop=self._drops, placement_version=self.placement_version)
        self._drops = []
        self._in_flight.append(draft)
        self._planned_step = step
        return plan

    def apply(self, result: StepResult) -> TokenUpdates:
        """Takes the result of the oldest plan in flight; returns the new tokens of requests that still live.

        Raises:
            ProtocolError: the result does not answer that plan.
        """
        if not self._in_flight:
            raise ProtocolError(f"result of step {result.step}, and no plan is in flight")
        flight = self._in_flight[0]
        flight.check(result)
        self._in_flight.popleft()
        self._applied_step = result.step
        updates = TokenUpdates.of(result, self._num_preemptions)
        if flight.pieces:
            self._confirm_prefill(flight, result, updates)
        dropped = self._append_tokens(result)
        if dropped:
            updates = updates.without(dropped)
        for rid in updates.finished:
            self._remove(self._requests[rid])
        flight.check_ended()
        self._kv.end_step(result.step)
        return updates

    # ---- parts of plan

    def _grant_due_blocks(self, draft: InFlightPlan) -> bool:
        """Gives each decode that enters a new KV block that block, else holds it; whether someone was preempted."""
        due = self._due.pop(draft.step)
        if not due:
            return False
        blocks = self._kv.grow([request.rid for request in due])
        if blocks is not None:
            self._grant(draft, due, blocks)
            return False
        due.sort(key=lambda request: request.arrival)
        preempted, returning = False, 0
        for request in due:
            if request.state is not RequestState.DECODE:  # preempted by an earlier one of this loop
                continue
            blocks = self._kv.grow([request.rid])
            while blocks is None:
                if returning < 1:
                    returning = self._num_returning_blocks() - len(draft.hold)
                if returning > 0:
                    break
                victim = max(chain(self._decoding, self._prefilling), key=lambda r: r.arrival)
                self._preempt(victim)
                preempted = True
                if victim is request:
                    break
                blocks = self._kv.grow([request.rid])
            if blocks is not None:
                self._grant(draft, [request], blocks)
            elif request.state is RequestState.DECODE:
                returning -= 1
                self._hold(draft, request)
        return preempted

    def _grant(self, draft: InFlightPlan, requests: list[SchedulerRequest], blocks: list[int]) -> None:
        """One new block for each; their next ones are due a block's length later."""
        next_due, going_on = draft.step + self._kv.block_size, []
        for request, block in zip(requests, blocks, strict=True):
            draft.blocks[request.rid] = (block,)
            if next_due <= request.end:
                request.due = next_due
                going_on.append(request)
            else:
                request.due = NEVER
        self._due.add_all(next_due, going_on)

    def _hold(self, draft: InFlightPlan, request: SchedulerRequest) -> None:
        """The request sits this step out, which shifts all that is foreseen for it by one step."""
        draft.hold.append(request.rid)
        self.counters.holds += 1
        self._ends.discard(request.end, request)
        request.end += 1
        self._ends.add(request.end, request)
        self._recomputes.discard(request.recompute, request)
        self._file_recompute(request, request.recompute + 1)
        self._file_due(request, draft.step + 1)

    def _preempt(self, request: SchedulerRequest) -> None:
        """Takes a request off the rank and puts it first in the queue, to be computed again."""
        self.counters.preemptions += 1
        self._num_preemptions[request.rid] = self._num_preemptions.get(request.rid, 0) + 1
        request.ready_after = self._planned_step
        self._drops.append(request.rid)
        self._leave_rank(request)
        request.state = RequestState.WAITING
        self._waiting[request.rid] = request
        self._waiting.move_to_end(request.rid, last=False)

    def _prefill(self, draft: InFlightPlan, request: SchedulerRequest, budget: int) -> int:
        """Plans the next piece of a history, at most `budget` tokens; returns how many."""
        remaining = request.num_tokens - request.num_scheduled
        count = min(remaining, budget)
        if count < 1:
            return 0
        draft.prefill[request.rid] = count
        request.num_scheduled += count
        draft.pieces.append((request, request.num_scheduled, count == remaining))
        if count < remaining:
            self.counters.chunks += 1
        else:
            self._start_decoding(request, draft.step)
        return count

    def _start_decoding(self, request: SchedulerRequest, step: int) -> None:
        """`step` computes the end of the known history and samples; from the next step on the request decodes."""
        del self._prefilling[request]
        self._decoding.add(request)
        request.state = RequestState.DECODE
        num_output = request.num_tokens - request.num_prompt_tokens
        request.end = step + request.spec.max_tokens - num_output - 1
        self._ends.add(request.end, request)
        # step + 1 writes position num_tokens, and each later step the next one; the table ends with that block
        self._file_due(request, step + 1 + -request.num_tokens % self._kv.block_size)
        if self._rope.recompute and not request.marked:
            self._file_recompute(request, step + 1 + self._rope.longest_original - request.num_tokens)

    def _file_recompute(self, request: SchedulerRequest, step: int) -> None:
        request.recompute = step if step <= request.end else NEVER
        if request.recompute != NEVER:
            self._recomputes.add(step, request)

    def _file_due(self, request: SchedulerRequest, step: int) -> None:
        request.due = step if step <= request.end else NEVER
        if request.due != NEVER:
            self._due.add(step, request)

    def _admit(self, draft: InFlightPlan, budget: int) -> None:
        """Takes requests off the queue, strictly in order, as long as sequences, tokens and blocks suffice."""
        while self._waiting and budget > 0:
            rid, request = next(iter(self._waiting.items()))
            if not self._may_enter(request):
                return
            admitted = self._kv.admit(rid, request.num_skippable_tokens)
            if admitted is None:
                return
            del self._waiting[rid]
            num_cached, block_ids = admitted
            token_ids = array("i", self._kv.token_ids(rid))
            if request.marked:
                token_ids = marked(token_ids)
            request.num_tokens, request.num_scheduled = len(token_ids), num_cached
            if self._kv.prefix_caching:
                self.counters.prefix_query_tokens += len(token_ids)
                self.counters.prefix_hit_tokens += num_cached
            request.state = RequestState.PREFILL
            self._prefilling[request] = None
            draft.new.append(
                NewRequest(
                    rid=rid,
                    token_ids=token_ids,
                    num_prompt_tokens=request.num_prompt_tokens,
                    num_computed_tokens=num_cached,
                    block_ids=block_ids,
                    sampling=request.spec,
                    num_prompt_logprobs=request.num_prompt_logprobs,
                )
            )
            budget -= self._prefill(draft, request, budget)

    def _may_enter(self, request: SchedulerRequest) -> bool:
        """Whether the first in the queue could run now, if there are blocks for it."""
        running = len(self._prefilling) + len(self._decoding)
        if running >= self._max_num_seqs or request.ready_after > self._applied_step:
            return False
        if self._rope.recompute and not request.marked and request.rid in self._num_preemptions:
            token_ids = array("i", self._kv.token_ids(request.rid))
            if self._rope.beyond(len(token_ids)):
                self._kv.forget(request.rid)
                self._kv.add(request.rid, marked(token_ids))
                request.marked = True
        return True

    def _num_returning_blocks(self) -> int:
        """KV blocks that come back without anyone being preempted."""
        return self._kv.num_returning([request.rid for request in self._ending])

    # ---- parts of apply, and leaving

    def _confirm_prefill(self, flight: InFlightPlan, result: StepResult, updates: TokenUpdates) -> None:
        """Publishes what prefill pieces have computed, and completes `updates` where their first token is there."""
        for request, num_computed, samples in flight.live_pieces(updates.rids, result.errors):
            self._kv.confirm(request.rid, num_computed)
            if request.wants_prompt_logprobs:
                request.take_prompt_logprobs(result.prompt_logprobs.get(request.rid, ()), num_computed)
                if samples and request.num_tokens == request.num_prompt_tokens:
                    updates.prompt_logprobs[request.rid] = tuple(request.prompt_logprobs)
                    request.prompt_logprobs.clear()  # not needed any more, and long

    def _append_tokens(self, result: StepResult) -> list[int]:
        """Each token joins the history of its request; returns the indices of those whose request does not live."""
        if not result.errors:
            return self._kv.append(result.rids, result.tokens)
        valid = np.flatnonzero(result.finish != FINISH_ERROR)
        self._kv.append(result.rids[valid], result.tokens[valid])
        return [i for i, rid in enumerate(result.rids.tolist()) if rid not in self._requests]

    def _remove(self, request: SchedulerRequest) -> None:
        del self._requests[request.rid]
        self._num_preemptions.pop(request.rid, None)
        if request.state is RequestState.WAITING:
            del self._waiting[request.rid]
        else:
            self._leave_rank(request)
        self._kv.forget(request.rid)
        request.state = RequestState.GONE

    def _leave_rank(self, request: SchedulerRequest) -> None:
        last_touched = self._planned_step
        if request.state is RequestState.ENDING:
            self._ending.remove(request)
            last_touched = request.end
        elif request.state is RequestState.PREFILL:
            del self._prefilling[request]
        else:
            self._decoding.remove(request)
            self._ends.discard(request.end, request)
            self._due.discard(request.due, request)
            self._recomputes.discard(request.recompute, request)
            request.recompute = NEVER
        self._kv.release(request.rid, last_touched)
