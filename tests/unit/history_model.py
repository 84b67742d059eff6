"""A model that answers from its history, read back through the KV slots and block tables that it is given.

For tests of the runner: what it yields in any batch must equal what the history alone yields.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import torch

from epruntime.models.batch import ForwardBatch
from epruntime.moe.types import StepContext
from epruntime.plan import (
    FINISH_LENGTH,
    FINISH_NONE,
    FINISH_STOP,
    NewRequest,
    SamplingSpec,
    StepPlan,
    StepResult,
    TokenLogprobs,
)
from epruntime.worker.input_batch import InputBatch
from epruntime.worker.logit_adjuster import LogitAdjuster
from epruntime.worker.runner import ModelRunner
from epruntime.worker.sampler import SamplingRow, sample

VOCABULARY, BLOCK, BLOCKS = 50, 4, 64
NAN_HISTORY_END = 49  # the fake model's logits are NaN after this token


def logits_after(history: list[int]) -> torch.Tensor:
    """float32 [V], a function of the whole history."""
    seed = int.from_bytes(hashlib.sha256(np.array(history, np.int64).tobytes()).digest()[:8], "little")
    row = torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(seed % 2**63)) * 2
    row[NAN_HISTORY_END] = -torch.inf
    return row.fill_(torch.nan) if history[-1] == NAN_HISTORY_END else row


class HistoryModel:
    """Keeps token ids in a paged cache and answers from what the batch lets it read there."""

    def __init__(self) -> None:
        self.cache = np.full(BLOCKS * BLOCK, -99, np.int64)
        self.batches: list[ForwardBatch] = []
        self.head_rows: list[int] = []  # rows of each call of `logits` by the runner
        self.rows: list[int] = []

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        self.rows.append(batch.input_ids_T.numel())
        ids, slots = batch.input_ids_T.numpy(), batch.slots_T.numpy()
        starts, lens, tables = batch.query_starts_S1.numpy(), batch.seq_lens_S, batch.block_tables_SB
        assert starts[0] == 0
        assert starts[-1] == batch.num_tokens
        assert tables.shape[0] == len(lens)
        assert (slots[: batch.num_tokens] >= 0).all()
        assert (slots[batch.num_tokens :] == -1).all()
        self.cache[slots[: batch.num_tokens]] = ids[: batch.num_tokens]
        self.batches.append(batch)
        return self._rows(batch.logits_rows_N)

    def logits(self, rows_N: torch.Tensor) -> torch.Tensor:
        self.head_rows.append(len(rows_N))
        return self._rows(rows_N)

    def _rows(self, rows_N: torch.Tensor) -> torch.Tensor:
        batch = self.batches[-1]
        positions = batch.positions_T.numpy()
        starts, lens, tables = (t.numpy() for t in (batch.query_starts_S1, batch.seq_lens_S, batch.block_tables_SB))
        out = []
        for row in rows_N.tolist():
            s = int(np.searchsorted(starts, row, side="right")) - 1
            assert positions[row] == lens[s] - (starts[s + 1] - row)
            where = np.arange(positions[row] + 1)
            out.append(logits_after(self.cache[tables[s][where // BLOCK] * BLOCK + where % BLOCK].tolist()))
        return torch.stack(out) if out else torch.empty(0, VOCABULARY)


def expected_tokens(prompt: list[int], spec: SamplingSpec, *, num_prompt: int | None = None) -> tuple[list[int], int]:
    """What the request gives when run by itself, without paging, and how it finishes."""
    history, out = list(prompt), []
    limit = spec.max_tokens - (len(prompt) - (num_prompt or len(prompt)))
    while True:
        adjuster = LogitAdjuster.of(spec, np.array(history, np.int32), num_prompt or len(prompt))
        row = SamplingRow(spec=spec, position=len(history), adjuster=adjuster)
        token = int(sample(logits_after(history)[None], [row]).tokens[0])
        history.append(token)
        out.append(token)
        if token in spec.stop_ids:
            return out, FINISH_STOP
        if len(out) == limit:
            return out, FINISH_LENGTH


def make_runner(max_num_batched_tokens: int = 64) -> tuple[ModelRunner, HistoryModel, StepContext]:
    model, context = HistoryModel(), StepContext()
    inputs = InputBatch(
        block_size=BLOCK,
        num_kv_blocks=BLOCKS,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=100,
        vocab_size=VOCABULARY,
    )
    return ModelRunner(model, context=context, inputs=inputs), model, context


def spec(max_tokens: int = 5, stop_ids: tuple[int, ...] = (), temperature: float = 0.0, **others: Any) -> SamplingSpec:
    defaults = {"top_k": 0, "top_p": 1.0, "seed": 0}
    return SamplingSpec(temperature=temperature, stop_ids=stop_ids, max_tokens=max_tokens, **(defaults | others))


def new(
    rid: int,
    tokens: list[int],
    sampling: SamplingSpec,
    blocks: range | tuple[int, ...],
    *,
    num_prompt: int | None = None,
    num_computed: int = 0,
    num_prompt_logprobs: int = 0,
) -> NewRequest:
    return NewRequest(
        rid=rid,
        token_ids=tuple(tokens),
        num_prompt_tokens=num_prompt or len(tokens),
        num_computed_tokens=num_computed,
        block_ids=tuple(blocks),
        sampling=sampling,
        num_prompt_logprobs=num_prompt_logprobs,
    )


class Collected:
    """Runs plans (over the wire format and back) and keeps each request's tokens and end."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner, self.step = runner, 0
        self.tokens: dict[int, list[int]] = {}
        self.finish: dict[int, int] = {}
        self.prompt_logprobs: dict[int, list[TokenLogprobs]] = {}
        self.last: StepResult | None = None

    def run(self, **fields: object) -> StepResult:
        plan = StepPlan.from_wire(StepPlan(step=self.step, generation=3, **fields).to_wire())  # type: ignore[arg-type]
        self.step += 1
        result = StepResult.from_wire(self.runner.step(plan).to_wire())
        assert (result.step, result.generation) == (plan.step, 3)
        columns = result.rids.tolist(), result.tokens.tolist(), result.finish.tolist()
        for rid, token, finish in zip(*columns, strict=True):
            self.tokens.setdefault(rid, []).append(token)
            if finish != FINISH_NONE:
                self.finish[rid] = finish
        for rid, entries in result.prompt_logprobs.items():
            self.prompt_logprobs.setdefault(rid, []).extend(entries)
        self.last = result
        return result
