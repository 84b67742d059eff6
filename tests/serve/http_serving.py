"""An HttpServer on a FakeLLM, on a free loopback port, on its own loop in its own thread."""

from __future__ import annotations

from typing import Any

from fake_llm import FakeLLM
from serving import Serving

from epruntime.config import ServeConfig
from epruntime.serve.gate import Gate
from epruntime.serve.openai.server import HttpServer


class HttpServing(Serving):
    """`with HttpServing() as server: httpx2.get(server.url + "/health")`; options are those of ServeConfig."""

    def __init__(self, llm: FakeLLM | None = None, *, ready: bool = True, metrics: Any = None, **options: Any) -> None:
        super().__init__(llm, ready=ready)
        self._config = ServeConfig(port=0, grpc_port=0, **options)
        self._metrics = metrics

    async def _start(self) -> None:
        self.gate = Gate()
        self.server = HttpServer(self._config, self.gate, self._metrics)
        self.url = await self.server.start()
        if self._ready:
            self.gate.ready(self.llm)
