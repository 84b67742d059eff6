"""GrpcServer: the gRPC front end, listening."""

from __future__ import annotations

import logging

import grpc.aio

from epruntime.config import ServeConfig
from epruntime.errors import ConfigError
from epruntime.serve import address
from epruntime.serve.gate import Gate
from epruntime.serve.grpc.health import Health
from epruntime.serve.grpc.servicer import InferenceServicer, add_to_server

logger = logging.getLogger("epruntime.serve.grpc.server")

#: How long streams get to write what they still hold when the server stops.
_FLUSH_S = 2.0


class GrpcServer:
    """The listening side alone: bind at `start`, then whatever the gate allows."""

    def __init__(self, config: ServeConfig, gate: Gate) -> None:
        self.gate = gate
        self._config = config
        self._server = grpc.aio.server(
            options=[
                # with SO_REUSEPORT a second server could share the port unnoticed
                ("grpc.so_reuseport", 0),
                ("grpc.max_receive_message_length", config.max_message_mb * 2**20),
                # a client whose host has gone, without a word, is noticed and its requests are freed
                ("grpc.keepalive_time_ms", 30_000),
                ("grpc.keepalive_timeout_ms", 10_000),
                ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
            ]
        )
        add_to_server(InferenceServicer(gate), self._server)
        self._health = Health(gate)

    async def start(self) -> str:
        """Listens, and returns the address with the port really taken.

        Raises:
            ConfigError: the address cannot be bound, with the reason.
        """
        host, port = self._config.host, self._config.grpc_port
        wanted = address.join(host, port)
        # first by us: gRPC would write a line of its own about an address that it cannot bind, without the remedy
        address.check(host, port, flag="--grpc-port")
        try:
            bound = self._server.add_insecure_port(wanted)
        except RuntimeError as error:
            raise ConfigError(f"cannot listen on {wanted}: {error}; choose another --host or --grpc-port") from error
        await self._health.start(self._server)
        await self._server.start()
        return address.join(host, bound)

    async def stop(self) -> None:
        """Stops listening; streams get a moment to write what they hold."""
        await self.gate.wait_idle(_FLUSH_S)
        await self._server.stop(0.5)
        await self._health.stop()
