"""ModelRunner: one lockstep step on one rank.

StepPlan -> input batch -> ForwardBatch -> model -> logits -> sampler -> finish decisions -> StepResult
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch

from epruntime.models.batch import ForwardBatch
from epruntime.moe.types import StepContext
from epruntime.plan import FINISH_ERROR, FINISH_NONE, StepPlan, StepResult, TokenLogprobs
from epruntime.worker.input_batch import InputBatch, StepBatch
from epruntime.worker.sampler import SampledTokens, sample


class ForwardModel(Protocol):
    """The part of a loaded model that the runner uses."""

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """float32 logits [len(batch.logits_rows_N), vocabulary]."""
        ...


class ModelRunner:
    """Executes plans in order.

    Every step makes exactly one forward, whether or not there is work: the other ranks wait for this
    one in each MoE layer.

    Args:
        model: computes logits from a flat batch.
        context: shared with the model's MoE layers, set before each forward.
        inputs: the requests of this rank.
    """

    def __init__(self, model: ForwardModel, *, context: StepContext, inputs: InputBatch) -> None:
        self._model, self._context, self._inputs = model, context, inputs

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
        logits_NV = self._model.forward(batch.forward)
        sampling = batch.sampling
        sampled = sample(logits_NV[: len(sampling)], [r.sampling for r in sampling], [r.num_tokens for r in sampling])
        return self._conclude(plan, batch, sampled, refused)

    def _conclude(
        self, plan: StepPlan, batch: StepBatch, sampled: SampledTokens, refused: dict[int, str]
    ) -> StepResult:
        """Feeds the tokens back, lets finished requests go, and packs the result."""
        rids, finish = [r.rid for r in batch.sampling], []
        errors = dict(refused)
        for i, request in enumerate(batch.sampling):
            if i in sampled.errors:
                errors[request.rid] = sampled.errors[i]
                code = FINISH_ERROR
            else:
                code = request.accept(int(sampled.tokens[i]))
            finish.append(code)
            if code != FINISH_NONE:
                self._inputs.end(request, plan.step)
        logprobs: dict[int, TokenLogprobs] = sampled.logprobs
        return StepResult(
            step=plan.step,
            generation=plan.generation,
            rids=np.array(rids + list(refused), np.int64),
            tokens=np.append(sampled.tokens, np.full(len(refused), -1, np.int32)),
            finish=np.array(finish + [FINISH_ERROR] * len(refused), np.int8),
            logprobs=logprobs,
            num_prefill_tokens=batch.num_prefill_tokens,
            num_decode_tokens=batch.num_decode_tokens,
            errors=errors,
        )
