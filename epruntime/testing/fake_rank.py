"""FakeRank: a rank without a model, that obeys the rules of plan.py to the letter and trusts nobody.

Its KV cache holds, in each slot, the hash of the whole history up to that position. So "the request
sees its own history and nothing else" is checked exactly: before a token is computed, every earlier
position of the request's table must hold the hash of the request's own prefix. A sampled token is a
function of the hashes *read from the cache*, of the seed and of the position; `unbatched` gives the
same function of the request alone. Whatever goes wrong with blocks thus shows twice: as a broken
rule (PlanViolation, unless `check=False`) and as a wrong token.

Where keys depend on the length of a sequence (RopeLengths), so does the hash of a position.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from epruntime.models.info import LENGTH_HAS_NO_EFFECT, RopeLengths
from epruntime.plan import (
    FINISH_ERROR,
    FINISH_LENGTH,
    FINISH_NONE,
    FINISH_STOP,
    NewRequest,
    SamplingSpec,
    StepPlan,
    StepResult,
    TokenLogprobs,
)

_EMPTY = 0


class PlanViolation(AssertionError):
    """A plan broke a rule of plan.py, or made a request see foreign KV."""


def extend(history: int, token: int, frequencies: int = 0) -> int:
    """Hash of a history and one more token, with its frequencies. Integers hash the same in every process."""
    return hash((history, token, frequencies) if frequencies else (history, token)) | 1  # never _EMPTY


def frequencies_of(rope: RopeLengths, length: int) -> int:
    """Which frequencies a sequence of so many tokens has: 0 those of short ones."""
    return (length if rope.every_length else 1) if rope.beyond(length) else 0


def hashes(tokens: Sequence[int], num_prompt_tokens: int, rope: RopeLengths) -> list[int]:
    """Of a sequence computed alone, at every position."""
    start = len(tokens) if rope.recompute else num_prompt_tokens
    seen: list[int] = []
    for i, token in enumerate(tokens):
        seen.append(extend(seen[-1] if seen else _EMPTY, token, frequencies_of(rope, max(start, i + 1))))
    return seen


def pick(spec: SamplingSpec, seen: Sequence[int], vocab_size: int, num_output_tokens: int) -> int:
    """The token that follows a history whose per-position hashes are `seen`; no stop id before min_tokens."""
    early = num_output_tokens < spec.min_tokens
    allowed = [token for token in range(vocab_size) if not (early and token in spec.stop_ids)]
    return allowed[hash((spec.seed, *seen)) % len(allowed)]


def prompt_logprob(seen: int, token: int) -> TokenLogprobs:
    """What is reported for a prompt token behind a history with the hash `seen`."""
    return TokenLogprobs(chosen=-float(hash((seen, token)) % 2**20))


def unbatched_prompt_logprobs(
    prompt: Sequence[int], rope: RopeLengths = LENGTH_HAS_NO_EFFECT
) -> tuple[TokenLogprobs, ...]:
    """Of one request computed alone: an entry for each prompt token from the second on."""
    seen = hashes(prompt, len(prompt), rope)
    return tuple(prompt_logprob(before, token) for before, token in zip(seen, prompt[1:], strict=False))


def finish_code(spec: SamplingSpec, token: int, num_output_tokens: int) -> int:
    if token in spec.stop_ids:
        return FINISH_STOP
    return FINISH_LENGTH if num_output_tokens >= spec.max_tokens else FINISH_NONE


def unbatched(
    prompt: Sequence[int], spec: SamplingSpec, vocab_size: int, rope: RopeLengths = LENGTH_HAS_NO_EFFECT
) -> tuple[list[int], int]:
    """(output tokens, FINISH_*) of one request computed alone: what any schedule must give."""
    output: list[int] = []
    while True:
        seen = hashes([*prompt, *output], len(prompt), rope)
        output.append(pick(spec, seen, vocab_size, len(output)))
        finish = finish_code(spec, output[-1], len(output))
        if finish != FINISH_NONE:
            return output, finish


@dataclass(slots=True, eq=False)
class _Request:
    spec: SamplingSpec
    num_prompt_tokens: int
    tokens: list[int]
    history: list[int]  # history[i]: hash of tokens[:i + 1]
    table: list[int]
    num_computed: int
    num_prompt_logprobs: int
    rope: RopeLengths
    rope_len: int
    decoding: bool = False

    @property
    def missing_prompt_logprobs(self) -> range:
        """Prompt positions whose log-probabilities are asked for and not yet reported."""
        return range(self.num_prompt_logprobs + 1, self.num_prompt_tokens if self.spec.prompt_logprobs >= 0 else 0)

    def append(self, token: int) -> None:
        frequencies = frequencies_of(self.rope, max(self.rope_len, len(self.tokens) + 1))
        self.history.append(extend(self.history[-1] if self.history else _EMPTY, token, frequencies))
        self.tokens.append(token)


@dataclass(slots=True)
class _Pending:
    """A step executed, whose result has not been collected."""

    result: StepResult
    writes: list[tuple[int, int, int]] = field(default_factory=list)  # block, offset, content
    stopped: dict[int, _Request] = field(default_factory=dict)


class FakeRank:
    """Executes StepPlans in order.

    Args:
        late: do all that a rank may do until the result of a step is out: its KV writes land (once more)
            at that moment, and a request that stopped in a step still runs in the next one if that was
            already there, as where the host learns of a stop one step late.
        rope: how keys depend on the length of their sequence.
        check: raise PlanViolation at the first broken rule. Without it only wrong tokens betray a fault.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        vocab_size: int,
        generation: int = 0,
        late: bool = False,
        check: bool = True,
        rope: RopeLengths = LENGTH_HAS_NO_EFFECT,
    ) -> None:
        self.rope = rope
        self.num_blocks, self.block_size, self.vocab_size = num_blocks, block_size, vocab_size
        self.max_num_seqs, self.max_num_batched_tokens = max_num_seqs, max_num_batched_tokens
        self.generation, self.late, self.check = generation, late, check
        self.num_plan_entries = 0
        """Entries of all kinds in plans so far: what decodes that merely continue must not add to."""
        self._cache = [[_EMPTY] * block_size for _ in range(num_blocks)]
        self._requests: dict[int, _Request] = {}
        self._known: set[int] = set()
        self._pending: deque[_Pending] = deque()
        self._last_step: int | None = None

    @property
    def num_requests(self) -> int:
        return len(self._requests)

    def step(self, plan: StepPlan) -> None:
        """Executes a plan. `collect` gives the results, in order."""
        self._need(plan.generation == self.generation, "generation", plan)
        self._need(self._last_step is None or plan.step == self._last_step + 1, "step out of order", plan)
        self._last_step = plan.step
        self.num_plan_entries += len(plan.drop) + len(plan.new) + len(plan.blocks) + len(plan.prefill) + len(plan.hold)
        zombies = dict(self._pending[-1].stopped) if self.late and self._pending else {}
        refused = self._enter(plan, zombies)

        rows: dict[int, tuple[int, int]] = {}  # rid -> positions [begin, end) computed in this step
        for rid, count in plan.prefill.items():
            if rid not in self._requests:
                self._need(rid in self._known, f"prefill of request {rid}, never seen", plan)
                continue
            request = self._requests[rid]
            self._need(not request.decoding, f"prefill of the decoding request {rid}", plan)
            begin, end = request.num_computed, request.num_computed + count
            self._need(count > 0 and end <= len(request.tokens), f"prefill of {count} tokens of request {rid}", plan)
            rows[rid] = begin, end
        for rid in plan.hold:
            request_or_none = self._requests.get(rid)
            self._need(request_or_none is None or request_or_none.decoding, f"hold of prefilling {rid}", plan)
        for rid, request in self._requests.items():
            if request.decoding and rid not in plan.hold:
                rows[rid] = request.num_computed, request.num_computed + 1
        num_tokens = sum(end - begin for begin, end in rows.values())
        self._need(num_tokens <= self.max_num_batched_tokens, f"{num_tokens} tokens", plan)
        self._need(len(self._requests) <= self.max_num_seqs, f"{len(self._requests)} sequences", plan)

        tables = Counter(block for r in self._requests.values() for block in set(r.table))
        for rid, (begin, end) in rows.items():  # all reads of what earlier steps wrote, before any write
            self._check_rows(plan, rid, begin, end, tables)
        pending = _Pending(StepResult(step=plan.step, rids=np.empty(0), tokens=np.empty(0), finish=np.empty(0)))
        for rid, (begin, end) in rows.items():
            self._write(self._requests[rid], begin, end, pending)
        for rid, request in zombies.items():
            if rid not in plan.hold and request.num_computed < len(request.table) * self.block_size:
                self._write(request, request.num_computed, request.num_computed + 1, pending)
        self._sample(plan, rows, refused, pending)
        self._pending.append(pending)

    def collect(self) -> StepResult:
        """Result of the oldest plan that has none yet."""
        pending = self._pending.popleft()
        if self.late:
            for block, offset, content in pending.writes:
                self._cache[block][offset] = content
        return pending.result

    # ---- parts of step

    def _enter(self, plan: StepPlan, zombies: dict[int, _Request]) -> list[int]:
        refused = []
        for rid in plan.drop:
            self._need(rid in self._known, f"drop of request {rid}, never seen", plan)
            self._requests.pop(rid, None)
            zombies.pop(rid, None)
        for new in plan.new:
            self._need(new.rid not in self._requests, f"request {new.rid} is already here", plan)
            self._need(
                all(new.rid not in p.result.rids for p in self._pending),
                f"request {new.rid} comes back while a plan that decoded it is in flight",
                plan,
            )
            self._need(0 <= new.num_computed_tokens < len(new.token_ids), f"computed tokens of {new.rid}", plan)
            self._need(new.num_computed_tokens <= len(new.block_ids) * self.block_size, f"table of {new.rid}", plan)
            self._known.add(new.rid)
            num_shared = new.num_computed_tokens // self.block_size
            self._check_granted(plan, new.block_ids[num_shared:])
            if max(new.token_ids) >= self.vocab_size:
                refused.append(new.rid)
            else:
                request = self._requests[new.rid] = self._make(new)
                self._need(
                    not request.missing_prompt_logprobs or new.num_computed_tokens <= new.num_prompt_logprobs,
                    f"prompt log-probabilities of {new.rid} are asked for behind computed tokens",
                    plan,
                )
        for rid, blocks in plan.blocks.items():
            self._need(rid in self._known, f"blocks for request {rid}, never seen", plan)
            self._check_granted(plan, blocks)
            for requests in (self._requests, zombies):
                if rid in requests:
                    requests[rid].table.extend(blocks)
        return refused

    def _make(self, new: NewRequest) -> _Request:
        request = _Request(
            spec=new.sampling,
            num_prompt_tokens=new.num_prompt_tokens,
            tokens=[],
            history=[],
            table=list(new.block_ids),
            num_computed=new.num_computed_tokens,
            num_prompt_logprobs=new.num_prompt_logprobs,
            rope=self.rope,
            rope_len=len(new.token_ids) if self.rope.recompute else new.num_prompt_tokens,
        )
        for token in new.token_ids:
            request.append(token)
        return request

    def _check_granted(self, plan: StepPlan, blocks: Iterable[int]) -> None:
        """A block handed out for writing must be nobody's, also not that of a plan whose result is not out."""
        for block in blocks:
            self._need(0 <= block < self.num_blocks, f"block {block} does not exist", plan)
            for rid, request in self._requests.items():
                self._need(block not in request.table, f"block {block} is in the table of request {rid}", plan)
            for pending in self._pending:
                self._need(
                    all(block != written for written, _, _ in pending.writes),
                    f"block {block} handed out while step {pending.result.step} may write it",
                    plan,
                )

    def _check_rows(self, plan: StepPlan, rid: int, begin: int, end: int, tables: Counter[int]) -> None:
        request, size = self._requests[rid], self.block_size
        self._need(end <= len(request.table) * size, f"request {rid} writes position {end - 1} beyond its table", plan)
        self._need(len(set(request.table)) == len(request.table), f"request {rid} has a block twice", plan)
        seen = self._read(request, begin)
        for position, (found, own) in enumerate(zip(seen, request.history, strict=False)):
            self._need(found == own, f"request {rid} sees foreign KV at position {position}", plan)
        for block in request.table[begin // size : (end - 1) // size + 1]:
            self._need(tables[block] == 1, f"request {rid} writes the shared block {block}", plan)

    def _read(self, request: _Request, end: int) -> list[int]:
        size = self.block_size
        return [self._cache[request.table[p // size]][p % size] for p in range(end)]

    def _write(self, request: _Request, begin: int, end: int, pending: _Pending) -> None:
        for position in range(begin, end):
            block, offset = request.table[position // self.block_size], position % self.block_size
            self._cache[block][offset] = request.history[position]
            pending.writes.append((block, offset, request.history[position]))

    def _sample(self, plan: StepPlan, rows: dict[int, tuple[int, int]], refused: list[int], pending: _Pending) -> None:
        sampled = [(rid, -1, FINISH_ERROR) for rid in refused]
        logprobs = {}
        prompt_logprobs = {}
        for rid, (_, end) in rows.items():
            request = self._requests[rid]
            request.num_computed = end
            due = [position for position in request.missing_prompt_logprobs if position <= end]
            if due:
                seen = self._read(request, end)
                prompt_logprobs[rid] = tuple(prompt_logprob(seen[p - 1], request.tokens[p]) for p in due)
                request.num_prompt_logprobs += len(due)
            if end < len(request.tokens):
                continue
            request.decoding = True
            num_output = len(request.tokens) - request.num_prompt_tokens
            token = pick(request.spec, self._read(request, end), self.vocab_size, num_output)
            request.append(token)
            num_output += 1
            finish = finish_code(request.spec, token, num_output)
            if request.spec.logprobs >= 0:
                logprobs[len(sampled)] = TokenLogprobs(chosen=-float(token))
            sampled.append((rid, token, finish))
            if finish == FINISH_STOP and num_output < request.spec.max_tokens:  # the length is known beforehand
                pending.stopped[rid] = request
            if finish != FINISH_NONE:
                del self._requests[rid]
        columns = np.array(sampled, np.int64).reshape(-1, 3)
        pending.result = StepResult(
            step=plan.step,
            generation=plan.generation,
            rids=columns[:, 0],
            tokens=columns[:, 1].astype(np.int32),
            finish=columns[:, 2].astype(np.int8),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            errors=dict.fromkeys(refused, "token id outside the vocabulary"),
            num_prefill_tokens=sum(end - begin for rid, (begin, end) in rows.items() if rid in plan.prefill),
            num_decode_tokens=sum(rid not in plan.prefill for rid in rows),
        )

    def _need(self, holds: bool, what: str, plan: StepPlan) -> None:
        if self.check and not holds:
            raise PlanViolation(f"step {plan.step}: {what}; plan: {plan}")
