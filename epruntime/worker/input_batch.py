"""InputBatch: the requests that a rank holds, and the flat ragged arrays of a step.

StepPlan -> apply: drop, new, blocks -> build: prefill, hold -> ForwardBatch and the requests that sample

Shape letters: T rows of the flat batch, S sequences, B block-table width, N rows whose logits are wanted.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from epruntime.errors import ProtocolError
from epruntime.models.batch import ForwardBatch
from epruntime.models.info import LENGTH_HAS_NO_EFFECT, RopeLengths
from epruntime.plan import NewRequest, StepPlan
from epruntime.worker.request import RankRequest

#: Steps for which the end of a request is remembered: plans made before its result came back may still name it.
_ENDED_MEMORY_STEPS = 16


@dataclass(frozen=True, kw_only=True)
class PromptPiece:
    """Rows of a step's batch that predict tokens of a request's prompt, whose log-probabilities are asked for.

    Attributes:
        row: the first one in the flat batch; the others follow it.
        token_ids: int32, the prompt's tokens that the rows predict. first_position: of the first of them.
    """

    request: RankRequest
    row: int
    token_ids: np.ndarray
    first_position: int


@dataclass(frozen=True, kw_only=True)
class StepBatch:
    """One step's work.

    Attributes:
        forward: what the model computes. Its tensors live until the next `build`.
        sampling: requests whose logits are the leading rows of the model's output, in order.
        prompts: what is due of prompts' log-probabilities; the model is asked for these rows afterwards.
        scheduled: requests with rows in this step, in the order of their rows.
        num_prefill_tokens, num_decode_tokens: valid rows of each kind; they add up to forward.num_tokens.
    """

    forward: ForwardBatch
    sampling: tuple[RankRequest, ...]
    prompts: tuple[PromptPiece, ...]
    scheduled: list[RankRequest]
    num_prefill_tokens: int
    num_decode_tokens: int


class InputBatch:
    """Requests by rid, in order of entry, which is also the order of their rows.

    Args:
        block_size: tokens per KV block.
        num_kv_blocks: ids of granted blocks are below this.
        max_num_batched_tokens: most valid rows of a step.
        max_model_len: longest history.
        vocab_size: token ids are below this.
        rope: how keys depend on the length of their sequence.
    """

    def __init__(
        self,
        *,
        block_size: int,
        num_kv_blocks: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        vocab_size: int,
        rope: RopeLengths = LENGTH_HAS_NO_EFFECT,
    ) -> None:
        self._requests: dict[int, RankRequest] = {}
        self._ended: dict[int, int] = {}  # rid -> step in which it ended here, oldest first
        self._block_size, self._num_kv_blocks = block_size, num_kv_blocks
        self._max_num_batched_tokens, self._max_model_len = max_num_batched_tokens, max_model_len
        self._rope, self._rope_lens_S = rope, np.zeros(max_num_batched_tokens, np.int32)
        self._vocab_size = vocab_size
        self._input_ids_T = np.zeros(max_num_batched_tokens, np.int64)
        self._positions_T = np.zeros(max_num_batched_tokens, np.int64)
        self._slots_T = np.zeros(max_num_batched_tokens, np.int64)
        self._query_starts_S1 = np.zeros(max_num_batched_tokens + 1, np.int32)
        self._seq_lens_S = np.zeros(max_num_batched_tokens, np.int32)
        self._block_tables = np.zeros(0, np.int32)
        self._logits_rows_N = np.zeros(max_num_batched_tokens, np.int64)

    def __len__(self) -> int:
        return len(self._requests)

    def apply(self, plan: StepPlan) -> dict[int, str]:
        """Carries out `drop`, `new` and `blocks`.

        Returns:
            rid -> reason, of new requests that are refused and forgotten.

        Raises:
            ProtocolError: the plan names a request that is not here, or enters one twice.
        """
        self._forget_ended(plan.step)
        for rid in plan.drop:
            self._requests.pop(rid, None)  # gone already if it ended here meanwhile
        refused = {}
        for new in plan.new:
            if new.rid in self._requests:
                raise ProtocolError(f"plan of step {plan.step}: request {new.rid} enters, but is here already")
            if not 0 <= new.num_computed_tokens < len(new.token_ids):
                raise ProtocolError(
                    f"plan of step {plan.step}: request {new.rid} has {new.num_computed_tokens} computed tokens of "
                    f"{len(new.token_ids)}; at least one must be left to compute"
                )
            outside = self._outside_vocabulary(new)
            if outside is not None:
                refused[new.rid] = f"token id {outside} is outside the model's vocabulary of {self._vocab_size}"
                self._ended[new.rid] = plan.step
                continue
            entered = RankRequest(new, max_model_len=self._max_model_len, rope=self._rope)
            if entered.num_missing_prompt_logprobs > 0 and new.num_computed_tokens > new.num_prompt_logprobs:
                raise ProtocolError(
                    f"plan of step {plan.step}: request {new.rid} wants log-probabilities of its prompt from position "
                    f"{new.num_prompt_logprobs + 1} on, but its first {new.num_computed_tokens} tokens are not computed"
                )
            self._requests[new.rid] = entered
            self._check_blocks(plan, new.rid, new.block_ids)
        for rid, block_ids in plan.blocks.items():
            request = self._named(plan, "blocks", rid)
            if request is not None:
                self._check_blocks(plan, rid, block_ids)
                request.grant(block_ids)
        return refused

    def build(self, plan: StepPlan) -> StepBatch:
        """Lays out the step's rows and counts them as computed: `prefill`, and the decoding requests not in `hold`.

        Raises:
            ProtocolError: more rows than the rank was configured for, more tokens than a request has, or
                positions that its block table does not cover.
        """
        hold = {rid for rid in plan.hold if self._named(plan, "hold", rid) is not None}
        for rid, count in plan.prefill.items():
            self._check_prefill(plan, rid, count)
        sampling, logits_rows, prompts = [], [], []
        row = sequences = num_decode = widest = 0
        scheduled = []
        for rid, request in self._requests.items():
            count = plan.prefill.get(rid, 0)
            if request.decoding and rid not in hold:
                count = 1
                num_decode += 1
            if count == 0:
                continue
            if row + count > self._max_num_batched_tokens:
                raise ProtocolError(
                    f"plan of step {plan.step} computes more than max_num_batched_tokens="
                    f"{self._max_num_batched_tokens} tokens ({row + count} at request {rid})"
                )
            self._write_rows(plan, request, row, count)
            if request.num_missing_prompt_logprobs > 0:
                prompts += _prompt_pieces(request, row, count)
            row += count
            request.num_computed += count
            self._query_starts_S1[sequences + 1] = row
            self._seq_lens_S[sequences] = request.num_computed
            self._rope_lens_S[sequences] = request.rope_len
            sequences += 1
            scheduled.append(request)
            widest = max(widest, -(-request.num_computed // self._block_size))
            if request.num_uncomputed == 0:
                sampling.append(request)
                logits_rows.append(row - 1)
        return StepBatch(
            forward=self._forward_batch(row, scheduled, widest, logits_rows),
            sampling=tuple(sampling),
            prompts=tuple(prompts),
            scheduled=scheduled,
            num_prefill_tokens=row - num_decode,
            num_decode_tokens=num_decode,
        )

    def end(self, request: RankRequest, step: int) -> None:
        """Forgets a request that this rank has finished; plans in flight may go on naming it."""
        del self._requests[request.rid]
        self._ended[request.rid] = step

    def _write_rows(self, plan: StepPlan, request: RankRequest, row: int, count: int) -> None:
        start, size = request.num_computed, self._block_size
        end = start + count
        if end > request.num_blocks * size:
            raise ProtocolError(
                f"plan of step {plan.step}: request {request.rid} computes up to position {end - 1}, but its "
                f"{request.num_blocks} KV blocks of {size} end before that"
            )
        if count == 1:  # the common case, decoding: scalars are quicker than slices of one
            self._input_ids_T[row] = request.tokens[start]
            self._positions_T[row] = start
            self._slots_T[row] = int(request.block_ids[start // size]) * size + start % size
            return
        positions = np.arange(start, end)
        self._input_ids_T[row : row + count] = request.tokens[start:end]
        self._positions_T[row : row + count] = positions
        blocks = request.block_ids[positions // size].astype(np.int64)
        self._slots_T[row : row + count] = blocks * size + positions % size

    def _forward_batch(
        self, num_tokens: int, scheduled: list[RankRequest], widest: int, logits_rows: list[int]
    ) -> ForwardBatch:
        if num_tokens == 0:
            return ForwardBatch.idle()
        num_logits, sequences = len(logits_rows), len(scheduled)
        self._logits_rows_N[:num_logits] = logits_rows
        if self._block_tables.size < sequences * widest:
            self._block_tables = np.zeros(2 * sequences * widest, np.int32)
        tables_SB = self._block_tables[: sequences * widest].reshape(sequences, widest)
        for s, request in enumerate(scheduled):
            used = min(request.num_blocks, widest)
            tables_SB[s, :used] = request.block_ids[:used]
            tables_SB[s, used:] = 0
        return ForwardBatch(
            input_ids_T=torch.from_numpy(self._input_ids_T[:num_tokens]),
            positions_T=torch.from_numpy(self._positions_T[:num_tokens]),
            slots_T=torch.from_numpy(self._slots_T[:num_tokens]),
            query_starts_S1=torch.from_numpy(self._query_starts_S1[: sequences + 1]),
            seq_lens_S=torch.from_numpy(self._seq_lens_S[:sequences]),
            block_tables_SB=torch.from_numpy(tables_SB),
            logits_rows_N=torch.from_numpy(self._logits_rows_N[:num_logits]),
            num_tokens=num_tokens,
            rope_lens_S=torch.from_numpy(self._rope_lens_S[:sequences]),
        )

    def _outside_vocabulary(self, new: NewRequest) -> int | None:
        """A token id of the request, or of its logit bias, that the model has no row for; None if there is none."""
        ids = (*new.token_ids, *(token for token, _ in new.sampling.logit_bias))
        low, high = min(ids), max(ids)
        if low < 0:
            return low
        return high if high >= self._vocab_size else None

    def _named(self, plan: StepPlan, what: str, rid: int) -> RankRequest | None:
        """The request that a plan names; None if it ended here lately, so that there is nothing to do."""
        request = self._requests.get(rid)
        if request is None and rid not in self._ended:
            raise ProtocolError(f"plan of step {plan.step}: {what} names request {rid}, which is not on this rank")
        return request

    def _check_prefill(self, plan: StepPlan, rid: int, count: int) -> None:
        request = self._named(plan, "prefill", rid)
        if request is None:
            return
        if request.decoding or not 0 < count <= request.num_uncomputed:
            state = "is decoding" if request.decoding else f"has {request.num_uncomputed} left"
            raise ProtocolError(
                f"plan of step {plan.step}: prefill computes {count} tokens of request {rid}, which {state}"
            )

    def _check_blocks(self, plan: StepPlan, rid: int, block_ids: tuple[int, ...]) -> None:
        if block_ids and (min(block_ids) < 0 or max(block_ids) >= self._num_kv_blocks):
            raise ProtocolError(
                f"plan of step {plan.step}: request {rid} is granted KV blocks {list(block_ids)}, but this rank has "
                f"blocks 0..{self._num_kv_blocks - 1}"
            )

    def _forget_ended(self, step: int) -> None:
        for rid, ended in list(self._ended.items()):
            if step - ended <= _ENDED_MEMORY_STEPS:
                break
            del self._ended[rid]


def _prompt_pieces(request: RankRequest, row: int, count: int) -> list[PromptPiece]:
    """Of `count` rows from `row` on, about to be computed: those that predict what is missing; counts it as reported.

    The row at position p predicts the token at p + 1. What is missing begins at or behind the rows' first position,
    since a request enters with no more computed than reported.
    """
    first = request.num_prompt_logprobs
    skipped = first - request.num_computed
    num = min(count - skipped, request.num_missing_prompt_logprobs)
    if num < 1:
        return []
    request.num_prompt_logprobs += num
    ids = request.tokens[first + 1 : first + 1 + num]
    return [PromptPiece(request=request, row=row + skipped, token_ids=ids, first_position=first + 1)]
