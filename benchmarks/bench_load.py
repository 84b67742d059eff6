"""Bytes read, memory and time of loading one rank's part of a model, at several expert-parallel sizes.

    python benchmarks/bench_load.py [--sizes 1 2 4] [--layers 8] [--out benchmarks/results/load.md]

Makes a qwen3_moe checkpoint of random bf16 weights (about 0.4 GB by default; values do not matter to loading). Then,
for every rank of every size, a fresh process drops the files from the page cache, loads its part, and reports:
bytes needed, bytes read (rchar of /proc/self/io), bytes that came from disk (read_bytes, whole pages and readahead
included), growth of PSS (proportional set size, /proc/self/smaps_rollup) at its peak and at the end, and seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

MIB = 1 << 20


def make_checkpoint(path: Path, layers: int) -> None:
    import torch

    from epruntime.testing import tiny_models

    _, model = tiny_models.build(
        "qwen3_moe",
        dtype=torch.bfloat16,
        num_hidden_layers=layers,
        hidden_size=512,
        moe_intermediate_size=256,
        num_experts=64,
        num_experts_per_tok=8,
        vocab_size=16384,
    )
    tiny_models.save(model, path, max_shard_size="100MB")


def pss_bytes() -> int:
    with Path("/proc/self/smaps_rollup").open() as rollup:
        for line in rollup:
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    raise RuntimeError("no Pss in /proc/self/smaps_rollup")


def io_counts() -> dict[str, int]:
    with Path("/proc/self/io").open() as counts:
        return {name: int(value) for name, value in (line.split(":") for line in counts)}


def evict(path: Path) -> None:
    for file in path.glob("*.safetensors"):
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


class PeakPss:
    """Samples PSS every 20 ms in a thread while active."""

    def __enter__(self) -> PeakPss:
        self.start = self.peak = pss_bytes()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        return self

    def _run(self) -> None:
        while not self._stop.wait(0.02):
            self.peak = max(self.peak, pss_bytes())

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self.end = pss_bytes()


def measure(path: Path, warm: Path, rank: int, size: int) -> dict[str, float]:
    """One rank's load, in this process."""
    import torch

    from epruntime.models.loader import load_model
    from epruntime.moe.placement import contiguous
    from epruntime.testing.holder import Holder

    torch.set_num_threads(1)
    load_model(warm, dtype="auto", moe=Holder((0,)))  # imports and lazy tables of the libraries are made now
    local = contiguous(64, size).local_logical(rank)
    evict(path)
    before = io_counts()
    with PeakPss() as pss:
        start = time.perf_counter()
        model = load_model(path, dtype="auto", moe=Holder(local))
        seconds = time.perf_counter() - start
    after = io_counts()
    report = model.load_report
    return {
        "needed": report.needed_bytes,
        "checkpoint": report.checkpoint_bytes,
        "headers": report.header_bytes,
        "rchar": after["rchar"] - before["rchar"],
        "disk": after["read_bytes"] - before["read_bytes"],
        "pss_peak": max(pss.peak, pss.end) - pss.start,
        "pss_end": pss.end - pss.start,
        "seconds": seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--measure", nargs=4, metavar=("PATH", "WARM", "RANK", "SIZE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        path, warm, rank, size = options.measure
        print(json.dumps(measure(Path(path), Path(warm), int(rank), int(size))))
        return

    rows = []
    with tempfile.TemporaryDirectory(prefix="bench-load-") as folder:
        path, warm = Path(folder, "model"), Path(folder, "warm")
        make_checkpoint(path, options.layers)
        make_checkpoint(warm, 1)
        for size in options.sizes:
            for rank in range(size):
                out = subprocess.run(
                    [sys.executable, __file__, "--measure", str(path), str(warm), str(rank), str(size)],
                    check=True,
                    capture_output=True,
                    text=True,
                    timeout=600,
                )
                found = json.loads(out.stdout.splitlines()[-1])
                rows.append((size, rank, found))
                print(f"EP {size} rank {rank}: {found}", file=sys.stderr)
    text = render(rows, " ".join(["python", *sys.argv]))
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(text)
    print(text)


def render(rows: list[tuple[int, int, dict[str, float]]], command: str) -> str:
    import torch
    import transformers

    lines = [
        "# Loading one rank's part of a checkpoint",
        "",
        f"{platform.machine()}, {os.cpu_count()} cores; Python {platform.python_version()}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}. One process per row, one thread, page cache of the files dropped "
        "first. Sizes in MiB.",
        "",
        f"    {command}",
        "",
        "| EP | rank | checkpoint | needed | read (rchar) | ratio | from disk | PSS peak | PSS after | seconds |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for size, rank, row in rows:
        mib = {name: f"{value / MIB:.1f}" for name, value in row.items()}
        lines.append(
            f"| {size} | {rank} | {mib['checkpoint']} | {mib['needed']} | {mib['rchar']} | "
            f"{row['rchar'] / row['needed']:.3f} | {mib['disk']} | +{mib['pss_peak']} | +{mib['pss_end']} | "
            f"{row['seconds']:.2f} |"
        )
    lines += [
        "",
        "PSS is the growth over a process that has already loaded a one-layer model: the weights, and "
        'nothing beside them. "From disk" counts whole pages and the kernel\'s readahead.',
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
