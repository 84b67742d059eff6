"""grpc.health.v1: SERVING only while requests are taken and every rank steps (Gate.serving)."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from epruntime.proto import keys
from epruntime.serve.gate import Gate

SERVICES = ("", keys.SERVICE)
#: These methods are called without an access token, so that probes need none.
OPEN_METHODS = "/grpc.health.v1.Health/"

_Status = health_pb2.HealthCheckResponse.ServingStatus


class Health(health_pb2_grpc.HealthServicer):
    """Asks the gate anew for each answer. (grpcio's own servicer keeps a copy of the status, and an update of the copy
    waits for every watcher, also for one that does not read.)

    Watch tells every change that lasts; of changes within a moment, the last.
    """

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._watchers: set[asyncio.Event] = set()
        gate.on_change(self._changed)

    @property
    def num_watchers(self) -> int:
        return len(self._watchers)

    async def Check(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        if request.service not in SERVICES:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"the services here are {' and '.join(map(repr, SERVICES))}")
        return self._response(request.service)

    async def List(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        return health_pb2.HealthListResponse(statuses={service: self._response(service) for service in SERVICES})

    async def Watch(self, request: Any, context: grpc.aio.ServicerContext) -> None:
        changed = asyncio.Event()
        self._watchers.add(changed)
        last = None
        try:
            while True:
                now = self._response(request.service)
                if now != last:
                    await context.write(now)
                    last = now
                await changed.wait()
                changed.clear()
        finally:
            self._watchers.discard(changed)

    def _changed(self) -> None:
        for watcher in self._watchers:
            watcher.set()

    def _response(self, service: str) -> Any:
        if service not in SERVICES:
            return health_pb2.HealthCheckResponse(status=_Status.SERVICE_UNKNOWN)
        return health_pb2.HealthCheckResponse(status=_Status.SERVING if self._gate.serving else _Status.NOT_SERVING)
