"""The client SDK: Client and AsyncClient. Needs grpcio and protobuf only."""

from epruntime.client.aio import AsyncClient, AsyncStream
from epruntime.client.channel import Tls
from epruntime.client.sync import Client, Stream
from epruntime.client.types import (
    Chunk,
    GenerateResult,
    LayerLoad,
    ModelInfo,
    Rank,
    ServerInfo,
    Timing,
    TokenizeResult,
    Usage,
)

__all__ = [
    "AsyncClient",
    "AsyncStream",
    "Chunk",
    "Client",
    "GenerateResult",
    "LayerLoad",
    "ModelInfo",
    "Rank",
    "ServerInfo",
    "Stream",
    "Timing",
    "Tls",
    "TokenizeResult",
    "Usage",
]
