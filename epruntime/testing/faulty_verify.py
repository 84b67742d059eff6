"""A rank whose results depend on what they must not, to show that verify finds it: `python -m
epruntime.testing.faulty_verify`.

The environment variable EPRUNTIME_TEST_VERIFY names the fault; the local launcher is told to run this module instead of
the worker.
"""

from __future__ import annotations

import os
from typing import Any

from epruntime.worker.process import rank_process

FAULT = "EPRUNTIME_TEST_VERIFY"
#: the layer that is made wrong, and the row of a step from which on it is.
LAYER, ROW = 2, 9


def crowded_row() -> None:
    """In one MoE layer, rows from the tenth of a step on get another last bit: as where a kernel has a tail loop."""
    _change_rows(lambda y_TH, num_tokens: y_TH[ROW:num_tokens])


def other_rank() -> None:
    """On the second rank one MoE layer gives other last bits: as where hosts compute with other instructions."""
    _change_rows(lambda y_TH, num_tokens: y_TH[:num_tokens])


def no_control() -> None:
    """The negative control does nothing, so that nothing can be caught."""
    from epruntime.worker import generation

    generation.make_batch_dependent = lambda module, context: 0


FAULTS = {"crowded_row": crowded_row, "other_rank": other_rank, "no_control": no_control}


def _change_rows(part: Any) -> None:
    import torch

    from epruntime.moe.layer import MoELayer

    true = MoELayer.forward

    def forward(self: MoELayer, *args: Any) -> torch.Tensor:
        y_TH = true(self, *args)
        if self.layer_index == LAYER and not self._context.probe:
            y_TH = y_TH.clone()
            bits = {2: torch.int16, 4: torch.int32}[y_TH.element_size()]
            part(y_TH, self._context.num_tokens).view(bits).bitwise_xor_(1)
        return y_TH

    MoELayer.forward = MoELayer.__call__ = forward  # type: ignore[method-assign]


def break_rank(slot: int) -> None:
    """Puts the fault into this process."""
    fault = os.environ[FAULT]
    if fault != "other_rank" or slot == 1:
        FAULTS[fault]()


if __name__ == "__main__":
    rank_process(break_rank)
