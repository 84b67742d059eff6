"""Microseconds per MoE layer that are not expert compute, and per call of a transport.

    python benchmarks/bench_dispatch.py --out benchmarks/results/dispatch.md

"exchange" is a layer whose experts return zeros at once: planning, packing, the wire, unpacking, combine. "grouping" is
sorting the received rows by expert, on top of it. "experts" is the whole layer with the backend that strict ranks use.
Each figure is the mean of the fastest of `--repeats` batches of calls: other work on the machine only adds to it. With
several ranks it is the slowest rank's.
"""

from __future__ import annotations

import argparse
import functools
import os
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from epruntime.comm.select import make_transport
from epruntime.comm.transport import GroupInfo, Support
from epruntime.moe.experts.base import ExpertsBackend, group_rows
from epruntime.moe.placement import contiguous
from epruntime.moe.runtime import MoERuntime
from epruntime.moe.stats import MoEStats
from epruntime.moe.types import ExpertRows, ExpertWeights, StepContext
from epruntime.testing.experts import random_experts, take_experts
from epruntime.testing.ranks import run_ranks

TOKENS = (1, 8, 64)


class NoExperts(ExpertsBackend):
    """Zeros at once; with `grouping`, after the rows were grouped."""

    name = "none"

    def __init__(self, grouping: bool) -> None:
        self._grouping = grouping

    @classmethod
    def supports(cls, weights: ExpertWeights, *, strict: bool) -> Support:
        return Support(ok=True)

    def linear(self, x_MI: torch.Tensor, matrix_SIO: torch.Tensor, ends_S: torch.Tensor) -> torch.Tensor:
        raise AssertionError("never called")

    def forward(self, rows: ExpertRows, weights: ExpertWeights) -> torch.Tensor:
        if self._grouping:
            group_rows(rows, weights.num_slots)
        return rows.x_NH.new_zeros((int((rows.slots_NK >= 0).sum()), rows.x_NH.shape[1]))


def least_us(call: Callable[[], object], calls: int, repeats: int, barrier: Callable[[], None]) -> float:
    for _ in range(5):
        call()
    times = []
    for _ in range(repeats):
        barrier()
        started = time.perf_counter()
        for _ in range(calls):
            call()
        times.append((time.perf_counter() - started) / calls * 1e6)
    return min(times)


@torch.inference_mode()
def layers(group: GroupInfo, args: argparse.Namespace) -> dict[int, dict[str, float]]:
    """Tokens per rank -> figure -> microseconds."""
    dtype = getattr(torch, args.dtype)
    transport = make_transport("auto", group)
    context = StepContext()
    runtime = MoERuntime(
        transport=transport,
        placement_for=lambda n: contiguous(n, group.world_size),
        backend="auto",
        strict=True,
        budget_rows=8192,
        context=context,
        stats=MoEStats(),
    )
    everything = random_experts(args.experts, args.hidden, args.intermediate, dtype=dtype)
    layer = runtime.make_layer(0, args.experts, take_experts(everything, runtime.local_experts(args.experts)))
    real = layer.backend
    generator = torch.Generator().manual_seed(group.rank)
    found: dict[int, dict[str, float]] = {}
    for tokens in TOKENS:
        x = torch.randn(tokens, args.hidden, generator=generator).to(dtype)
        ids = torch.rand(tokens, args.experts, generator=generator).argsort(1)[:, : args.top_k]
        factors = torch.rand(tokens, args.top_k, generator=generator)
        context.num_tokens = tokens
        found[tokens] = {}
        for name, backend, calls in (
            ("exchange", NoExperts(False), 20),
            ("grouping", NoExperts(True), 20),
            ("experts", real, 2),
        ):
            layer.backend = backend
            call = functools.partial(layer.forward, x, ids, factors)
            found[tokens][name] = least_us(call, calls, args.repeats, transport.barrier)
    transport.close()
    return found


def transport_calls(group: GroupInfo, args: argparse.Namespace) -> dict[str, float]:
    transport = make_transport("gloo", group)
    world = group.world_size
    counts = torch.zeros(world, dtype=torch.int64)
    found = {
        "all_gather_counts": least_us(lambda: transport.all_gather_counts(counts), 50, args.repeats, transport.barrier)
    }
    for kib in (4, 64, 1024):
        rows = torch.zeros((4 * world, kib * 256), dtype=torch.uint8)
        found[f"all_to_all_rows {kib} KiB per peer"] = least_us(
            lambda rows=rows: transport.all_to_all_rows(rows, [4] * world, [4] * world).wait(),
            50 if kib < 1024 else 10,
            args.repeats,
            transport.barrier,
        )
    # What the transport does not use: gloo's collective for the same exchange.
    rows, received = torch.zeros((2, 4 * world, 1024), dtype=torch.uint8)
    found["gloo's own alltoall_base, 4 KiB per peer"] = least_us(
        lambda: transport._group.alltoall_base(received, rows, [4] * world, [4] * world).wait(),  # type: ignore[attr-defined]
        50,
        args.repeats,
        transport.barrier,
    )
    transport.close()
    return found


def slowest(results: list[dict[Any, float]]) -> dict[Any, float]:
    return {key: max(result[key] for result in results) for key in results[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--intermediate", type=int, default=512)
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--transport-only", action="store_true")
    parser.add_argument("--out", type=Path, help="also write the report here")
    args = parser.parse_args()
    lines = [
        "# MoE dispatch and combine on the CPU",
        "",
        f"Command: `python {' '.join([Path('benchmarks', Path(sys.argv[0]).name).as_posix(), *sys.argv[1:]])}`",
        "",
        f"{os.cpu_count()} cores, {cpu_name()}, Python {platform.python_version()}, torch {torch.__version__}, one "
        f"thread per rank, load average {os.getloadavg()[0]:.1f} at the start. Microseconds, fastest of {args.repeats} "
        "batches, slowest rank.",
        "",
    ]
    lines += [
        "| gloo, one host | " + " | ".join(f"{r} ranks" for r in args.ranks if r > 1) + " |",
        "|---|" + "---|" * sum(r > 1 for r in args.ranks),
    ]
    calls = [slowest(run_ranks(r, transport_calls, args, timeout_s=120)) for r in args.ranks if r > 1]
    lines += [f"| {name} | " + " | ".join(f"{found[name]:.0f}" for found in calls) + " |" for name in calls[0]]
    if not args.transport_only:
        lines += [
            "",
            f"A layer: hidden {args.hidden}, {args.experts} experts, top-{args.top_k}, intermediate "
            f"{args.intermediate}, {args.dtype}; tokens per rank.",
            "",
            "| ranks | tokens | exchange | with grouping | with experts |",
            "|---|---|---|---|---|",
        ]
        for ranks in args.ranks:
            results = run_ranks(ranks, layers, args, timeout_s=300)
            for tokens in TOKENS:
                row = slowest([result[tokens] for result in results])
                lines.append(
                    f"| {ranks} | {tokens} | {row['exchange']:.0f} | {row['grouping']:.0f} | {row['experts']:.0f} |"
                )
    report = "\n".join(lines) + "\n"
    print(report)
    if args.out:
        args.out.write_text(report)


def cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


if __name__ == "__main__":
    main()
