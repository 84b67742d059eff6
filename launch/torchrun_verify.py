"""Checks a model on the workers that torchrun starts, on one host or many: `epruntime verify` on these ranks.

    torchrun --standalone --nproc-per-node 2 launch/torchrun_verify.py MODEL --num-prompts 4
    torchrun --nnodes 2 --node-rank 0 --nproc-per-node 4 --master-addr HOST --master-port 29500 \\
        launch/torchrun_verify.py MODEL --json report.json            # the same with --node-rank 1 on the other host

The flags are those of `epruntime verify`. One rank per worker unless --expert-parallel-size says fewer; the report is
printed on the host of worker 0, and torchrun's exit code is 0 if the contract holds.
"""

from __future__ import annotations

import sys

from epruntime.errors import ConfigError
from epruntime.launchers.torchrun import num_workers, run_coordinator


def main() -> int:
    from epruntime.cli.launch import verify_main

    defaults = {"expert_parallel_size": num_workers()}
    return verify_main(launcher="torchrun", description=str(__doc__), defaults=defaults)


if __name__ == "__main__":
    try:
        run_coordinator(main)
    except ConfigError as error:
        sys.exit(f"torchrun_verify.py: {error}")
