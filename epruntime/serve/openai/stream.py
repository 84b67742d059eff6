"""Server-sent events (WHATWG HTML, 9.2), and work that ends when its client has gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Mapping
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from epruntime.serve.openai.errors import http_error
from epruntime.serve.openai.json import encode

T = TypeVar("T")
Chunks = AsyncGenerator[list[dict[str, Any]], None]


class EventStream(Response):
    """Sends each chunk as an event, and `[DONE]` at the end. An error ends it with an `error` event and no `[DONE]`.

    The next chunks are asked for when the connection has taken the last: a slow reader holds no more than that. When
    the client goes, the chunks are closed at once.
    """

    media_type = "text/event-stream"

    def __init__(self, chunks: Chunks, request_id: str, headers: Mapping[str, str] | None = None) -> None:
        # proxies such as nginx would collect the events otherwise
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **(headers or {})})
        del self.headers["content-length"]
        self._chunks, self._request_id = chunks, request_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await until_gone(self._send(send), receive)
        except ClientDisconnect:
            return

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async with aclosing(self._chunks) as chunks:
            try:
                async for some in chunks:
                    events = b"".join(_event(encode(chunk)) for chunk in some)
                    if events:
                        await send({"type": "http.response.body", "body": events, "more_body": True})
                last = _event(b"[DONE]")
            except Exception as error:  # noqa: BLE001  the status is sent: only an event can tell the client
                last = _event(encode(http_error(error, self._request_id).body))
        await send({"type": "http.response.body", "body": last, "more_body": False})


async def unless_gone(work: Coroutine[Any, Any, T], request: Request) -> T:
    """The result of `work`, which is cancelled when the client goes. The body must have been read.

    Raises:
        ClientDisconnect: the client has gone.
    """
    return await until_gone(work, request.receive)


async def until_gone(work: Coroutine[Any, Any, T], receive: Receive) -> T:
    """As `unless_gone`, for a bare ASGI connection."""
    tasks = asyncio.create_task(work), asyncio.create_task(_gone(receive))
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if tasks[0].done():
            return tasks[0].result()
        raise ClientDisconnect
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"
