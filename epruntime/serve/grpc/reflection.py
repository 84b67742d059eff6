"""Server reflection: clients such as grpcurl learn the services and messages from the server itself."""

from __future__ import annotations

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection, reflection_pb2

from epruntime.proto import inference_pb2

#: grpc.reflection.v1 has the messages of v1alpha under another package name, byte for byte the same on the wire.
#: The package for Python knows v1alpha only; newer clients ask for v1 first.
_NAMES = ("grpc.reflection.v1alpha.ServerReflection", "grpc.reflection.v1.ServerReflection")


def add_to_server(server: grpc.aio.Server) -> None:
    services = (
        *(service.full_name for service in inference_pb2.DESCRIPTOR.services_by_name.values()),
        *(service.full_name for service in health_pb2.DESCRIPTOR.services_by_name.values()),
        _NAMES[0],
    )
    servicer = reflection.aio.ReflectionServicer(services)
    handler = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        reflection_pb2.ServerReflectionRequest.FromString,
        reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    for name in _NAMES:
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(name, {"ServerReflectionInfo": handler}),)
        )
