"""A rank with one fault put into it, to show that a test would see it: `python -m epruntime.testing.faulty_rank`.

The environment variable FAULT names the fault; the local launcher is told to run this module instead of the worker.
"""

from __future__ import annotations

import os
import sys
from unittest import mock

from epruntime.comm.identity import receive_bootstrap

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


FAULTS = {"swap": swap_experts, "drop": drop_contribution, "twice": weights_twice}


def main() -> int:
    bootstrap = receive_bootstrap()
    from epruntime.worker.main import configure_logging, run_rank

    configure_logging()
    FAULTS[os.environ[FAULT]]()
    return run_rank(bootstrap)


if __name__ == "__main__":
    sys.exit(main())
