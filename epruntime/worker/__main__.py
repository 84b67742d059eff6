"""`python -m epruntime.worker`: a rank started by the local launcher."""

from __future__ import annotations

from epruntime.worker.process import rank_process

if __name__ == "__main__":
    rank_process()
