"""The client SDK: Client and AsyncClient. Needs grpcio and protobuf only."""

from epruntime.client.aio import AsyncClient, AsyncStream
from epruntime.client.sync import Client, Stream
from epruntime.client.types import Chunk, GenerateResult, LayerLoad, Rank, ServerInfo, Timing, Usage

__all__ = [
    "AsyncClient",
    "AsyncStream",
    "Chunk",
    "Client",
    "GenerateResult",
    "LayerLoad",
    "Rank",
    "ServerInfo",
    "Stream",
    "Timing",
    "Usage",
]
