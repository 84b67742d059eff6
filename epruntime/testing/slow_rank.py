"""A rank that takes its time, so that a test can find it in the middle of something: `python -m
epruntime.testing.slow_rank`.

The environment variable EPRUNTIME_TEST_SLOW is "SLOT:SECONDS": that rank waits so long before the experts of each
layer, and every rank as long before each parameter that it loads. "SLOT:SECONDS:stuck" makes that rank stand still
for good, with the interpreter's lock held, when a prompt of STUCK_TOKENS tokens has come to it.
"""

from __future__ import annotations

import ctypes
import os
import time
from typing import Any

from epruntime.worker.process import rank_process

SLOW = "EPRUNTIME_TEST_SLOW"
#: length of the prompt at which a stuck rank gets stuck.
STUCK_TOKENS = 13


def slow_down(slot: int) -> None:
    """Puts the delays into this process, the rank of `slot`."""
    from epruntime.comm.progress import Stamps
    from epruntime.moe.layer import MoELayer
    from epruntime.worker.input_batch import InputBatch

    which, seconds, *stuck = os.environ[SLOW].split(":")
    delay_s = float(seconds)
    note, forward, apply = Stamps.note, MoELayer.forward, InputBatch.apply

    def slow_note(self: Stamps, text: str) -> None:
        note(self, text)
        time.sleep(delay_s)

    def slow_forward(self: MoELayer, *args: Any) -> Any:
        if not self._context.probe:
            self._context.stamps.at_layer(self.layer_index)
            time.sleep(delay_s)
        return forward(self, *args)

    def stuck_apply(self: InputBatch, plan: Any) -> Any:
        if any(len(new.token_ids) == STUCK_TOKENS for new in plan.new):
            ctypes.PyDLL(None).sleep(600)  # PyDLL: the lock is kept
        return apply(self, plan)

    Stamps.note = slow_note  # type: ignore[method-assign]
    if slot == int(which):
        MoELayer.forward = MoELayer.__call__ = slow_forward  # type: ignore[method-assign,assignment]
        if stuck:
            InputBatch.apply = stuck_apply  # type: ignore[method-assign]


if __name__ == "__main__":
    rank_process(slow_down)
