"""C++ kernels beside torch, in one run on one machine: `python benchmarks/bench_ops.py [--threads N] [--output FILE]`.

Each attention row is compared with the plain-torch reference (row-independent, what runs without the extension) and
with torch's `scaled_dot_product_attention` on the same keys laid out contiguously, sequence by sequence: torch at its
best, without pages and without row independence. The machine's limits are measured by the same process: memory reads
(sum of a tensor far larger than the caches) and fp32 matrix products. A case is timed in turn with its rivals, five
rounds, the median taken. With one thread the clock is the process's CPU time, so that other processes on the machine
only take part of the caches and of the memory's rate; with more it is wall time.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from epruntime.ops import reference
from epruntime.ops.attention import paged_attention
from epruntime.ops.combine import combine_rows
from epruntime.ops.dispatch import pack_rows
from epruntime.ops.extension import kernel_signature, load, why_absent

ROUNDS = 5
BLOCK = 16


def now() -> float:
    return time.process_time() if torch.get_num_threads() == 1 else time.perf_counter()


def seconds(functions: dict[str, Callable[[], object]], least: float = 0.05) -> dict[str, float]:
    """Median seconds a call, the functions taking turns."""
    repeats = {}
    for name, function in functions.items():
        function()
        started = now()
        function()
        repeats[name] = max(1, int(least / (now() - started)))
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(ROUNDS):
        for name, function in functions.items():
            started = now()
            for _ in range(repeats[name]):
                function()
            times[name].append((now() - started) / repeats[name])
    return {name: statistics.median(values) for name, values in times.items()}


def machine_limits() -> tuple[float, float]:
    """(GB/s of memory reads, GFLOP/s of an fp32 matrix product)."""
    large, a = torch.ones(128 << 20), torch.randn(1024, 1024)
    took = seconds({"read": large.sum, "multiply": lambda: a @ a})
    return large.nbytes / took["read"] / 1e9, 2 * 1024**3 / took["multiply"] / 1e9


@dataclass(frozen=True, kw_only=True)
class AttentionCase:
    """`seqs` sequences of `keys` keys each, the last `queries` of which ask. H, K heads; D, V sizes."""

    name: str
    seqs: int
    keys: int
    queries: int
    H: int
    K: int
    D: int
    V: int
    dtype: torch.dtype
    latent: bool = False

    def run(self) -> str:
        columns = -(-self.keys // BLOCK)
        k_cache = torch.randn(self.seqs * columns, BLOCK, self.K, self.D).to(self.dtype)
        v_cache = k_cache[..., : self.V]
        if not self.latent:
            v_cache = torch.randn(self.seqs * columns, BLOCK, self.K, self.V).to(self.dtype)
        q = torch.randn(self.seqs * self.queries, self.H, self.D).to(self.dtype)
        tables = torch.randperm(self.seqs * columns, dtype=torch.int32).view(self.seqs, columns)
        starts = torch.arange(self.seqs + 1, dtype=torch.int32) * self.queries
        lens = torch.full((self.seqs,), self.keys, dtype=torch.int32)
        scale = self.D**-0.5
        whole = (self.seqs, columns * BLOCK, self.K, -1)
        dense = [
            cache[tables.long()].view(whole)[:, : self.keys].transpose(1, 2).contiguous()
            for cache in (k_cache, v_cache)
        ]
        q_dense = q.view(self.seqs, self.queries, self.H, self.D).transpose(1, 2).contiguous()
        seen = torch.ones(self.queries, self.keys, dtype=torch.bool).tril(self.keys - self.queries)

        def kernel() -> torch.Tensor:
            return paged_attention(
                q, k_cache, v_cache, block_tables_SB=tables, query_starts_S1=starts, seq_lens_S=lens, scale=scale
            )

        def plain() -> torch.Tensor:
            return reference.paged_attention(q, k_cache, v_cache, tables, starts, lens, scale, 0, 0, 0.0, None)

        def sdpa() -> torch.Tensor:
            return torch.nn.functional.scaled_dot_product_attention(
                q_dense,
                *dense,
                attn_mask=None if self.queries == 1 else seen,
                scale=scale,
                enable_gqa=self.H != self.K,
            )

        expected = sdpa().transpose(1, 2).reshape(q.shape[0], self.H, self.V).float()
        torch.testing.assert_close(kernel().float(), expected, rtol=2e-2, atol=2e-2)
        took = seconds({"kernel": kernel, "plain": plain, "sdpa": sdpa})
        pairs = self.seqs * (self.keys * self.queries - self.queries * (self.queries - 1) // 2)
        flops = 2 * pairs * self.H * (self.D + self.V)
        read = self.seqs * self.keys * self.K * (self.D + (0 if self.latent else self.V)) * self.dtype.itemsize
        return row(self.name, took, f"{read / took['kernel'] / 1e9:.1f}", f"{flops / took['kernel'] / 1e9:.0f}")


@dataclass(frozen=True, kw_only=True)
class CombineCase:
    name: str
    tokens: int
    choices: int
    hidden: int
    dtype: torch.dtype

    def run(self) -> str:
        rows = torch.randn(self.tokens * self.choices, self.hidden).to(self.dtype)
        index = torch.randperm(rows.shape[0], dtype=torch.int32).view(self.tokens, self.choices)
        weights = torch.rand(self.tokens, self.choices)
        took = seconds(
            {
                "kernel": lambda: combine_rows(rows, index, weights),
                "plain": lambda: reference.combine_rows(rows, index, weights),
            }
        )
        moved = rows.nbytes + self.tokens * self.hidden * rows.itemsize
        return row(self.name, took, f"{moved / took['kernel'] / 1e9:.1f}", "")


@dataclass(frozen=True, kw_only=True)
class PackCase:
    """`rows` message rows from `tokens` rows of x."""

    name: str
    tokens: int
    rows: int
    choices: int
    hidden: int
    dtype: torch.dtype

    def run(self) -> str:
        x = torch.randn(self.tokens, self.hidden).to(self.dtype)
        token = torch.arange(self.rows) % self.tokens
        slots = torch.zeros(self.rows, self.choices, dtype=torch.int32)
        slots_at, row_bytes = x[0].nbytes, x[0].nbytes + 4 * self.choices
        took = seconds(
            {
                "kernel": lambda: pack_rows(x, token, slots, slots_at=slots_at, row_bytes=row_bytes),
                "plain": lambda: reference.pack_rows(x, token, slots, slots_at, row_bytes),
            }
        )
        return row(self.name, took, f"{2 * self.rows * row_bytes / took['kernel'] / 1e9:.1f}", "")


def row(name: str, took: dict[str, float], gigabytes: str, gigaflops: str) -> str:
    def against(rival: str) -> str:
        return f"{took[rival] * 1e6:.0f} us, {took[rival] / took['kernel']:.1f}x" if rival in took else ""

    cells = (name, f"{took['kernel'] * 1e6:.0f} us", against("plain"), against("sdpa"), gigabytes, gigaflops)
    return "| " + " | ".join(cells) + " |"


F32, BF16 = torch.float32, torch.bfloat16
HEADS: dict[str, dict[str, int]] = {
    "GQA 16/4 x 128": {"H": 16, "K": 4, "D": 128, "V": 128},
    "MHA 16 x 128": {"H": 16, "K": 16, "D": 128, "V": 128},
    "GQA 9/3 x 64": {"H": 9, "K": 3, "D": 64, "V": 64},
    "MLA 16 x 576/512": {"H": 16, "K": 1, "D": 576, "V": 512, "latent": True},
}


def attention(kind: str, heads: str, dtype: torch.dtype, seqs: int, keys: int, queries: int = 1) -> AttentionCase:
    name = f"{kind}, {heads}, {'fp32' if dtype == F32 else 'bf16'}"
    return AttentionCase(name=name, seqs=seqs, keys=keys, queries=queries, dtype=dtype, **HEADS[heads])


CASES: list[AttentionCase | CombineCase | PackCase] = [
    attention("decode 16 x 1,024", "GQA 16/4 x 128", F32, 16, 1024),
    attention("decode 16 x 1,024", "GQA 16/4 x 128", BF16, 16, 1024),
    attention("decode 16 x 1,024", "MHA 16 x 128", F32, 16, 1024),
    attention("decode 16 x 1,024", "MHA 16 x 128", BF16, 16, 1024),
    attention("decode 4 x 64", "GQA 9/3 x 64", F32, 4, 64),
    attention("decode 8 x 1,024", "MLA 16 x 576/512", BF16, 8, 1024),
    attention("prefill 1 x 512", "GQA 16/4 x 128", F32, 1, 512, 512),
    attention("prefill 1 x 512", "GQA 16/4 x 128", BF16, 1, 512, 512),
    attention("chunk 64 after 960", "GQA 9/3 x 64", F32, 1, 1024, 64),
    CombineCase(name="combine 32 x 8 of 2,048, bf16", tokens=32, choices=8, hidden=2048, dtype=BF16),
    CombineCase(name="combine 2,048 x 8 of 2,048, bf16", tokens=2048, choices=8, hidden=2048, dtype=BF16),
    CombineCase(name="combine 2,048 x 2 of 576, fp32", tokens=2048, choices=2, hidden=576, dtype=F32),
    PackCase(name="pack 64 rows of 32 x 2,048, bf16", tokens=32, rows=64, choices=8, hidden=2048, dtype=BF16),
    PackCase(name="pack 1,024 rows of 512 x 2,048, bf16", tokens=512, rows=1024, choices=8, hidden=2048, dtype=BF16),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="torch's threads (%(default)s)")
    parser.add_argument("--output", type=Path, help="also write the report to this file")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    if load() is None:
        raise SystemExit(f"nothing to compare: {why_absent()}")
    processor = next(
        (line.split(":")[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")),  # noqa: PTH123, SIM115
        platform.machine(),
    )
    bandwidth, flops = machine_limits()
    clock = "process CPU time" if arguments.threads == 1 else "wall time"
    signature = ", ".join(f"{name} {value}" for name, value in kernel_signature().items())
    lines = [
        "# Kernels beside torch",
        "",
        f"`python benchmarks/bench_ops.py --threads {arguments.threads}`, {time.strftime('%Y-%m-%d')}; {processor}, "
        f"threads: {arguments.threads}; {clock}; Python {platform.python_version()}; {signature}.",
        "",
        f"Limits of the machine, measured in the same run: memory reads {bandwidth:.1f} GB/s, fp32 matrix product "
        f"{flops:.0f} GFLOP/s. GB/s counts each key, value and row once, so that a case that fits a cache may exceed "
        "memory. `x` is the rival's time over ours.",
        "",
        "| case | kernel | plain torch | SDPA, contiguous keys | GB/s | GFLOP/s |",
        "|---|---|---|---|---|---|",
    ]
    print("\n".join(lines), flush=True)
    with torch.inference_mode():
        for case in CASES:
            lines.append(case.run())
            print(lines[-1], flush=True)
    if arguments.output:
        arguments.output.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
