"""CPU time of GroupScheduler.plan, the plan's wire form and GroupScheduler.apply, without ranks.

    python benchmarks/bench_scheduler.py            # prints Markdown; redirect it to benchmarks/results/scheduler.md
    EPRUNTIME_DISABLE_EXTENSION=1 python benchmarks/bench_scheduler.py    # the KV cache's books in Python

The loads are those of epruntime/testing/scheduler_load.py.
"""

from __future__ import annotations

import argparse
import gc
import os
import platform
import statistics
from pathlib import Path

from epruntime.engine.kv_cache import make_kv_cache
from epruntime.engine.kv_reference import ReferenceKVCache
from epruntime.testing.scheduler_load import SchedulerLoad, StepCost

HEADER = """# Scheduler cost per step

`{command}` on {cpus} x {cpu}, Python {python}, load average {load:.1f}.
The KV cache's books are kept in {books}.

CPU milliseconds (`process_time`) of one lockstep step, all groups together: one core does them in turn. Medians; p99 is
that of the sum. Sum is scheduling: plan, wire form and apply. Read is what a front end adds that goes through the new
tokens one by one.

| load | groups | sequences per group | plan | wire form | apply | sum | p99 | sum per group | read |
|---|---|---|---|---|---|---|---|---|---|"""


def measure(load: str, num_groups: int, num_seqs: int, num_steps: int) -> list[StepCost]:
    running = SchedulerLoad(churn=load == "churn", num_groups=num_groups, num_seqs=num_seqs, num_steps=num_steps)
    running.warm_up()
    gc.collect()
    gc.freeze()
    costs = [running.step() for _ in range(num_steps)]
    gc.unfreeze()
    return costs


def row(load: str, groups: int, seqs: int, costs: list[StepCost]) -> str:
    sums = sorted(cost.scheduling for cost in costs)
    total = statistics.median(sums)
    parts = [statistics.median(values) for values in zip(*((c.plan, c.wire, c.apply) for c in costs), strict=True)]
    read = statistics.median(cost.read for cost in costs)
    figures = [*parts, total, sums[int(0.99 * len(sums))], total / groups, read]
    return f"| {load} | {groups} | {seqs} | " + " | ".join(f"{figure:.3f}" for figure in figures) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400, help="steps measured per case")
    parser.add_argument("--groups", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--seqs", type=int, nargs="+", default=[16, 128])
    args = parser.parse_args()
    in_python = isinstance(make_kv_cache(num_blocks=1, block_size=1, prefix_caching=True), ReferenceKVCache)
    listed = " ".join(f"--{name} {' '.join(map(str, getattr(args, name)))}" for name in ("groups", "seqs"))
    command = f"python benchmarks/bench_scheduler.py --steps {args.steps} {listed}"
    print(
        HEADER.format(
            command=f"EPRUNTIME_DISABLE_EXTENSION=1 {command}" if in_python else command,
            cpus=os.cpu_count(),
            cpu=cpu_name(),
            python=platform.python_version(),
            load=os.getloadavg()[0],
            books="Python" if in_python else "C++",
        ),
        flush=True,
    )
    for load in ("decode", "churn"):
        for groups in args.groups:
            for seqs in args.seqs:
                print(row(load, groups, seqs, measure(load, groups, seqs, args.steps)), flush=True)


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or "unknown CPU"


if __name__ == "__main__":
    main()
