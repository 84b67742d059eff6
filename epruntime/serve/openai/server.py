"""HttpServer: the HTTP front end, listening."""

from __future__ import annotations

import asyncio

import uvicorn

from epruntime.config import ServeConfig
from epruntime.serve import address
from epruntime.serve.gate import Gate
from epruntime.serve.openai.app import Metrics, make_app
from epruntime.serve.openai.connection import Connection
from epruntime.serve.tls import load_tls

#: Seconds that an idle connection is kept; longer than load balancers keep theirs, so that they end it, not we.
KEEP_ALIVE_S = 75
#: Seconds that streams get to write what they still hold when the server stops, and connections to close.
_FLUSH_S, _CLOSE_S = 2.0, 1


class HttpServer:
    """The listening side alone: bind at `start`, then whatever the gate allows. uvicorn handles no signals here.

    Raises:
        ConfigError: a TLS file that does not work.
    """

    def __init__(self, config: ServeConfig, gate: Gate, metrics: Metrics | None = None) -> None:
        self._config, self._gate = config, gate
        self._tls = load_tls(config)
        tls = self._tls
        self._uvicorn = uvicorn.Server(
            uvicorn.Config(
                make_app(config, gate, metrics),
                http=Connection,
                ws="none",
                lifespan="off",
                interface="asgi3",
                log_config=None,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=_CLOSE_S,
                ssl_context_factory=None if tls is None else lambda *_: tls.context,
            )
        )
        self._ticking: asyncio.Task[None] | None = None

    async def start(self) -> str:
        """Listens, and returns the URL with the port really taken.

        Raises:
            ConfigError: the address cannot be bound, with the reason.
        """
        host = self._config.host
        sockets = address.listen(host, self._config.port, flag="--port")
        port = sockets[0].getsockname()[1]
        # what uvicorn's `serve` does, without its handling of signals
        self._uvicorn.config.load()
        self._uvicorn.lifespan = self._uvicorn.config.lifespan_class(self._uvicorn.config)
        await self._uvicorn.startup(sockets=sockets)
        self._ticking = asyncio.create_task(self._uvicorn.main_loop(), name="epruntime-http")
        return f"{'http' if self._tls is None else 'https'}://{address.join(host, port)}"

    async def stop(self) -> None:
        """Stops listening; streams get a moment to write what they hold."""
        await self._gate.wait_idle(_FLUSH_S)
        if self._ticking is None:
            return
        self._uvicorn.should_exit = True
        await self._ticking
        await self._uvicorn.shutdown()
