"""The engine's streams behind one HTTP request: one per prompt, merged.

prompts -> gate.admit -> engine.stream each -> merged -> (prompt's number, RequestDelta)

Backpressure: each stream is asked for its next delta when the last one has been taken; meanwhile the engine merges.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeVar

from epruntime.outputs import RequestDelta
from epruntime.sampling_params import SamplingParams
from epruntime.serve.gate import Gate

T = TypeVar("T")
Deltas = AsyncGenerator[tuple[int, RequestDelta], None]


@dataclass(frozen=True, kw_only=True)
class Job:
    """What one HTTP request asks of the engine.

    Attributes:
        request_id: of the whole; prompt i of several is the engine's request `request_id-i`.
    """

    request_id: str
    prompts: Sequence[Any]
    params: SamplingParams


async def deltas(gate: Gate, job: Job) -> Deltas:
    """What is new, from all prompts. Closing it ends them all.

    Raises:
        What `Gate.admit`, `Gate.claim` and `Engine.stream` raise.
    """
    names = [f"{job.request_id}-{number}" for number in range(len(job.prompts))]
    if len(names) == 1:
        names = [job.request_id]
    streams = [_one(gate, prompt, job.params, name) for prompt, name in zip(job.prompts, names, strict=True)]
    async with aclosing(merged(streams)) as both:
        async for item in both:
            yield item


async def opened(stream: Deltas, prompts: int) -> Deltas:
    """The same stream once every prompt has been admitted and there is a first token.

    Whatever goes wrong before that is raised here, and can still become an HTTP status.
    """
    begun: list[tuple[int, RequestDelta]] = []
    waiting = set(range(prompts))
    try:
        async for number, delta in stream:
            begun.append((number, delta))
            waiting.discard(number)
            if not waiting and any(delta.outputs for _, delta in begun):
                break
    except BaseException:
        await stream.aclose()
        raise

    return _rest(begun, stream)


async def _rest(begun: list[tuple[int, RequestDelta]], stream: Deltas) -> Deltas:
    async with aclosing(stream):
        while begun:
            yield begun.pop(0)
        async for item in stream:
            yield item


async def _one(gate: Gate, prompt: Any, params: SamplingParams, request_id: str) -> AsyncGenerator[RequestDelta, None]:
    engine = gate.admit()
    with gate.claim(request_id):
        async with aclosing(engine.stream(prompt, params, request_id=request_id)) as stream:
            async for delta in stream:
                if gate.closing is not None and any(output.finish_reason == "abort" for output in delta.outputs):
                    raise gate.closing
                yield delta


async def merged(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
    """(number of the stream, item) as they come. Holds at most one item per stream that nobody has taken.

    The first error ends it. However it ends, all streams are closed when it has.
    """
    if len(streams) == 1:  # nothing to merge, no tasks needed
        async with aclosing(streams[0]) as only:
            async for item in only:
                yield 0, item
        return
    queue: asyncio.Queue[tuple[int, T] | Exception | None] = asyncio.Queue()
    taken = [asyncio.Event() for _ in streams]

    async def pump(number: int, stream: AsyncGenerator[T, None]) -> None:
        try:
            async with aclosing(stream):
                async for item in stream:
                    queue.put_nowait((number, item))
                    await taken[number].wait()
                    taken[number].clear()
            queue.put_nowait(None)
        except Exception as error:  # noqa: BLE001  it is raised where the items are taken
            queue.put_nowait(error)

    pumps = [asyncio.create_task(pump(number, stream)) for number, stream in enumerate(streams)]
    try:
        running = len(pumps)
        while running:
            got = await queue.get()
            if isinstance(got, Exception):
                raise got
            if got is None:
                running -= 1
            else:
                yield got
                taken[got[0]].set()
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
