"""Serves a model on the workers that torchrun starts, on one host or many.

    torchrun --standalone --nproc-per-node 2 launch/torchrun_serve.py MODEL
    torchrun --nnodes 2 --node-rank 0 --nproc-per-node 4 --master-addr HOST --master-port 29500 \\
        launch/torchrun_serve.py MODEL --host 0.0.0.0                 # the same with --node-rank 1 on the other host

The flags are those of `epruntime serve`. One rank per worker unless --expert-parallel-size says fewer; the server is
on the host of worker 0.
"""

from __future__ import annotations

import sys

from epruntime.errors import ConfigError
from epruntime.launchers.torchrun import num_workers, run_coordinator


def main() -> int:
    from epruntime.cli.launch import serve_main
    from epruntime.launchers.torchrun_environment import drain_timeout_s

    defaults = {"expert_parallel_size": num_workers(), "drain_timeout_s": drain_timeout_s()}
    return serve_main(launcher="torchrun", description=str(__doc__), defaults=defaults, skip=("ray_address",))


if __name__ == "__main__":
    try:
        run_coordinator(main)
    except ConfigError as error:
        sys.exit(f"torchrun_serve.py: {error}")
