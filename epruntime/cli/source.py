"""Where `generate` gets its output from: a server, or an engine in this process. Both give Chunks."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from typing import Any, Protocol

from epruntime.client import AsyncClient, Chunk, Timing, Usage
from epruntime.config import EngineConfig
from epruntime.sampling_params import SamplingParams


class Source(Protocol):
    def stream(self, prompt: str, sampling: Mapping[str, Any]) -> AsyncIterator[Chunk]: ...


class ServerSource:
    def __init__(self, client: AsyncClient) -> None:
        self._client = client

    async def stream(self, prompt: str, sampling: Mapping[str, Any]) -> AsyncIterator[Chunk]:
        async with self._client.stream(prompt, **sampling) as stream:
            async for chunk in stream:
                yield chunk


class EngineSource:
    def __init__(self, engine: Any) -> None:
        self._engine = engine

    async def stream(self, prompt: str, sampling: Mapping[str, Any]) -> AsyncIterator[Chunk]:
        text, tokens = 0, 0
        async with aclosing(self._engine.generate(prompt, SamplingParams(**sampling))) as outputs:
            async for output in outputs:
                (new,) = output.outputs
                metrics = output.metrics
                yield Chunk(
                    request_id=output.request_id,
                    text=new.text[text:],
                    token_ids=tuple(new.token_ids[tokens:]),
                    logprobs=None if new.logprobs is None else tuple(new.logprobs[tokens:]),
                    finish_reason=new.finish_reason,
                    stop_reason=new.stop_reason,
                    final=output.finished,
                    usage=Usage(prompt_tokens=len(output.prompt_token_ids), output_tokens=len(new.token_ids)),
                    seed=output.seed,
                    timing=Timing(
                        queue_s=_since(metrics.arrival_time, metrics.scheduled_time),
                        ttft_s=_since(metrics.arrival_time, metrics.first_token_time),
                        e2e_s=_since(metrics.arrival_time, metrics.finished_time),
                        num_preemptions=metrics.num_preemptions,
                    ),
                )
                text, tokens = len(new.text), len(new.token_ids)


@asynccontextmanager
async def open_server(address: str, timeout_s: float | None) -> AsyncIterator[Source]:
    async with AsyncClient(address, timeout=timeout_s) as client:
        yield ServerSource(client)


@asynccontextmanager
async def open_engine(config: EngineConfig) -> AsyncIterator[Source]:
    from epruntime.engine.async_llm import AsyncLLM
    from epruntime.serve.progress import ProgressLog

    engine = await AsyncLLM.create(config, progress=ProgressLog())
    try:
        yield EngineSource(engine)
    finally:
        await engine.shutdown()


def _since(start: float, end: float | None) -> float | None:
    return None if end is None else end - start
