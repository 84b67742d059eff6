"""A rank whose results depend on what they must not, to show that verify finds it: `python -m
epruntime.testing.faulty_verify`.

The environment variable EPRUNTIME_TEST_VERIFY names a file with the fault's name in it, which is read anew at each
load, so that one pool serves many tests. An absent or empty file is no fault.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from epruntime.plan import NewRequest, StepPlan
from epruntime.verify.requests import PARAMETERS
from epruntime.worker.input_batch import InputBatch
from epruntime.worker.logit_adjuster import LogitAdjuster
from epruntime.worker.process import rank_process
from epruntime.worker.request import RankRequest
from epruntime.worker.sampler import SampledTokens, SamplingRow

FAULT_FILE = "EPRUNTIME_TEST_VERIFY"
#: the layer that is made wrong, and the row of a step from which on it is.
LAYER, ROW = 2, 9
#: rows that are one more than two tiles of a kernel.
TILE_ROW = 33

#: a parameter's place in a LogitAdjuster, and what stands for none there.
ADJUSTED: dict[str, tuple[str, Any]] = {
    "repetition_penalty": ("_seen", None),
    "frequency_penalty": ("_frequency", 0.0),
    "presence_penalty": ("_presence", 0.0),
    "logit_bias": ("_biased_B", np.empty(0, np.int64)),
    "min_tokens": ("_min_tokens", 0),
}
FILTERS: dict[str, Any] = {name: PARAMETERS[name] for name in ("top_k", "top_p", "min_p")}

#: fault -> what it does.
FAULTS = {
    "crowded_row": "in one MoE layer, rows from the tenth of a step on get another last bit, as by a kernel's tail",
    "other_rank": "on the second rank one MoE layer gives other last bits, as where hosts differ in instructions",
    "no_control": "the negative control does nothing, so that nothing can be caught",
    "forgotten_output": "to a request that comes back from a preemption its output counts as prompt",
    **{f"forgotten_{name}": f"such a request has no {name} any more" for name in PARAMETERS},
    **{f"lost_{name}": f"in steps in which several requests sample none has a {name}" for name in ADJUSTED | FILTERS},
    "largest_top_k": "in such steps all that have a top-k have the largest one",
    "shifted_piece": "the later pieces of such a request's history are computed a position too late",
    "other_prompt_logprobs": "one that comes back amid its prompt has one more likely token for each of the rest of it",
    "found_but_one": "the one token of a history that the prefix cache left is computed a position too late",
    "tile_row": f"of exactly {TILE_ROW} rows of logits each gets another last bit",
    "weights_twice": "routing weights are applied a second time: the same in every batch, and wrong",
}


def break_rank(slot: int) -> None:
    """Puts the faults into this process, the rank of `slot`."""
    import torch

    from epruntime.moe.layer import MoELayer
    from epruntime.worker import generation, runner, sampler
    from epruntime.worker.batch_dependent import make_batch_dependent

    now = {"fault": ""}
    true_load, true_forward = generation.Generation.load, MoELayer.forward
    true_init, true_rows, true_sample = RankRequest.__init__, InputBatch._write_rows, sampler.sample

    def load(self: Any, *args: Any) -> Any:
        path = Path(os.environ[FAULT_FILE])
        now["fault"] = path.read_text().strip() if path.exists() else ""
        assert now["fault"] in ("", *FAULTS), now
        return true_load(self, *args)

    def control(*args: Any) -> int:
        return 0 if now["fault"] == "no_control" else make_batch_dependent(*args)

    def forward(self: MoELayer, x_TH: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
        fault, num_tokens = now["fault"], self._context.num_tokens
        if fault == "weights_twice":
            weights_TK = weights_TK * weights_TK
        y_TH = true_forward(self, x_TH, ids_TK, weights_TK)
        if self.layer_index != LAYER or self._context.probe:
            return y_TH
        if fault == "crowded_row":
            return _other_bits(y_TH, ROW, num_tokens)
        if fault == "other_rank" and slot == 1:
            return _other_bits(y_TH, 0, num_tokens)
        return y_TH

    def init(self: RankRequest, new: NewRequest, **more: Any) -> None:
        if len(new.token_ids) > new.num_prompt_tokens:
            name = now["fault"].removeprefix("forgotten_")
            if name in PARAMETERS:
                new = replace(new, sampling=replace(new.sampling, **{name: PARAMETERS[name]}))
        if now["fault"] == "other_prompt_logprobs" and 0 < new.num_prompt_logprobs < new.num_prompt_tokens - 1:
            new = replace(new, sampling=replace(new.sampling, prompt_logprobs=new.sampling.prompt_logprobs + 1))
        true_init(self, new, **more)
        if now["fault"] == "forgotten_output":
            self.adjuster = LogitAdjuster.of(new.sampling, self.tokens, self.num_tokens)

    def write_rows(self: InputBatch, plan: StepPlan, request: RankRequest, row: int, count: int) -> None:
        true_rows(self, plan, request, row, count)
        again = not request.decoding and request.num_tokens > request._num_prompt_tokens
        if now["fault"] == "shifted_piece" and again and request.num_computed:
            self._positions_T[row : row + count] += 1
        if now["fault"] == "found_but_one" and not request.decoding and count == 1 < request.num_tokens:
            self._positions_T[row] += request.num_computed + 1 == request.num_tokens

    def sample(logits_NV: torch.Tensor, rows: Sequence[SamplingRow]) -> SampledTokens:
        if now["fault"] == "tile_row" and len(rows) == TILE_ROW:
            logits_NV = _other_bits(logits_NV, 0, len(rows))
        return true_sample(logits_NV, _without(now["fault"], rows) if len(rows) > 1 else rows)

    mock.patch.object(runner, "sample", sample).start()
    mock.patch.object(RankRequest, "__init__", init).start()
    mock.patch.object(InputBatch, "_write_rows", write_rows).start()
    mock.patch.object(generation.Generation, "load", load).start()
    mock.patch.object(generation, "make_batch_dependent", control).start()
    mock.patch.object(MoELayer, "forward", forward).start()
    mock.patch.object(MoELayer, "__call__", forward).start()


def _without(fault: str, rows: Sequence[SamplingRow]) -> list[SamplingRow]:
    """Rows that sample together, as a fault has them."""
    name, changed = fault.removeprefix("lost_"), list(rows)
    for i, row in enumerate(rows):
        if fault == "largest_top_k" and row.spec.top_k:
            changed[i] = replace(row, spec=replace(row.spec, top_k=max(other.spec.top_k for other in rows)))
        elif fault.startswith("lost_") and name in FILTERS:
            changed[i] = replace(row, spec=replace(row.spec, **{name: FILTERS[name]}))
        elif fault.startswith("lost_") and row.adjuster is not None:
            place, none = ADJUSTED[name]
            adjuster = copy.copy(row.adjuster)
            setattr(adjuster, place, none)
            changed[i] = replace(row, adjuster=adjuster)
    return changed


def _other_bits(y_TH: Any, first: int, end: int) -> Any:
    """Rows first..end-1 with their last bits turned over."""
    import torch

    changed_TH = y_TH.clone()
    changed_TH[first:end].view({4: torch.int32, 2: torch.int16}[y_TH.element_size()]).bitwise_xor_(1)
    return changed_TH


if __name__ == "__main__":
    rank_process(break_rank)
