"""`python -m epruntime.worker`: a rank started by the local launcher. The bootstrap is read from standard input."""

from __future__ import annotations

import logging
import os
import sys

from epruntime.comm.identity import receive_bootstrap


def main() -> int:
    bootstrap = receive_bootstrap()  # first: it ties this process to its parent, and what follows imports for seconds
    from epruntime.worker.main import configure_logging, run_rank

    configure_logging()
    return run_rank(bootstrap)


if __name__ == "__main__":
    code = main()
    # All that had to be closed is closed. Taking the interpreter apart, with the modules that transformers imported,
    # would keep the coordinator waiting for seconds.
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
