"""What invariance=strict costs: processor time of a decode step and of a prefill, side by side with what it replaces.

    python benchmarks/bench_invariance.py MODEL --ep 1 2 --dtype bfloat16 float32

MODEL is a checkpoint directory (`epruntime.testing.sample_model` makes one). Prints rows of a Markdown table. Processor
time of the rank processes is read rather than the clock, rounds of the modes alternate, and the least of each counts:
other work on the machine disturbs little, and both alike.
"""

from __future__ import annotations

import argparse
import os
import platform
from pathlib import Path
from typing import Any

import torch

from epruntime import LLM, SamplingParams

#: `fast` computes experts with the same kernels; `torch` is fast with torch's own grouped product for them.
MODES: dict[str, dict[str, str]] = {
    "strict": {"invariance": "strict"},
    "fast": {"invariance": "fast"},
    "torch": {"invariance": "fast", "experts_backend": "grouped_mm"},
}


def children() -> set[int]:
    """Processes that this one has started."""
    return {int(pid) for tasks in Path("/proc/self/task").glob("*/children") for pid in tasks.read_text().split()}


def processor_seconds(pids: set[int]) -> float:
    """User and system time that processes have used (proc(5), fields 14 and 15 of stat)."""
    fields = (Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids)
    return sum(int(entry[11]) + int(entry[12]) for entry in fields) / os.sysconf("SC_CLK_TCK")


def prompt(length: int, number: int) -> dict[str, Any]:
    return {"prompt_token_ids": [(7 * i + 131 * number) % 997 + 3 for i in range(length)]}


class Measurement:
    """Least processor time of one mode, milliseconds per rank."""

    def __init__(self, args: argparse.Namespace, mode: str, size: int, dtype: str) -> None:
        self.args, self.mode, self.size = args, mode, size
        before = children()
        self.llm = LLM(
            args.model,
            expert_parallel_size=size,
            **MODES[mode],
            dtype=dtype,
            threads_per_rank=args.threads,
            max_model_len=1024,
            max_num_batched_tokens=512,
            enable_prefix_caching=False,
            num_kv_blocks=800,
        )
        self.ranks = children() - before
        assert len(self.ranks) == size, self.ranks
        self.best: dict[str, float] = {}

    def round(self, number: int) -> None:
        """One prefill of 512 tokens, and some decode steps at each batch size."""
        self._keep("prefill", self._seconds([prompt(512, number + 10 * i) for i in range(4)], 1) / 4)
        for batch in self.args.batches:
            prompts = [prompt(8, number + i) for i in range(batch)]
            first, steps = self._seconds(prompts, 1), self.args.steps
            self._keep(f"decode {batch}", (self._seconds(prompts, steps + 1) - first) / steps)

    def _seconds(self, prompts: list[dict[str, Any]], max_tokens: int) -> float:
        start = processor_seconds(self.ranks)
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        self.llm.generate(prompts, params, use_tqdm=False)
        return (processor_seconds(self.ranks) - start) / self.size

    def _keep(self, what: str, value: float) -> None:
        self.best[what] = min(self.best.get(what, float("inf")), 1e3 * value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--ep", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--dtype", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--mode", nargs="+", default=list(MODES), choices=MODES)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--steps", type=int, default=24, help="decode steps of a round")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--threads", type=int, default=1, help="per rank")
    args = parser.parse_args()
    print(
        f"{os.cpu_count()} cores, {platform.machine()}, torch {torch.__version__}, {args.threads} thread per rank, "
        f"load average {os.getloadavg()[0]:.1f} at the start. Milliseconds of processor "
        f"time per rank, least of {args.rounds} rounds.\n"
    )
    print(
        "| dtype | EP | mode | prefill of 512 tokens | "
        + " | ".join(f"decode step of {b}" for b in args.batches)
        + " |"
    )
    print("|---|---|---|---|" + "---|" * len(args.batches))
    for dtype in args.dtype:
        for size in args.ep:
            measured = [Measurement(args, mode, size, dtype) for mode in args.mode]
            for number in range(args.rounds):
                for entry in measured:
                    entry.round(number)
            for entry in measured:
                times = " | ".join(f"{value:.1f}" for value in entry.best.values())
                print(f"| {dtype} | {size} | {entry.mode} | {times} |", flush=True)
                entry.llm.shutdown()


if __name__ == "__main__":
    main()
