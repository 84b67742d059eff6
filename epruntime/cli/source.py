"""Where `generate` gets its output from: a server, or an engine in this process. Both give Chunks."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from epruntime.client import AsyncClient, Chunk, Timing, Usage
from epruntime.config import EngineConfig
from epruntime.outputs import CompletionDelta, Logprob, RequestDelta

if TYPE_CHECKING:  # the command line is there for a client alone, too
    from epruntime.serve.engine import Engine


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
    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def stream(self, prompt: str, sampling: Mapping[str, Any]) -> AsyncIterator[Chunk]:
        params = self._engine.sampling_params(**sampling)
        told = params.prompt_logprobs is None
        prompt_logprobs: list[dict[int, Logprob] | None] = []
        async with aclosing(self._engine.stream(prompt, params)) as deltas:
            async for delta in deltas:
                prompt_logprobs = delta.prompt_logprobs or prompt_logprobs
                for new in delta.outputs:
                    chunk = _chunk(delta, new, final=delta.finished and new is delta.outputs[-1])
                    if not told:  # a delta may tell them before there is any output to hang them on
                        chunk = replace(
                            chunk,
                            prompt_token_ids=tuple(delta.prompt_token_ids),
                            prompt_logprobs=tuple(prompt_logprobs),
                        )
                        told = True
                    yield chunk


def _chunk(delta: RequestDelta, new: CompletionDelta, *, final: bool) -> Chunk:
    metrics = delta.metrics
    usage = Usage(
        prompt_tokens=len(delta.prompt_token_ids),
        output_tokens=delta.num_output_tokens,
        cached_tokens=delta.num_cached_tokens,
    )
    timing = Timing(
        queue_s=_since(metrics.arrival_time, metrics.scheduled_time),
        ttft_s=_since(metrics.arrival_time, metrics.first_token_time),
        e2e_s=_since(metrics.arrival_time, metrics.finished_time),
        num_preemptions=metrics.num_preemptions,
    )
    return Chunk(
        request_id=delta.request_id,
        index=new.index,
        text=new.text,
        token_ids=tuple(new.token_ids),
        logprobs=None if new.logprobs is None else tuple(new.logprobs),
        finish_reason=new.finish_reason,
        stop_reason=new.stop_reason,
        final=final,
        usage=usage if final else None,
        seed=delta.seed,
        timing=timing if final else None,
    )


@asynccontextmanager
async def open_server(options: Mapping[str, Any]) -> AsyncIterator[Source]:
    """`options`: arguments of AsyncClient."""
    async with AsyncClient(**options) as client:
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
