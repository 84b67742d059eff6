"""Microseconds per row of the sampler, by vocabulary and kind of choice.

    python benchmarks/bench_sampler.py [--vocabulary 32000 151936] [--rows 8] [--seconds 0.5]

The logits are random. "equals" rounds them to multiples of 1/4, as bfloat16 does: where equal logits lie on both sides
of the edge of a nucleus, torch's slower sort decides. Penalties are those of a history of 2000 random tokens.
"""

from __future__ import annotations

import argparse
import platform
import time

import numpy as np
import torch

from epruntime.plan import SamplingSpec
from epruntime.worker.logit_adjuster import LogitAdjuster
from epruntime.worker.sampler import SamplingRow, sample

HISTORY = 2000  # tokens, for the penalties

KINDS: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0.0},
    "greedy, 5 logprobs": {"temperature": 0.0, "logprobs": 5},
    "temperature": {"temperature": 0.8},
    "top_k 50": {"temperature": 0.8, "top_k": 50},
    "top_p 0.9": {"temperature": 0.8, "top_p": 0.9},
    "top_k 50, top_p 0.9": {"temperature": 0.8, "top_k": 50, "top_p": 0.9},
    "min_p 0.05": {"temperature": 0.8, "min_p": 0.05},
    "greedy, repetition penalty": {"temperature": 0.0, "repetition_penalty": 1.1},
    "greedy, all penalties": {
        "temperature": 0.0,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.5,
    },
}


def microseconds_per_row(logits_NV: torch.Tensor, kind: dict[str, float], seconds: float) -> float:
    """Median over repetitions."""
    rows = logits_NV.shape[0]
    defaults = {"top_k": 0, "top_p": 1.0, "logprobs": -1}
    specs = [SamplingSpec(seed=i, stop_ids=(), max_tokens=1, **{**defaults, **kind}) for i in range(rows)]  # type: ignore[arg-type]
    history = np.random.default_rng(0).integers(0, logits_NV.shape[1], HISTORY, np.int32)
    adjusters = [LogitAdjuster.of(spec, history, HISTORY // 2) for spec in specs]
    times, end, position = [], time.perf_counter() + seconds, 0
    while len(times) < 3 or time.perf_counter() < end:
        start = time.perf_counter()
        sample(
            logits_NV,
            [
                SamplingRow(spec=spec, position=position + i, adjuster=adjuster)
                for i, (spec, adjuster) in enumerate(zip(specs, adjusters, strict=True))
            ],
        )
        times.append(time.perf_counter() - start)
        position += rows
    return float(np.median(times)) / rows * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabulary", type=int, nargs="+", default=[32000, 151936])
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=0.5, help="time spent on each figure")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(
        f"{platform.machine()}, torch {torch.__version__}, numpy {np.__version__}, 1 thread, {arguments.rows} rows; "
        "microseconds per row (median)"
    )
    print("| kind | " + " | ".join(f"V={v}" for v in arguments.vocabulary) + " |")
    print("|---|" + "---|" * len(arguments.vocabulary))
    batches = [
        torch.randn(arguments.rows, v, generator=torch.Generator().manual_seed(0)) * 4 for v in arguments.vocabulary
    ]
    cases = [(name, kind, batches) for name, kind in KINDS.items()]
    cases.append(("top_p 0.9, equals", KINDS["top_p 0.9"], [(batch * 4).round() / 4 for batch in batches]))
    for name, kind, logits in cases:
        figures = [f"{microseconds_per_row(batch, kind, arguments.seconds):.0f}" for batch in logits]
        print(f"| {name} | " + " | ".join(figures) + " |")


if __name__ == "__main__":
    main()
