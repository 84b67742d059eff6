"""A GrpcServer on a FakeLLM, on a free loopback port, on its own loop in its own thread."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from fake_llm import FakeLLM

from epruntime.config import ServeConfig
from epruntime.serve.gate import Gate
from epruntime.serve.grpc.server import GrpcServer
from epruntime.testing.patience import PATIENCE_S

T = TypeVar("T")
DEADLINE_S = PATIENCE_S


class Serving:
    """`with Serving() as server: Client(server.address)`; `run` runs a coroutine on the server's loop.

    Args:
        grpc_port: where to listen; 0: a free port. options: of ServeConfig.
    """

    def __init__(self, llm: FakeLLM | None = None, *, ready: bool = True, grpc_port: int = 0, **options: Any) -> None:
        self.llm = llm or FakeLLM()
        self._ready = ready
        self._config = ServeConfig(port=0, grpc_port=grpc_port, **options)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(DEADLINE_S)

    def call(self, function: Callable[..., T], *args: Any) -> T:
        async def on_loop() -> T:
            return function(*args)

        return self.run(on_loop())

    def __enter__(self) -> Serving:
        self._thread.start()
        self.run(self._start())
        return self

    async def _start(self) -> None:
        self.gate = Gate()
        self.server = GrpcServer(self._config, self.gate)
        self.address = await self.server.start()
        if self._ready:
            self.gate.ready(self.llm)

    def __exit__(self, *exc_info: object) -> None:
        self.run(self.gate.close("the test is over"))
        self.run(self.server.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(DEADLINE_S)
        self._loop.close()


def wait_until(condition: Callable[[], bool], what: str, deadline_s: float = PATIENCE_S) -> None:
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, f"not within {deadline_s} s: {what}"
        time.sleep(0.01)
