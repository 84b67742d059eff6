"""What metrics cost: per token, per poll of the ranks' counters, per scrape.

    python benchmarks/bench_metrics.py            # prints a Markdown table; redirect it to benchmarks/results/

Times are processor time of this process, the best of several runs. No ranks are started: their replies are made here.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgpack
import torch

from epruntime.config import EngineConfig
from epruntime.engine.core import CoreStats
from epruntime.engine.observer import Observers
from epruntime.engine.scheduler_counters import SchedulerCounters
from epruntime.engine.stats import EngineStats, EngineView, StatsBook
from epruntime.engine.status import EngineState, EngineStatus
from epruntime.moe.stats import MoEStats
from epruntime.outputs import RequestMetrics as Times
from epruntime.serve.gate import Gate
from epruntime.serve.metrics import Metrics
from epruntime.serve.metrics_requests import RequestMetrics

RUNS = 7


def best(work: Callable[[], object], repeat: int = 1) -> float:
    """Seconds of one call."""
    times = []
    for _ in range(RUNS):
        started = time.process_time_ns()
        for _ in range(repeat):
            work()
        times.append((time.process_time_ns() - started) / repeat)
    return min(times) * 1e-9


def per_token(batch: int) -> float:
    """Seconds per output token, of observers that feed /metrics; `batch` tokens come at once."""
    observers = Observers()
    observers.add(RequestMetrics(max_model_len=65536))
    for rid in range(batch):
        observers.admitted(
            SimpleNamespace(
                request_id=str(rid),
                sequences=[SimpleNamespace(rid=rid)],
                num_prompt_tokens=100,
                params=SimpleNamespace(max_tokens=100),
                metrics=Times(arrival_time=time.monotonic()),
            )  # type: ignore[arg-type]
        )
    taken = [(rid, False) for rid in range(batch)]
    return best(lambda: observers.tokens(taken), repeat=200) / batch


class Engine:
    """As much of an engine as statistics are made of."""

    status = EngineStatus(state=EngineState.READY)

    def __init__(self, ranks: int, layers: int, experts: int) -> None:
        self.book = StatsBook()
        self.model_info: dict[str, Any] = {
            "name": "m", "architecture": "M", "dtype": "bfloat16", "max_model_len": 65536, "num_layers": layers,
            "num_experts": experts, "top_k": 8,
        }  # fmt: skip
        scheduler = SimpleNamespace(num_running=1, num_waiting=1, kv_usage=0.5, counters=SchedulerCounters())

        def rank(slot: int) -> Any:
            info = SimpleNamespace(slot=slot, host="host", ep_rank=slot, incarnation=0)
            return SimpleNamespace(info=info, lost=None, progress=SimpleNamespace(age_s=0.1, silent_s=0.1))

        self.view = EngineView(
            config=EngineConfig.from_kwargs(model="m", expert_parallel_size=ranks),
            core=SimpleNamespace(stats=CoreStats(), schedulers=[scheduler] * ranks),  # type: ignore[arg-type]
            group=SimpleNamespace(  # type: ignore[arg-type]
                ranks=[rank(i) for i in range(ranks)],
                num_kv_blocks=[1] * ranks,
                generation=0,
                transport="gloo",
                experts_backend="grouped_mm",
            ),
            restarts=0,
            answering=True,
        )

    def add_observer(self, observer: object) -> Callable[[], None]:
        return lambda: None

    def on_status(self, callback: object) -> Callable[[], None]:
        return lambda: None

    def stats_snapshot(self) -> EngineStats:
        return self.book.snapshot(self.view)


async def measure(ranks: int, layers: int, experts: int, *, per_expert: bool) -> list[str]:
    stats = MoEStats()
    for layer in range(layers):
        stats.layer(layer, experts).count_experts(torch.randint(experts, (100, 8)))
        stats.layer(layer, experts).pairs_received = 100

    def reply() -> bytes:
        return msgpack.packb({"rss": 1, "moe": stats.packed()})

    engine, packed = Engine(ranks, layers, experts), reply()

    def take() -> None:
        engine.book.take(0, {slot: msgpack.unpackb(packed) for slot in range(ranks)})

    on_rank, at_coordinator = best(reply, 10), best(take, 3)
    gate = Gate()
    metrics = Metrics(gate, per_expert=per_expert)
    gate.ready(engine)  # type: ignore[arg-type]
    longest = []
    for _ in range(RUNS):
        task = asyncio.create_task(metrics.render())
        slices = []
        while not task.done():
            started = time.process_time_ns()
            await asyncio.sleep(0)
            slices.append(time.process_time_ns() - started)
        longest.append((max(slices), sum(slices), len(task.result()[0])))
    slice_ns, whole_ns, size = min(longest)
    return [
        f"{ranks}", f"{layers} x {experts}{' by expert' if per_expert else ''}", f"{len(packed) / 1024:.0f}",
        f"{on_rank * 1e3:.2f}", f"{at_coordinator * 1e3:.2f}", f"{size / 1024:.0f}", f"{whole_ns * 1e-6:.1f}",
        f"{slice_ns * 1e-6:.1f}",
    ]  # fmt: skip


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    print("# Cost of metrics\n")
    machine = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    print(f"`python benchmarks/bench_metrics.py`, {machine}")
    print("\nObservers, per output token (one step brings so many at once):\n")
    print("| tokens | microseconds per token |\n|---:|---:|")
    for batch in (1, 16, 128):
        print(f"| {batch} | {per_token(batch) * 1e6:.2f} |")
    print("\nA poll of the ranks' counters (every 2 s while steps are made), and a scrape:\n")
    heads = [
        "ranks", "layers x experts", "reply, KiB", "on each rank, ms", "at the coordinator, ms", "scrape, KiB",
        "scrape, ms", "its longest slice, ms",
    ]  # fmt: skip
    print("| " + " | ".join(heads) + " |\n|" + "---:|" * len(heads))
    for ranks, layers, experts, per_expert in (
        (2, 3, 8, False), (8, 48, 128, False), (8, 48, 128, True), (64, 58, 256, False), (64, 58, 256, True),
    ):  # fmt: skip
        print("| " + " | ".join(asyncio.run(measure(ranks, layers, experts, per_expert=per_expert))) + " |", flush=True)


if __name__ == "__main__":
    main()
