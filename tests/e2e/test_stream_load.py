"""A thousand streams at once on a server with two ranks, many of them cut off: all end, nothing stays behind."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx2
import pytest

from epruntime.client import AsyncClient
from epruntime.testing import tiny_models
from epruntime.testing.server_process import ServerProcess
from epruntime.testing.stream_load import Load, RoundResult, ServerUse, run_round, settle

pytest.importorskip("torch")

ROUNDS = 3
LOAD = Load(grpc=500, http=500)
#: KV blocks are few, so that all of their pages have been written to after the first round.
OPTIONS = ["--port", "0", "--grpc-port", "0", "--expert-parallel-size", "2", "--threads-per-rank", "1",
           "--served-model-name", "tiny", "--max-num-seqs", "128", "--max-num-batched-tokens", "512",
           "--num-kv-blocks", "512"]  # fmt: skip


async def _rounds(model: Path) -> list[tuple[RoundResult, ServerUse]]:
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=0)
    async with ServerProcess([str(model), *OPTIONS]) as server:
        await server.start(120)
        async with (
            AsyncClient(server.address) as client,
            httpx2.AsyncClient(base_url=server.http_url, limits=limits, timeout=120, trust_env=False) as http,
        ):
            return [
                (await run_round(client, http, "tiny", LOAD, seed), await settle(http, server.pid, 60))
                for seed in range(ROUNDS)
            ]


@pytest.mark.slow
def test_a_thousand_streams_with_random_cancels(tmp_path):
    _, model = tiny_models.build("mixtral", seed=0)
    tiny_models.save(model, tmp_path)
    rounds = asyncio.run(_rounds(tmp_path))
    for result, use in rounds:
        print(result, use)
        assert not result.wrong
        assert result.whole + result.cut == LOAD.grpc + LOAD.http
        assert min(result.whole, result.cut) > 100
        assert use.idle, use
    before, after = rounds[1][1], rounds[-1][1]
    for old, new in zip(before.memory, after.memory, strict=True):
        assert new < old * 1.05, (before.memory, after.memory)
    assert after.files <= before.files + 4
