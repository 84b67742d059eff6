"""`python -m epruntime.worker`: a rank started by the local launcher. The bootstrap is read from standard input."""

from __future__ import annotations

import sys

from epruntime.comm.identity import receive_bootstrap


def main() -> int:
    bootstrap = receive_bootstrap()  # first: it ties this process to its parent, and what follows imports for seconds
    from epruntime.worker.main import configure_logging, run_rank

    configure_logging()
    return run_rank(bootstrap)


if __name__ == "__main__":
    sys.exit(main())
