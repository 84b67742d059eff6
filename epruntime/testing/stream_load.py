"""Load of many concurrent streams on a running server: gRPC and HTTP, most of them read to the end, others cut off.

run_round -> every stream: whole | left after some chunks -> RoundResult;  settle -> what the server still holds
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, field

import httpx2
import psutil
from prometheus_client.parser import text_string_to_metric_families

from epruntime.client import AsyncClient
from epruntime.errors import EPRuntimeError

#: seconds within which one stream must end, whatever the load.
STREAM_TIMEOUT_S = 120.0
#: ids that any tiny model has, and that are no special tokens there.
_FIRST_ID, _LAST_ID = 10, 99


@dataclass(frozen=True, kw_only=True)
class Load:
    """Shape of one round.

    Attributes:
        grpc, http: streams of each kind, all at once.
        cut_share: share of the streams that the client leaves after 0 to 5 chunks.
        max_prompt_tokens, max_output_tokens: lengths are uniform from 1 on.
    """

    grpc: int
    http: int
    cut_share: float = 0.4
    max_prompt_tokens: int = 40
    max_output_tokens: int = 16


@dataclass(kw_only=True)
class RoundResult:
    """Attributes: whole, cut: streams by how they ended; wrong: what went wrong -> how often; tokens: received."""

    whole: int = 0
    cut: int = 0
    tokens: int = 0
    seconds: float = 0.0
    wrong: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True, kw_only=True)
class ServerUse:
    """What a server holds.

    Attributes:
        running, waiting: sequences; kv_usage: the largest of all ranks, 0 to 1.
        memory: resident bytes by process, the server first, then its ranks by pid.
        files: open file descriptors of the server process.
    """

    running: int
    waiting: int
    kv_usage: float
    memory: tuple[int, ...]
    files: int

    @property
    def idle(self) -> bool:
        return self.running == self.waiting == 0 and self.kv_usage == 0.0


async def run_round(client: AsyncClient, http: httpx2.AsyncClient, model: str, load: Load, seed: int) -> RoundResult:
    """Starts all streams of a round at once and waits for their ends."""
    rng = random.Random(seed)
    result = RoundResult()
    started = time.monotonic()
    streams = []
    for number in range(load.grpc + load.http):
        prompt = [rng.randint(_FIRST_ID, _LAST_ID) for _ in range(rng.randint(1, load.max_prompt_tokens))]
        count = rng.randint(1, load.max_output_tokens)
        leave = rng.randint(0, 5) if rng.random() < load.cut_share else None
        chunks = _grpc(client, prompt, count) if number < load.grpc else _http(http, model, prompt, count)
        streams.append(_read(chunks, count, leave, result))
    await asyncio.gather(*streams)
    result.seconds = time.monotonic() - started
    return result


async def settle(http: httpx2.AsyncClient, pid: int, timeout_s: float) -> ServerUse:
    """Waits until the server holds no request, at most `timeout_s` seconds, and returns what it holds then."""
    deadline = time.monotonic() + timeout_s
    while True:
        use = await server_use(http, pid)
        if use.idle or time.monotonic() > deadline:
            return use
        await asyncio.sleep(0.2)


async def server_use(http: httpx2.AsyncClient, pid: int) -> ServerUse:
    """Reads /metrics and the memory of the server's processes."""
    response = await http.get("/metrics")
    response.raise_for_status()
    values: dict[str, list[float]] = {}
    for family in text_string_to_metric_families(response.text):
        values.setdefault(family.name, []).extend(sample.value for sample in family.samples)
    server = psutil.Process(pid)
    processes = [server, *sorted(server.children(recursive=True), key=lambda p: p.pid)]
    return ServerUse(
        running=round(sum(values["epruntime_num_requests_running"])),
        waiting=round(sum(values["epruntime_num_requests_waiting"])),
        kv_usage=max(values["epruntime_kv_cache_usage_perc"]),
        memory=tuple(process.memory_info().rss for process in processes),
        files=server.num_fds(),
    )


async def _read(chunks: AsyncIterator[tuple[int, bool]], expected: int, leave: int | None, result: RoundResult) -> None:
    """Reads one stream to its end, or leaves after `leave` chunks."""
    tokens, ended = 0, False
    try:
        async with asyncio.timeout(STREAM_TIMEOUT_S), aclosing(chunks):  # type: ignore[type-var]
            number = 0
            while leave is None or number < leave:
                chunk = await anext(chunks, None)
                if chunk is None:
                    break
                number += 1
                tokens += chunk[0]
                ended = ended or chunk[1]
    except (EPRuntimeError, httpx2.HTTPError, TimeoutError, ValueError) as error:
        result.wrong[f"{type(error).__name__}: {str(error)[:120]}"] += 1
        return
    result.tokens += tokens
    if ended and tokens == expected:
        result.whole += 1
    elif leave is not None:
        result.cut += 1
    else:
        result.wrong[f"{tokens} tokens where {expected} were due, {'an' if ended else 'no'} end"] += 1


async def _grpc(client: AsyncClient, prompt: list[int], count: int) -> AsyncIterator[tuple[int, bool]]:
    async with client.stream(prompt, max_tokens=count, ignore_eos=True) as stream:
        async for chunk in stream:
            yield len(chunk.token_ids), chunk.final


async def _http(http: httpx2.AsyncClient, model: str, prompt: list[int], count: int) -> AsyncIterator[tuple[int, bool]]:
    body = {
        "model": model, "prompt": prompt, "max_tokens": count, "ignore_eos": True, "stream": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    async with http.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != 200:
            raise ValueError(f"status {response.status_code}: {(await response.aread())[:200]!r}")
        async for line in response.aiter_lines():
            if not line.startswith("data: "):
                continue
            if line == "data: [DONE]":
                yield 0, True
                return
            event = json.loads(line[6:])
            if "error" in event:
                raise ValueError(f"error event: {event['error']}")
            usage = event.get("usage")
            yield (usage["completion_tokens"] if usage else 0), False
