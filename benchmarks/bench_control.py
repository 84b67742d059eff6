"""Microseconds per lockstep step of the control channel, and of a gRPC stream that carries the same bytes.

    python benchmarks/bench_control.py --out benchmarks/results/control.md

A step: one plan (16 decoding requests) to every rank, one result (16 tokens) from every rank, with nothing computed.
"calls" is the engine's way, RankHandle.call; "frames" is the connection beneath it; "gRPC" is a bidirectional stream
per rank, grpc.aio in the coordinator and the blocking client in the rank. Ranks are processes of their own. Each
figure is of the fastest of `--repeats` batches: other work on the machine only adds to it. CPU is the coordinator's.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import queue
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import msgpack
import numpy as np

from epruntime.launchers.local import LocalLauncher
from epruntime.launchers.pool import RankPool
from epruntime.plan import StepPlan, StepResult

PLAN = StepPlan(step=1_000, generation=1, blocks={rid: (rid,) for rid in range(16)}).to_wire()
RESULT = StepResult(step=1_000, rids=np.arange(16), tokens=np.arange(16), finish=np.zeros(16)).to_wire()

Step = Callable[[], Awaitable[None]]


async def fastest(step: Step, steps: int, repeats: int) -> tuple[float, float]:
    """(wall, coordinator CPU) microseconds of one step, from the batch with the least wall time."""
    for _ in range(50):
        await step()
    best = (float("inf"), 0.0)
    for _ in range(repeats):
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in range(steps):
            await step()
        best = min(best, ((time.perf_counter() - wall) / steps * 1e6, (time.process_time() - cpu) / steps * 1e6))
    return best


async def measure_control(num_ranks: int, steps: int, repeats: int) -> dict[str, tuple[float, float]]:
    pool = await RankPool.start(num_ranks, launcher=LocalLauncher(entry_module="epruntime.testing.echo_rank"))
    try:

        async def calls() -> None:
            for call in [rank.call("echo", plan=PLAN, data=RESULT) for rank in pool.ranks]:
                await call

        out = {"calls": await fastest(calls, steps, repeats)}

        connections = [rank.connection for rank in pool.ranks]
        all_in, waiting = asyncio.Event(), 0

        def take(message: dict[str, Any]) -> None:
            nonlocal waiting
            waiting -= 1
            if waiting == 0:
                all_in.set()

        async def frames() -> None:
            nonlocal waiting
            waiting = len(connections)
            all_in.clear()
            for connection in connections:
                assert connection is not None
                connection.send({"type": "echo", "id": 1, "plan": PLAN, "data": RESULT})
            await all_in.wait()

        for connection in connections:
            assert connection is not None
            connection.on_message = take
        out["frames"] = await fastest(frames, steps, repeats)
        return out
    finally:
        await pool.stop()


async def measure_grpc(num_ranks: int, steps: int, repeats: int) -> tuple[float, float]:
    sends: list[asyncio.Queue[bytes]] = []
    receives: asyncio.Queue[bytes] = asyncio.Queue()
    all_here = asyncio.Event()

    async def serve(replies: AsyncIterator[bytes], context: Any) -> None:
        plans: asyncio.Queue[bytes] = asyncio.Queue()
        sends.append(plans)
        if len(sends) == num_ranks:
            all_here.set()

        async def read() -> None:
            async for reply in replies:
                receives.put_nowait(reply)

        reader = asyncio.create_task(read())
        while plan := await plans.get():
            await context.write(plan)
        reader.cancel()

    server = grpc.aio.server()
    handler = grpc.method_handlers_generic_handler("bench", {"run": grpc.stream_stream_rpc_method_handler(serve)})
    server.add_generic_rpc_handlers((handler,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    command = [sys.executable, __file__, "--grpc-rank", str(port)]
    ranks = [await asyncio.create_subprocess_exec(*command) for _ in range(num_ranks)]
    try:
        await asyncio.wait_for(all_here.wait(), 60)

        async def step() -> None:
            for plans in sends:
                plans.put_nowait(msgpack.packb({"type": "plan", "id": 1, "plan": PLAN, "data": RESULT}))
            for _ in sends:
                msgpack.unpackb(await receives.get(), strict_map_key=False)

        return await fastest(step, steps, repeats)
    finally:
        for plans in sends:
            plans.put_nowait(b"")
        for rank in ranks:
            await rank.wait()
        await server.stop(2)


def grpc_rank(port: int) -> None:
    outbox: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:

        def outgoing() -> Iterator[bytes]:
            while True:
                yield outbox.get()

        for plan in channel.stream_stream("/bench/run")(outgoing()):
            message = msgpack.unpackb(plan, strict_map_key=False)
            outbox.put(msgpack.packb({"type": "done", "id": message["id"], "data": message["data"]}))


async def report(arguments: argparse.Namespace) -> str:
    load = os.getloadavg()[0]
    system = f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}"
    rows = []
    for num_ranks in arguments.ranks:
        control = await measure_control(num_ranks, arguments.steps, arguments.repeats)
        streams = await measure_grpc(num_ranks, arguments.steps // 2, arguments.repeats)
        figures = [control["frames"], control["calls"], streams]
        rows.append(f"| {num_ranks} | " + " | ".join(f"{wall:.0f} ({cpu:.0f})" for wall, cpu in figures) + " |")
    wire = len(msgpack.packb({"type": "plan", "id": 1, "plan": PLAN, "data": RESULT}))
    return "\n".join(
        [
            "# Control channel, lockstep",
            "",
            f"Command: `python benchmarks/bench_control.py --repeats {arguments.repeats} --out "
            "benchmarks/results/control.md`",
            "",
            f"{system}, grpcio {grpc.__version__}, load average {load:.1f} at the start. Microseconds per step, and in "
            f"brackets the coordinator's CPU microseconds, of the fastest of {arguments.repeats} batches; a plan of "
            f"{wire} bytes to each rank and an answer from each. The ranks share the cores with the coordinator.",
            "",
            "| ranks | frames | calls | gRPC stream |",
            "|---|---|---|---|",
            *rows,
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--steps", type=int, default=300, help="steps per batch")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--grpc-rank", type=int, metavar="PORT", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.grpc_rank:
        grpc_rank(arguments.grpc_rank)
        return
    text = asyncio.run(report(arguments))
    print(text)
    if arguments.out:
        arguments.out.write_text(text)


if __name__ == "__main__":
    main()
