"""Row-independent products beside torch in one run: `bench_gemm.py [--threads 1 2] [--output FILE]`.

Dense products stand beside `F.linear`, grouped ones beside `grouped_mm`: as torch computes them, where a row's bits
depend on the number of rows, and with the rows of each padded to a multiple of 32, which on some machines hides that.
Each call takes the next of many weights, 192 MiB of them, as a model's layers do, so that they come from memory. A
case is timed in turn with its rivals, five rounds, the median taken. With one thread the clock is the process's CPU
time, so that other processes on the machine only take part of the caches and of the memory's rate; with more it is wall
time.
"""

from __future__ import annotations

import argparse
import itertools
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from epruntime.ops.extension import kernel_signature, load, why_absent
from epruntime.ops.gemm import grouped_matmul, matmul

ROUNDS = 5
WEIGHT_BYTES = 192 << 20
PADDING = 32
F32, BF16 = torch.float32, torch.bfloat16


def now() -> float:
    return time.process_time() if torch.get_num_threads() == 1 else time.perf_counter()


def seconds(functions: dict[str, Callable[[int], object]], calls: int, least: float = 0.1) -> dict[str, float]:
    """Median seconds a call of function(i), i = 0, 1, ..., calls - 1, 0, ...; the functions taking turns."""
    repeats = {}
    for name, function in functions.items():
        function(0)
        started = now()
        function(1 % calls)
        repeats[name] = max(3, int(least / (now() - started)))
    turns = itertools.cycle(range(calls))
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(ROUNDS):
        for name, function in functions.items():
            started = now()
            for _ in range(repeats[name]):
                function(next(turns))
            times[name].append((now() - started) / repeats[name])
    return {name: statistics.median(values) for name, values in times.items()}


def padded(rows: int) -> int:
    return -(-rows // PADDING) * PADDING


def check(out: torch.Tensor, expected: torch.Tensor) -> None:
    bound = 2e-2 if out.dtype == BF16 else 1e-4
    torch.testing.assert_close(out.float(), expected.float(), rtol=bound, atol=bound * float(expected.abs().max()))


@dataclass(frozen=True, kw_only=True)
class Dense:
    """`rows` rows of `size_in` times a weight [size_out, size_in]."""

    rows: int
    size_in: int
    size_out: int
    dtype: torch.dtype

    def run(self) -> str:
        nbytes = self.size_in * self.size_out * self.dtype.itemsize
        weights = [torch.randn(self.size_out, self.size_in).to(self.dtype) for _ in range(WEIGHT_BYTES // nbytes)]
        x = torch.randn(self.rows, self.size_in).to(self.dtype)
        more = torch.zeros(padded(self.rows), self.size_in, dtype=self.dtype)
        more[: self.rows] = x
        linear = torch.nn.functional.linear
        functions: dict[str, Callable[[int], object]] = {
            "ours": lambda i: matmul(x, weights[i].t()),
            "torch": lambda i: linear(x, weights[i]),
        }
        if len(more) > self.rows:
            functions["padded"] = lambda i: linear(more, weights[i])
        check(matmul(x, weights[0].t()), linear(x, weights[0]))
        took = seconds(functions, len(weights))
        name = f"{self.rows} x {self.size_in} -> {self.size_out}, {'fp32' if self.dtype == F32 else 'bf16'}"
        return line(name, took, nbytes, 2 * self.rows * self.size_in * self.size_out)


@dataclass(frozen=True, kw_only=True)
class Grouped:
    """`experts` groups of `rows` rows; weights [size_out, size_in], or [size_in, size_out] if `transposed`."""

    experts: int
    rows: int
    size_in: int
    size_out: int
    dtype: torch.dtype
    transposed: bool = False

    def run(self) -> str:
        nbytes = self.experts * self.size_in * self.size_out * self.dtype.itemsize
        matrices = []
        for _ in range(WEIGHT_BYTES // nbytes):
            if self.transposed:
                matrices.append(torch.randn(self.experts, self.size_in, self.size_out).to(self.dtype))
            else:
                weight = torch.randn(self.experts, self.size_out, self.size_in).to(self.dtype)
                matrices.append(weight.transpose(1, 2))
        ends = torch.arange(1, self.experts + 1, dtype=torch.int32)
        x = torch.randn(self.experts * self.rows, self.size_in).to(self.dtype)
        step = padded(self.rows)
        more = torch.zeros(self.experts, step, self.size_in, dtype=self.dtype)
        more[:, : self.rows] = x.view(self.experts, self.rows, -1)
        flat, grouped_mm = more.flatten(0, 1), torch.nn.functional.grouped_mm
        ours_ends, padded_ends = ends * self.rows, ends * step
        check(grouped_matmul(x, matrices[0], ours_ends), grouped_mm(x, matrices[0], offs=ours_ends))
        took = seconds(
            {
                "ours": lambda i: grouped_matmul(x, matrices[i], ours_ends),
                "torch": lambda i: grouped_mm(x, matrices[i], offs=ours_ends),
                "padded": lambda i: grouped_mm(flat, matrices[i], offs=padded_ends),
            },
            len(matrices),
        )
        name = (
            f"{self.experts} experts x {self.rows} x {self.size_in} -> {self.size_out}, "
            f"{'fp32' if self.dtype == F32 else 'bf16'}{', transposed' if self.transposed else ''}"
        )
        return line(name, took, nbytes, 2 * self.experts * self.rows * self.size_in * self.size_out)


def line(name: str, took: dict[str, float], nbytes: int, flops: int) -> str:
    def against(rival: str) -> str:
        return f"{took[rival] * 1e6:.0f} us, {took[rival] / took['ours']:.2f}x" if rival in took else ""

    cells = (
        name,
        f"{took['ours'] * 1e6:.0f} us",
        against("torch"),
        against("padded"),
        f"{nbytes / took['ours'] / 1e9:.1f}",
        f"{flops / took['ours'] / 1e9:.0f}",
    )
    return "| " + " | ".join(cells) + " |"


def cases() -> list[Dense | Grouped]:
    dense = [
        Dense(rows=rows, size_in=size_in, size_out=size_out, dtype=dtype)
        for size_in, size_out in ((576, 1536), (2048, 2048))
        for dtype in (F32, BF16)
        for rows in (1, 4, 32, 512)
    ]
    grouped = [
        Grouped(experts=8, rows=rows, size_in=2048, size_out=768, dtype=dtype, transposed=transposed)
        for dtype in (F32, BF16)
        for transposed in (False, True)
        for rows in ((1, 2, 4) if not transposed else (2,))
    ]
    return [*dense, *grouped]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="torch's threads (%(default)s)")
    parser.add_argument("--output", type=Path, help="also write the report to this file")
    arguments = parser.parse_args()
    if load() is None:
        raise SystemExit(f"nothing to compare: {why_absent()}")
    processor = next(
        (line.split(":")[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")),  # noqa: PTH123, SIM115
        platform.machine(),
    )
    signature = ", ".join(f"{name} {value}" for name, value in kernel_signature().items())
    lines = [
        "# Row-independent matrix products beside torch",
        "",
        f"`python benchmarks/bench_gemm.py --threads {' '.join(map(str, arguments.threads))}`, "
        f"{time.strftime('%Y-%m-%d')}; {processor}; Python {platform.python_version()}; {signature}.",
        "",
        "Torch: `F.linear`, and `grouped_mm` for groups; padded: the same, the rows of each padded to a multiple of "
        f"{PADDING}. GB/s counts the weights. `x` is the rival's time over ours. Load of the machine at the start: "
        f"{os.getloadavg()[0]:.0f} on {os.cpu_count()} cores.",
    ]
    print("\n".join(lines), flush=True)
    with torch.inference_mode():
        for threads in arguments.threads:
            torch.set_num_threads(threads)
            torch.manual_seed(0)
            large = torch.ones(64 << 20)
            rate = large.nbytes / seconds({"read": lambda _, x=large: x.sum()}, 1)["read"] / 1e9
            head = [
                "",
                f"## {threads} thread{'s' if threads > 1 else ''}",
                "",
                f"Clock: {'process CPU time' if threads == 1 else 'wall time'}. Memory reads (a sum): {rate:.1f} GB/s.",
                "",
                "| product | ours | torch | torch, padded | GB/s | GFLOP/s |",
                "|---|---|---|---|---|---|",
            ]
            print("\n".join(head), flush=True)
            lines += head
            for case in cases():
                lines.append(case.run())
                print(lines[-1], flush=True)
    if arguments.output:
        arguments.output.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
