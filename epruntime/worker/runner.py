"""ModelRunner: one lockstep step on one rank.

StepPlan -> input batch -> ForwardBatch -> model -> logits -> sampler -> finish decisions -> StepResult
                                             `-> logits of prompt rows -> prompt log-probabilities -'
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch

from epruntime.models.batch import ForwardBatch
from epruntime.moe.types import StepContext
from epruntime.plan import FINISH_ERROR, FINISH_NONE, StepPlan, StepResult
from epruntime.worker.input_batch import InputBatch, StepBatch
from epruntime.worker.prompt_logprobs import PromptLogprobs, prompt_logprobs
from epruntime.worker.sampler import SampledTokens, SamplingRow, sample


class ForwardModel(Protocol):
    """The part of a loaded model that the runner uses."""

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """float32 logits [len(batch.logits_rows_N), vocabulary]."""
        ...

    def logits(self, rows_N: torch.Tensor) -> torch.Tensor:
        """float32 logits [N, vocabulary] of more rows (int64) of the last batch; no exchange with other ranks."""
        ...


class ModelRunner:
    """Executes plans in order.

    Every step makes exactly one forward, whether or not there is work: the other ranks wait for this
    one in each MoE layer.

    Args:
        model: computes logits from a flat batch.
        context: shared with the model's MoE layers, set before each forward.
        inputs: the requests of this rank.
        on_batch: called with each step's batch before its forward.
    """

    def __init__(
        self,
        model: ForwardModel,
        *,
        context: StepContext,
        inputs: InputBatch,
        on_batch: Callable[[StepBatch], None] | None = None,
    ) -> None:
        self._model, self._context, self._inputs = model, context, inputs
        self._on_batch = on_batch

    @property
    def num_requests(self) -> int:
        return len(self._inputs)

    @torch.inference_mode()
    def step(self, plan: StepPlan) -> StepResult:
        """Carries out one plan.

        Raises:
            ProtocolError: the plan contradicts what this rank holds.
            EngineDeadError, RankLostError: an exchange with the other ranks failed.
        """
        refused = self._inputs.apply(plan)
        batch = self._inputs.build(plan)
        self._context.num_tokens = batch.forward.num_tokens
        if self._on_batch is not None:
            self._on_batch(batch)
        logits_NV = self._model.forward(batch.forward)
        self._context.stamps.sampling()
        prompts = prompt_logprobs(self._model.logits, batch.prompts, vocab_size=logits_NV.shape[1])
        rows = [SamplingRow(spec=r.sampling, position=r.num_tokens, adjuster=r.adjuster) for r in batch.sampling]
        sampled = sample(logits_NV, rows)
        return self._conclude(plan, batch, sampled, prompts, refused)

    def _conclude(
        self,
        plan: StepPlan,
        batch: StepBatch,
        sampled: SampledTokens,
        prompts: PromptLogprobs,
        refused: dict[int, str],
    ) -> StepResult:
        """Feeds the tokens back, lets finished requests go, and packs the result."""
        rids: list[int] = []
        tokens: list[int] = []
        finish: list[int] = []
        errors, logprobs = refused | prompts.errors, {}
        for i, request in enumerate(batch.sampling):
            if request.rid in prompts.errors:
                continue
            token = int(sampled.tokens[i])
            if i in sampled.errors:
                errors[request.rid] = sampled.errors[i]
                code = FINISH_ERROR
            else:
                code = request.accept(token)
            if i in sampled.logprobs:
                logprobs[len(rids)] = sampled.logprobs[i]
            rids.append(request.rid)
            tokens.append(token)
            finish.append(code)
            if code != FINISH_NONE:
                self._inputs.end(request, plan.step)
        for piece in batch.prompts:
            if piece.request.rid in prompts.errors:
                self._inputs.end(piece.request, plan.step)
        failed = [*refused, *prompts.errors]
        return StepResult(
            step=plan.step,
            generation=plan.generation,
            rids=np.array(rids + failed, np.int64),
            tokens=np.array(tokens + [-1] * len(failed), np.int32),
            finish=np.array(finish + [FINISH_ERROR] * len(failed), np.int8),
            logprobs=logprobs,
            num_prefill_tokens=batch.num_prefill_tokens,
            num_decode_tokens=batch.num_decode_tokens,
            errors=errors,
            prompt_logprobs=prompts.entries,
        )
