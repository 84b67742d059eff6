"""Rounds of concurrent gRPC and HTTP streams on `epruntime serve`, with random cancels: does anything stay behind?

    python benchmarks/bench_streams.py --rounds 20        # prints a Markdown report; redirect it to benchmarks/results/

Serves a tiny random Mixtral on two rank processes. Ends with status 1 if a stream ended wrongly, if KV blocks or
requests were left after a round, or if memory grew by more than 5 % after the first quarter of the rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import sys
import tempfile
from pathlib import Path

import httpx2

from epruntime.client import AsyncClient
from epruntime.testing import tiny_models
from epruntime.testing.server_process import ServerProcess
from epruntime.testing.stream_load import Load, ServerUse, run_round, settle

SERVED_NAME = "tiny"
MOST_GROWTH = 1.05
MIB = 2**20


async def measure(model: Path, load: Load, rounds: int) -> int:
    # A small KV cache: the system gives a rank its pages as they are first written, which must be over after a round.
    arguments = [
        str(model), "--port", "0", "--grpc-port", "0", "--expert-parallel-size", "2", "--threads-per-rank", "1",
        "--served-model-name", SERVED_NAME, "--max-num-seqs", "128", "--max-num-batched-tokens", "512",
        "--num-kv-blocks", "1024", "--log-stats-interval-s", "0",
    ]  # fmt: skip
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=0)
    uses: list[ServerUse] = []
    failed = False
    async with ServerProcess(arguments) as server:
        await server.start(120)
        async with (
            AsyncClient(server.address) as client,
            httpx2.AsyncClient(base_url=server.http_url, limits=limits, timeout=60, trust_env=False) as http,
        ):
            print(
                "| round | seconds | whole | cut off | wrong | tokens | KV use after | server MiB | ranks MiB | files |"
            )
            print("|---|---|---|---|---|---|---|---|---|---|")
            for number in range(rounds):
                result = await run_round(client, http, SERVED_NAME, load, seed=number)
                use = await settle(http, server.pid, 10)
                uses.append(use)
                failed |= bool(result.wrong) or not use.idle
                memory = [round(m / MIB) for m in use.memory]
                print(
                    f"| {number + 1} | {result.seconds:.1f} | {result.whole} | {result.cut} | {result.wrong.total()} | "
                    f"{result.tokens} | {use.kv_usage:.0%} | {memory[0]} | {', '.join(map(str, memory[1:]))} | "
                    f"{use.files} |",
                    flush=True,
                )
                for what, count in result.wrong.items():
                    print(f"{count} x {what}", file=sys.stderr)
    warm, last = uses[len(uses) // 4], uses[-1]
    growth = [after / before for before, after in zip(warm.memory, last.memory, strict=True)]
    print(
        f"\nMemory of the server and of each rank after the last round, as a multiple of that after round "
        f"{len(uses) // 4 + 1}: {', '.join(f'{g:.3f}' for g in growth)}."
    )
    return 1 if failed or max(growth) > MOST_GROWTH else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--grpc", type=int, default=500, help="gRPC streams of a round")
    parser.add_argument("--http", type=int, default=500, help="HTTP streams of a round")
    parser.add_argument("--cut-share", type=float, default=0.4, help="share of the streams that are left early")
    args = parser.parse_args()
    print("# Many concurrent streams\n")
    print(f"`python benchmarks/bench_streams.py {' '.join(sys.argv[1:])}` on {os.cpu_count()} cores, Python "
          f"{platform.python_version()}. Clients, server and two ranks share the cores.\n")  # fmt: skip
    load = Load(grpc=args.grpc, http=args.http, cut_share=args.cut_share)
    with tempfile.TemporaryDirectory() as directory:
        _, model = tiny_models.build("mixtral", seed=0)
        tiny_models.save(model, directory)
        return asyncio.run(measure(Path(directory), load, args.rounds))


if __name__ == "__main__":
    sys.exit(main())
