"""A rank with one fault put into it, to show that a test would see it: `python -m epruntime.testing.faulty_rank`.

The environment variable FAULT names the fault; the local launcher is told to run this module instead of the worker.
"""

from __future__ import annotations

import os
from unittest import mock

from epruntime.worker.process import rank_process

FAULT = "EPRUNTIME_TEST_FAULT"


def swap_experts() -> None:
    """Each rank loads the experts of its opposite rank."""
    from epruntime.moe.placement import Placement

    true = Placement.local_logical
    Placement.local_logical = lambda self, rank: true(self, self.world_size - 1 - rank)  # type: ignore[method-assign]


def drop_contribution() -> None:
    """The results of the last rank's experts are lost."""
    from epruntime.moe.dispatch import Dispatcher

    true = Dispatcher.send_back

    def send_back(self, handle, y_MH):  # type: ignore[no-untyped-def]
        last = self._transport.rank == self._transport.world_size - 1
        true(self, handle, y_MH.zero_() if last else y_MH)

    Dispatcher.send_back = send_back  # type: ignore[method-assign]


def weights_twice() -> None:
    """Routing weights are applied a second time."""
    from epruntime.moe import dispatch
    from epruntime.ops.combine import combine_rows

    def twice(rows_MH, index_TK, weights_TK):  # type: ignore[no-untyped-def]
        return combine_rows(rows_MH, index_TK, weights_TK * weights_TK)

    mock.patch.object(dispatch, "combine_rows", twice).start()


def spoil_copies() -> None:
    """Each slot that holds a further copy of an expert holds the next expert in its place."""
    from epruntime.moe.placement import Placement

    true = Placement.local_logical

    def local_logical(self, rank):  # type: ignore[no-untyped-def]
        held = zip(true(self, rank), self.replica_slots(rank), strict=True)
        return tuple((expert + replica) % self.num_logical for expert, replica in held)

    Placement.local_logical = local_logical  # type: ignore[method-assign]


FAULTS = {"swap": swap_experts, "drop": drop_contribution, "twice": weights_twice, "copies": spoil_copies}


def break_rank(slot: int) -> None:
    """Puts the fault into this process."""
    FAULTS[os.environ[FAULT]]()


if __name__ == "__main__":
    rank_process(break_rank)
