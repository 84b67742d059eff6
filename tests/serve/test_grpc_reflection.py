"""Server reflection, used as grpcurl uses it: services, files and messages come from the server alone."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, json_format, message_factory
from grpc_reflection.v1alpha import reflection_pb2 as rpb
from serving import Serving

from epruntime.proto import keys

VERSIONS = ("grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection")


@pytest.fixture(scope="module")
def channel():
    with Serving() as server, grpc.insecure_channel(server.address) as opened:
        yield opened


def _ask(channel: grpc.Channel, version: str, *requests: rpb.ServerReflectionRequest) -> list[Any]:
    method = channel.stream_stream(
        f"/{version}/ServerReflectionInfo",
        rpb.ServerReflectionRequest.SerializeToString,
        rpb.ServerReflectionResponse.FromString,
    )
    return list(method(iter(requests), timeout=10))


def _pool(channel: grpc.Channel, version: str, symbol: str) -> descriptor_pool.DescriptorPool:
    """A pool of its own with the file that has `symbol` and what it imports, all from the server."""
    pool, wanted, known = (
        descriptor_pool.DescriptorPool(),
        [rpb.ServerReflectionRequest(file_containing_symbol=symbol)],
        {},
    )
    while wanted:
        (answer,) = _ask(channel, version, wanted.pop())
        for data in answer.file_descriptor_response.file_descriptor_proto:
            file = descriptor_pb2.FileDescriptorProto.FromString(data)
            if file.name not in known:
                known[file.name] = file
                wanted += [rpb.ServerReflectionRequest(file_by_filename=name) for name in file.dependency]
    added: set[str] = set()

    def add(file: descriptor_pb2.FileDescriptorProto) -> None:
        if file.name not in added:
            added.add(file.name)
            for name in file.dependency:
                add(known[name])
            pool.Add(file)

    for file in known.values():
        add(file)
    return pool


@pytest.mark.parametrize("version", VERSIONS)
def test_services_are_listed(channel, version):
    (answer,) = _ask(channel, version, rpb.ServerReflectionRequest(list_services=""))
    names = {service.name for service in answer.list_services_response.service}
    assert {keys.SERVICE, "grpc.health.v1.Health"} <= names


@pytest.mark.parametrize("version", VERSIONS)
def test_a_call_made_of_what_the_server_tells(channel, version):
    pool = _pool(channel, version, keys.SERVICE)
    service = pool.FindServiceByName(keys.SERVICE)
    assert {m.name for m in service.methods} == {
        "Generate", "Abort", "GetServerInfo", "GetModelInfo", "Tokenize", "Detokenize"
    }  # fmt: skip
    method = service.methods_by_name["Generate"]
    assert (method.client_streaming, method.server_streaming) == (False, True)
    request, response = map(message_factory.GetMessageClass, (method.input_type, method.output_type))
    call = channel.unary_stream(f"/{keys.SERVICE}/Generate", request.SerializeToString, response.FromString)
    sent = json_format.ParseDict(
        {"text": "abc", "sampling": {"maxTokens": 5, "logitBias": {"7": -1.5}, "minP": 0.1}}, request()
    )
    answers = [json_format.MessageToDict(m) for m in call(sent, timeout=10)]
    assert "".join(a.get("text", "") for a in answers) == "abcab"
    assert answers[-1]["finishReason"] == "FINISH_REASON_LENGTH"
    assert answers[-1]["usage"] == {"promptTokens": 3, "outputTokens": 5, "cachedTokens": 2}

    health = _pool(channel, version, "grpc.health.v1.Health").FindServiceByName("grpc.health.v1.Health")
    method = health.methods_by_name["Check"]
    request, response = map(message_factory.GetMessageClass, (method.input_type, method.output_type))
    check = channel.unary_unary("/grpc.health.v1.Health/Check", request.SerializeToString, response.FromString)
    assert json_format.MessageToDict(check(request(), timeout=10)) == {"status": "SERVING"}


@pytest.mark.parametrize("version", VERSIONS)
def test_symbols_that_are_not_there(channel, version):
    answers = _ask(
        channel,
        version,
        rpb.ServerReflectionRequest(file_containing_symbol="epruntime.v1.Nothing"),
        rpb.ServerReflectionRequest(file_by_filename="nothing.proto"),
        rpb.ServerReflectionRequest(file_containing_symbol="epruntime.v1.GenerateRequest"),
    )
    not_found = grpc.StatusCode.NOT_FOUND.value[0]
    assert [answer.error_response.error_code for answer in answers] == [not_found, not_found, 0]
