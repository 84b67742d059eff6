"""Cost of GroupScheduler.plan, the plan's wire form and GroupScheduler.apply, without ranks.

    python benchmarks/bench_scheduler.py            # prints a Markdown table; redirect it to benchmarks/results/

Two loads, both with `num_seqs` sequences running in each group and two plans in flight:
decode: long outputs, nobody comes or goes; a KV block is granted every 16th step per sequence.
churn: outputs of 64 to 192 tokens; whoever ends is replaced by a new request with a prompt of 256 tokens.
"""

from __future__ import annotations

import argparse
import gc
import os
import platform
import statistics
import time
from collections import deque
from pathlib import Path

import numpy as np

from epruntime.config import SchedulerConfig
from epruntime.engine.scheduler import GroupScheduler
from epruntime.plan import FINISH_LENGTH, FINISH_NONE, SamplingSpec, StepPlan, StepResult

BLOCK_SIZE = 16
PROMPT_TOKENS = 256


class CountingRank:
    """Answers plans with tokens that mean nothing; only counts what each request has left."""

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng
        self._prefill: dict[int, int] = {}
        self._output: dict[int, int] = {}

    def step(self, plan: StepPlan) -> StepResult:
        for rid in plan.drop:
            self._prefill.pop(rid, None)
            self._output.pop(rid, None)
        sampled = [rid for rid in self._output if rid not in self._prefill and rid not in plan.hold]
        for new in plan.new:
            self._prefill[new.rid] = len(new.token_ids) - new.num_computed_tokens
            self._output[new.rid] = new.sampling.max_tokens - (len(new.token_ids) - new.num_prompt_tokens)
        for rid, count in plan.prefill.items():
            self._prefill[rid] -= count
            if not self._prefill[rid]:
                del self._prefill[rid]
                sampled.append(rid)
        finish = []
        for rid in sampled:
            self._output[rid] -= 1
            finish.append(FINISH_NONE if self._output[rid] else FINISH_LENGTH)
            if not self._output[rid]:
                del self._output[rid]
        return StepResult(
            step=plan.step,
            rids=np.array(sampled, np.int64),
            tokens=self._rng.integers(0, 32000, len(sampled), np.int32),
            finish=np.array(finish, np.int8),
        )


def measure(load: str, num_groups: int, num_seqs: int, num_steps: int) -> dict[str, float]:
    """CPU milliseconds per lockstep step of all groups: median of each part, 99th percentile of the sum."""
    rng = np.random.default_rng(0)
    churn = load == "churn"
    max_model_len = PROMPT_TOKENS + (192 if churn else num_steps + 200)
    config = SchedulerConfig(max_num_seqs=num_seqs, max_num_batched_tokens=2048)
    num_blocks = num_seqs * (max_model_len // BLOCK_SIZE + 2)
    schedulers = [
        GroupScheduler(
            config, block_size=BLOCK_SIZE, num_kv_blocks=num_blocks, prefix_caching=True, max_model_len=max_model_len
        )
        for _ in range(num_groups)
    ]
    ranks = [CountingRank(rng) for _ in range(num_groups)]
    next_rid = 1

    def add(scheduler: GroupScheduler) -> None:
        nonlocal next_rid
        output = int(rng.integers(64, 193)) if churn else num_steps + 199
        scheduler.add(
            next_rid,
            rng.integers(0, 32000, PROMPT_TOKENS).tolist(),
            SamplingSpec(temperature=0.0, top_k=0, top_p=1.0, seed=0, stop_ids=(2,), max_tokens=output),
        )
        next_rid += 1

    for scheduler in schedulers:
        for _ in range(num_seqs):
            add(scheduler)
    warm_up = num_seqs * PROMPT_TOKENS // 1024 + 64
    times: dict[str, list[float]] = {"plan": [], "wire": [], "apply": []}
    waiting: deque[list[bytes]] = deque()
    gc.collect()
    gc.freeze()
    for step in range(warm_up + num_steps):
        start = time.process_time()
        plans = [s.plan(step) for s in schedulers]
        planned = time.process_time()
        wires = [p.to_wire() for p in plans]
        encoded = time.process_time()
        del wires
        waiting.append([rank.step(plan) for rank, plan in zip(ranks, plans, strict=True)])
        applied = 0.0
        if len(waiting) == 2:
            results = waiting.popleft()
            begin = time.process_time()
            updates = [s.apply(result) for s, result in zip(schedulers, results, strict=True)]
            applied = time.process_time() - begin
            for scheduler, ups in zip(schedulers, updates, strict=True):
                for update in ups:
                    if update.finish and churn:
                        add(scheduler)
        if step >= warm_up:
            times["plan"].append(1e3 * (planned - start))
            times["wire"].append(1e3 * (encoded - planned))
            times["apply"].append(1e3 * applied)
    sums = sorted(map(sum, zip(*times.values(), strict=True)))
    row = {name: statistics.median(values) for name, values in times.items()}
    row["sum"] = statistics.median(sums)
    row["p99"] = sums[int(0.99 * len(sums))]
    row["decodes"] = sum(s.counters.decode_tokens for s in schedulers) / num_groups / (warm_up + num_steps)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400, help="steps measured per case")
    parser.add_argument("--groups", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--seqs", type=int, nargs="+", default=[16, 128])
    args = parser.parse_args()
    print(
        f"# Scheduler cost per step\n\n`python benchmarks/bench_scheduler.py --steps {args.steps}` on "
        f"{os.cpu_count()} x {cpu_name()}, Python {platform.python_version()}.\n"
    )
    print(
        "CPU milliseconds of one lockstep step, all groups together (one core does them in turn). Medians; p99 is\n"
        "that of the sum.\n"
    )
    print("| load | groups | sequences per group | plan | wire form | apply | sum | p99 | sum per group |")
    print("|---|---|---|---|---|---|---|---|---|")
    for load in ("decode", "churn"):
        for groups in args.groups:
            for seqs in args.seqs:
                row = measure(load, groups, seqs, args.steps)
                print(
                    f"| {load} | {groups} | {seqs} | {row['plan']:.3f} | {row['wire']:.3f} | {row['apply']:.3f} | "
                    f"{row['sum']:.3f} | {row['p99']:.3f} | {row['sum'] / groups:.3f} |",
                    flush=True,
                )


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or "unknown CPU"


if __name__ == "__main__":
    main()
