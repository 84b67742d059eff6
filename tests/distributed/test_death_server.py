"""`epruntime serve` and a rank that dies or stops: what clients and health probes are told, and what is left."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from leftovers import Leftovers

from epruntime.client import AsyncClient
from epruntime.proto import inference_pb2 as pb
from epruntime.proto import inference_pb2_grpc, keys
from epruntime.testing import tiny_models
from epruntime.testing.patience import PATIENCE_S, soon
from epruntime.testing.reference import greedy_reference
from epruntime.testing.server_process import ServerProcess

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

HOST = socket.gethostname()
PROMPT, COUNT = [5, 17, 99, 3], 6
START_S = 90.0
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> tuple[Path, list[int]]:
    _, made = tiny_models.build("mixtral", 0)
    expected = greedy_reference(made, [PROMPT], max_new_tokens=COUNT).tokens[0]
    return tiny_models.save(made, tmp_path_factory.mktemp("tiny")), expected


@pytest.fixture(autouse=True)
def nothing_left(tmp_path_factory, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("t")))
    monkeypatch.setenv("TMPDIR", tempfile.tempdir)
    before = Leftovers.now()
    yield
    assert before.grown_by(descriptors=False) == {}


class Served:
    """A running server, and what health watchers have heard of it."""

    def __init__(self, process: ServerProcess, channel: grpc.aio.Channel) -> None:
        self.process, self.channel = process, channel
        self.heard: list[int] = []
        self.stub = inference_pb2_grpc.InferenceStub(channel)
        self.decoding = asyncio.Event()

    async def watch(self) -> None:
        request = health_pb2.HealthCheckRequest(service="")
        async for response in health_pb2_grpc.HealthStub(self.channel).Watch(request):
            self.heard.append(response.status)

    async def hears(self, wanted: list[int], seconds: float) -> None:
        began = time.monotonic()
        while self.heard != wanted:
            assert time.monotonic() - began < soon(seconds), (self.heard, wanted)
            await asyncio.sleep(0.02)

    async def health(self) -> int:
        """Status of HTTP /health."""

        def get() -> int:
            try:
                with urllib.request.urlopen(f"{self.process.http_url}/health", timeout=PATIENCE_S) as response:
                    return int(response.status)
            except urllib.error.HTTPError as error:
                return error.code

        return await asyncio.to_thread(get)

    async def rank_pids(self) -> list[int]:
        async with AsyncClient(self.process.address, timeout=PATIENCE_S) as client:
            return [rank.pid for rank in (await client.info()).ranks]

    async def tokens(self) -> list[int]:
        async with AsyncClient(self.process.address, timeout=PATIENCE_S) as client:
            result = await client.generate(
                {"prompt_token_ids": PROMPT}, temperature=0, max_tokens=COUNT, ignore_eos=True
            )
            return list(result.token_ids)

    async def long_stream(self) -> grpc.aio.AioRpcError:
        """The error that a long request ends with, as a client without the SDK sees it."""
        request = pb.GenerateRequest(
            token_ids=pb.TokenIds(ids=PROMPT), sampling=pb.SamplingParams(max_tokens=480, ignore_eos=True)
        )
        call = self.stub.Generate(request)
        try:
            async for response in call:
                if response.token_ids:
                    self.decoding.set()
        except grpc.aio.AioRpcError as error:
            return error
        raise AssertionError("the request ended well")


@asynccontextmanager
async def served(model: Path, *options: str) -> AsyncIterator[Served]:
    arguments = [
        str(model), "--expert-parallel-size", "2", "--port", "0", "--grpc-port", "0", "--threads-per-rank", "1",
        "--max-num-batched-tokens", "32", "--max-num-seqs", "8", "--num-kv-blocks", "64", "--step-timeout-s", "20",
        "--heartbeat-timeout-s", "2.5", *options,
    ]  # fmt: skip
    async with ServerProcess(arguments) as process:
        address = await process.start(START_S)
        async with grpc.aio.insecure_channel(address) as channel:
            yield Served(process, channel)


def _named(error: grpc.aio.AioRpcError, slot: int) -> dict[str, str]:
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    metadata = {key: value for key, value in error.trailing_metadata() if isinstance(value, str)}
    assert metadata[keys.RANK] == str(slot)
    assert metadata[keys.HOST] == HOST
    for words in (f"rank {slot} on host {HOST} is lost", "last progress", "step "):
        assert words in error.details()
    return metadata


def test_a_stopped_rank_ends_a_server_without_restart_and_nothing_is_left(model):
    async def body() -> None:
        async with served(model[0]) as server:
            watching = asyncio.ensure_future(server.watch())
            pids = await server.rank_pids()
            assert await server.health() == 200
            stream = asyncio.ensure_future(server.long_stream())
            await asyncio.wait_for(server.decoding.wait(), PATIENCE_S)
            await asyncio.sleep(0.5)  # some heartbeats tell where it is by now
            began = time.monotonic()
            os.kill(pids[1], signal.SIGSTOP)
            await server.hears([SERVING, NOT_SERVING], 6)
            assert await server.health() == 503
            error = await asyncio.wait_for(stream, PATIENCE_S)
            assert time.monotonic() - began < soon(7.5), "well within the step's deadline of 20 s"
            metadata = _named(error, 1)
            assert "no heartbeat for" in error.details()
            assert keys.RETRY_AFTER_MS not in metadata
            assert await server.process.wait(PATIENCE_S) == 1
            watching.cancel()

    asyncio.run(asyncio.wait_for(body(), 150))


def test_a_killed_rank_is_replaced_by_a_server_with_restart(model):
    async def body() -> None:
        async with served(model[0], "--restart") as server:
            watching = asyncio.ensure_future(server.watch())
            pids = await server.rank_pids()
            stream = asyncio.ensure_future(server.long_stream())
            await asyncio.wait_for(server.decoding.wait(), PATIENCE_S)
            await asyncio.sleep(0.5)  # some heartbeats tell where it is by now
            began = time.monotonic()
            os.kill(pids[0], signal.SIGKILL)
            error = await asyncio.wait_for(stream, PATIENCE_S)
            assert time.monotonic() - began < soon(5)
            metadata = _named(error, 0)
            assert "killed by SIGKILL" in error.details()
            assert int(metadata[keys.RETRY_AFTER_MS]) > 0
            await server.hears([SERVING, NOT_SERVING], PATIENCE_S)
            assert await server.health() == 503
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await server.stub.Generate(pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5]))).read()
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
            assert "being replaced" in refused.value.details()
            await server.hears([SERVING, NOT_SERVING, SERVING], START_S)
            assert await server.health() == 200
            assert await server.tokens() == model[1]
            fresh = await server.rank_pids()
            assert fresh[0] != pids[0]
            assert fresh[1] == pids[1]
            watching.cancel()
            server.process.signal(signal.SIGTERM)
            assert await server.process.wait(PATIENCE_S) == 0

    asyncio.run(asyncio.wait_for(body(), 170))
