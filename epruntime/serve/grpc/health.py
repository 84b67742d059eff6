"""grpc.health.v1, kept in step with the gate: SERVING only while requests are taken."""

from __future__ import annotations

import asyncio

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from epruntime.proto import keys
from epruntime.serve.gate import Gate, ServerState

SERVICES = ("", keys.SERVICE)


class Health:
    """Follows a gate. `start` before the server starts, `stop` when it has stopped."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._servicer = health.aio.HealthServicer()
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self, server: grpc.aio.Server) -> None:
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)
        await self._publish()
        self._gate.on_change(self._changed.set)
        self._task = asyncio.create_task(self._follow(), name="epruntime-health")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _follow(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            await self._publish()

    async def _publish(self) -> None:
        statuses = health_pb2.HealthCheckResponse.ServingStatus
        serving = self._gate.state is ServerState.READY
        for service in SERVICES:
            await self._servicer.set(service, statuses.SERVING if serving else statuses.NOT_SERVING)
