"""Serves a model on a Ray cluster, as a job of it or from one of its nodes.

    ray job submit --working-dir . -- python launch/ray_serve.py MODEL --expert-parallel-size 2 --host 0.0.0.0
    python launch/ray_serve.py MODEL --expert-parallel-size 2          # on a node, in the foreground

The flags are those of `epruntime serve`; the cluster is the one of this machine unless --ray-address says otherwise.
MODEL is a directory on every node. The server is on the node that runs this program: a job's is the head.

C++ kernels that the upload leaves out are found in an installed epruntime, or built on the first node, and go to every
rank. `ray job stop` lets running requests end, for as long as RAY_JOB_STOP_WAIT_TIME_S of the job allows.
"""

from __future__ import annotations

import sys
from pathlib import Path

try:
    import epruntime  # noqa: F401
except ModuleNotFoundError:  # run from a checkout that is not installed
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from epruntime.cli.ray_launch import main

if __name__ == "__main__":
    sys.exit(main(str(__doc__)))
