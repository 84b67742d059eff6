"""Random bytes and random messages to every gRPC method: each call ends with a status, and the server goes on."""

from __future__ import annotations

import contextlib
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from serving import Serving, wait_until

from epruntime.client import Client
from epruntime.proto import inference_pb2 as pb
from epruntime.proto import keys

FUZZ = settings(
    max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
#: seconds for a call; one that is still running then (a request for billions of tokens) ends with DEADLINE_EXCEEDED
CALL_S = 0.5
METHODS = {
    "Generate": pb.GenerateRequest, "Abort": pb.AbortRequest, "GetServerInfo": pb.GetServerInfoRequest,
    "GetModelInfo": pb.GetModelInfoRequest, "Tokenize": pb.TokenizeRequest, "Detokenize": pb.DetokenizeRequest,
}  # fmt: skip
#: what a server may answer; UNKNOWN and INTERNAL would be faults of its own
EXPECTED = {
    grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND, grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
}  # fmt: skip


@pytest.fixture(scope="module")
def server():
    with Serving(max_message_mb=1) as running:
        yield running


@pytest.fixture(scope="module")
def call(server):
    """Calls a method with bytes; returns code and details."""
    with grpc.insecure_channel(server.address) as channel:

        def make(method: str, data: bytes, timeout_s: float = CALL_S) -> tuple[grpc.StatusCode, str]:
            stream = channel.unary_stream(f"/{keys.SERVICE}/{method}", None, None)(data, timeout=timeout_s)
            with contextlib.suppress(grpc.RpcError):
                for _ in stream:
                    pass
            return stream.code(), stream.details()

        yield make


def _lives(server: Serving) -> None:
    with Client(server.address) as client:
        assert client.generate("ab", max_tokens=3).text == "aba"
    wait_until(lambda: not server.llm.live, "every request has ended")


INTEGERS = {
    FieldDescriptor.CPPTYPE_INT32: st.sampled_from([0, 1, 2, 7, -1, -2, 128, 129, 2**31 - 1, -(2**31)]),
    FieldDescriptor.CPPTYPE_INT64: st.sampled_from([0, 1, -1, 2**63 - 1, -(2**63)]),
    FieldDescriptor.CPPTYPE_DOUBLE: st.sampled_from([0.0, 0.5, 1.0, -1.0, 2.0, 1e300, float("nan"), float("inf")]),
    FieldDescriptor.CPPTYPE_BOOL: st.booleans(),
    FieldDescriptor.CPPTYPE_STRING: st.text(max_size=6),
}


def _fill(draw: Any, message: Message) -> Message:
    """Sets some of the fields of a message, all the way down, to anything that their types can hold."""
    for field in message.DESCRIPTOR.fields:
        if not draw(st.booleans()):
            continue
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            getattr(message, field.name).update(
                draw(st.dictionaries(st.integers(-3, 2**31 - 1), st.floats(-200, 200), max_size=3))
            )
        elif field.message_type is not None and field.is_repeated:
            for _ in range(draw(st.integers(0, 3))):
                _fill(draw, getattr(message, field.name).add())
        elif field.message_type is not None:
            getattr(message, field.name).SetInParent()
            _fill(draw, getattr(message, field.name))
        elif field.is_repeated:
            getattr(message, field.name).extend(draw(st.lists(INTEGERS[field.cpp_type], max_size=4)))
        else:
            setattr(message, field.name, draw(INTEGERS[field.cpp_type]))
    return message


@st.composite
def messages(draw: Any) -> tuple[str, bytes]:
    method = draw(st.sampled_from(["Generate", "Generate", "Generate", *METHODS]))
    message = _fill(draw, METHODS[method]())
    if method == "Generate" and draw(st.booleans()):
        message.sampling.max_tokens = draw(st.integers(1, 5))  # most requests should end by themselves
    return method, message.SerializeToString()


@FUZZ
@given(made=messages())
@example(
    made=(
        "Generate",
        pb.GenerateRequest(text="a", sampling=pb.SamplingParams(max_tokens=2**31 - 1)).SerializeToString(),
    )
)
@example(made=("Generate", pb.GenerateRequest(text="ab", sampling=pb.SamplingParams(n=128)).SerializeToString()))
@example(made=("Generate", pb.GenerateRequest(token_ids=pb.TokenIds(ids=[0x110000])).SerializeToString()))
@example(made=("Detokenize", pb.DetokenizeRequest(token_ids=[0xD800, -1, 2**31 - 1]).SerializeToString()))
@example(made=("Abort", pb.AbortRequest(request_id="\x00").SerializeToString()))
def test_random_messages(call, made):
    code, details = call(*made)
    assert code in EXPECTED, (code, details)
    if code is not grpc.StatusCode.OK:
        assert details


@FUZZ
@given(method=st.sampled_from(sorted(METHODS)), data=st.binary(max_size=80))
@example(method="Generate", data=b"\x12\x02\xff\xfe")  # text that is not UTF-8
@example(method="Generate", data=b"\x12\xff\xff\xff\xff\x0f")  # a length beyond the end
@example(method="Generate", data=b"\x22" + b"\x01\x0a" * 40)
@example(method="Generate", data=b"\x0b" * 80)  # groups, which end nowhere
def test_random_bytes(call, method, data):
    """Bytes that are no message end with INTERNAL, which gRPC itself answers; but they may happen to be one."""
    code, details = call(method, data)
    try:
        METHODS[method].FromString(data)
    except DecodeError:
        assert code in EXPECTED | {grpc.StatusCode.INTERNAL}, (code, details)
    else:
        assert code in EXPECTED, (code, details)


def test_methods_that_are_not_there(call):
    for method in ("Nonsense", "", "Generate/x", "x" * 500):
        assert call(method, b"", timeout_s=60)[0] is grpc.StatusCode.UNIMPLEMENTED


@pytest.fixture(scope="module", autouse=True)
def the_server_lives(server):
    yield
    _lives(server)
