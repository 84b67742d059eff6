"""A rank that is a process of its own, which reads its bootstrap from standard input: `python -m epruntime.worker`."""

from __future__ import annotations

import gc
import logging
import os
import sys
from collections.abc import Callable
from typing import NoReturn

from epruntime.comm.identity import receive_bootstrap


def rank_process(prepare: Callable[[int], None] | None = None) -> NoReturn:
    """Is the rank that the launcher wants, and ends the process.

    Args:
        prepare: called with the slot before the rank begins; tests put faults into it.
    """
    bootstrap = receive_bootstrap()  # first: it ties this process to its parent, and what follows imports for seconds
    gc.disable()  # until `prepare_process`: it would go through what is imported again and again
    from epruntime.worker.main import run_rank

    if prepare is not None:
        prepare(bootstrap.slot)
    code = run_rank(bootstrap)
    # All that had to be closed is closed. Taking the interpreter apart, with the modules that transformers imported,
    # would keep the coordinator waiting for seconds.
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
