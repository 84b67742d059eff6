"""GrpcServer: the gRPC front end, listening."""

from __future__ import annotations

import logging

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2_grpc

from epruntime.config import ServeConfig
from epruntime.errors import ConfigError
from epruntime.serve import address
from epruntime.serve.access import AccessCheck
from epruntime.serve.gate import Gate
from epruntime.serve.grpc import reflection, servicer
from epruntime.serve.grpc.access import AccessInterceptor
from epruntime.serve.grpc.health import Health
from epruntime.serve.tls import load_tls

logger = logging.getLogger("epruntime.serve.grpc.server")

#: How long streams get to write what they still hold when the server stops.
_FLUSH_S = 2.0


class GrpcServer:
    """The listening side alone: bind at `start`, then whatever the gate allows.

    Access tokens, TLS and limits are those of the config. Health answers without a token, all else needs it.

    Raises:
        ConfigError: a token or a TLS file that cannot be used.
    """

    def __init__(self, config: ServeConfig, gate: Gate) -> None:
        self.gate = gate
        self._config = config
        self._tls = load_tls(config)
        access = AccessCheck.of(config)
        self._server = grpc.aio.server(
            interceptors=(AccessInterceptor(access),) if access else (),
            options=[
                # with SO_REUSEPORT a second server could share the port unnoticed
                ("grpc.so_reuseport", 0),
                ("grpc.max_receive_message_length", config.max_message_mb * 2**20),
                # a client whose host has gone, without a word, is noticed and its requests are freed
                ("grpc.keepalive_time_ms", 30_000),
                ("grpc.keepalive_timeout_ms", 10_000),
                ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
            ],
        )
        servicer.add_to_server(servicer.InferenceServicer(gate), self._server)
        self._health = Health(gate)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.add_to_server(self._server)

    @property
    def num_health_watchers(self) -> int:
        """Open Watch calls of grpc.health.v1."""
        return self._health.num_watchers

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
            bound = self._bind(wanted)
        except RuntimeError as error:
            raise ConfigError(f"cannot listen on {wanted}: {error}; choose another --host or --grpc-port") from error
        await self._server.start()
        return address.join(host, bound)

    def _bind(self, wanted: str) -> int:
        """Returns the port."""
        tls = self._tls
        if tls is None:
            return int(self._server.add_insecure_port(wanted))
        credentials = grpc.ssl_server_credentials(
            [(tls.private_key, tls.certificate_chain)],
            root_certificates=tls.client_authorities,
            require_client_auth=tls.client_authorities is not None,
        )
        return int(self._server.add_secure_port(wanted, credentials))

    async def stop(self) -> None:
        """Stops listening; streams get a moment to write what they hold."""
        await self.gate.wait_idle(_FLUSH_S)
        await self._server.stop(0.5)
