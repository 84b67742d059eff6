"""What clients should not send: each is refused with a status that names the field, and costs the server nothing."""

from __future__ import annotations

import contextlib
import math
import random

import grpc
import pytest
from serving import Serving, wait_until

from epruntime.client import Client
from epruntime.errors import InvalidRequestError
from epruntime.proto import inference_pb2 as pb
from epruntime.proto import keys


@pytest.fixture(scope="module")
def server():
    with Serving(max_message_mb=1) as running:
        yield running


@pytest.fixture(scope="module")
def generate(server):
    """Calls Generate with raw bytes; returns (code, details, trailing metadata as a dict)."""
    with grpc.insecure_channel(server.address) as channel:
        method = channel.unary_stream(f"/{keys.SERVICE}/Generate", lambda b: b, pb.GenerateResponse.FromString)

        def call(data):
            if not isinstance(data, bytes):
                data = data.SerializeToString()
            stream = method(data, timeout=10)
            with contextlib.suppress(grpc.RpcError):
                list(stream)
            return stream.code(), stream.details(), dict(stream.trailing_metadata() or ())

        yield call


def _sampling(**values):
    return pb.GenerateRequest(text="abc", sampling=pb.SamplingParams(**values))


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (pb.GenerateRequest(), "prompt"),
        (pb.GenerateRequest(text=""), "prompt"),
        (pb.GenerateRequest(token_ids=pb.TokenIds()), "token_ids"),
        (pb.GenerateRequest(token_ids=pb.TokenIds(ids=[-1])), "token_ids"),
        (pb.GenerateRequest(token_ids=pb.TokenIds(ids=[0x110000])), "token_ids"),
        (pb.GenerateRequest(chat=pb.Chat()), "chat"),
        (pb.GenerateRequest(chat=pb.Chat(messages=[pb.ChatMessage(content="x")])), "chat"),
        (pb.GenerateRequest(text="a", request_id="a b"), "request_id"),
        (pb.GenerateRequest(text="a", request_id="é"), "request_id"),
        (pb.GenerateRequest(text="a", request_id="x" * 129), "request_id"),
        (_sampling(temperature=-0.1), "temperature"),
        (_sampling(temperature=math.nan), "temperature"),
        (_sampling(temperature=math.inf), "temperature"),
        (_sampling(top_p=0.0), "top_p"),
        (_sampling(top_p=1.1), "top_p"),
        (_sampling(top_k=-2), "top_k"),
        (_sampling(seed=-1), "seed"),
        (_sampling(max_tokens=0), "max_tokens"),
        (_sampling(max_tokens=-2), "max_tokens"),
        (_sampling(logprobs=21), "logprobs"),
        (_sampling(logprobs=-1), "logprobs"),
        (_sampling(stop=[""]), "stop"),
        (_sampling(stop_token_ids=[-1]), "stop_token_ids"),
        (_sampling(min_p=-0.1), "min_p"),
        (_sampling(min_p=math.nan), "min_p"),
        (_sampling(repetition_penalty=0.0), "repetition_penalty"),
        (_sampling(repetition_penalty=math.inf), "repetition_penalty"),
        (_sampling(presence_penalty=2.1), "presence_penalty"),
        (_sampling(frequency_penalty=-2.1), "frequency_penalty"),
        (_sampling(logit_bias={5: 100.5}), "logit_bias"),
        (_sampling(logit_bias={5: math.nan}), "logit_bias"),
        (_sampling(logit_bias={-5: 1.0}), "logit_bias"),
        (_sampling(logit_bias=dict.fromkeys(range(1025), 1.0)), "logit_bias"),
        (_sampling(min_tokens=-1), "min_tokens"),
        (_sampling(min_tokens=9, max_tokens=8), "min_tokens"),
        (_sampling(n=0), "n"),
        (_sampling(n=129), "n"),
        (_sampling(prompt_logprobs=21), "prompt_logprobs"),
    ],
)
def test_refused_with_field(generate, request_, field):
    code, details, metadata = generate(request_)
    assert code is grpc.StatusCode.INVALID_ARGUMENT, details
    assert metadata[keys.FIELD] == field
    assert metadata[keys.ERROR] == "InvalidRequestError"
    assert field in details


@pytest.mark.parametrize("data", [b"\xff\xff\xff", b"\x12\x05ab", b"\x12\x02\xff\xfe", b"\x52\xff\xff\xff\xff\x0f"])
def test_bytes_that_are_no_message(generate, data):
    code, details, metadata = generate(data)
    assert code is grpc.StatusCode.INVALID_ARGUMENT, details
    assert "epruntime.v1.GenerateRequest" in details
    assert metadata[keys.ERROR] == "InvalidRequestError"


@pytest.mark.parametrize("method", ["Abort", "GetServerInfo", "GetModelInfo", "Tokenize", "Detokenize"])
def test_bytes_that_are_no_message_to_the_other_methods(server, method):
    with grpc.insecure_channel(server.address) as channel:
        call = channel.unary_unary(f"/{keys.SERVICE}/{method}", lambda b: b, lambda b: b)
        with pytest.raises(grpc.RpcError) as caught:
            call(b"\xff\xff\xff", timeout=10)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert f"epruntime.v1.{method}Request" in caught.value.details()


def test_tokenize_needs_a_prompt(server):
    with grpc.insecure_channel(server.address) as channel:
        call = channel.unary_unary(f"/{keys.SERVICE}/Tokenize", pb.TokenizeRequest.SerializeToString, lambda b: b)
        with pytest.raises(grpc.RpcError, match="send text or chat") as caught:
            call(pb.TokenizeRequest(), timeout=10)
        assert dict(caught.value.trailing_metadata())[keys.FIELD] == "prompt"


def test_unknown_fields_are_ignored(generate):
    later = b"\xa2\x06\x01x"  # field 100, length-delimited: what a newer client may send
    assert generate(pb.GenerateRequest(text="abc").SerializeToString() + later)[0] is grpc.StatusCode.OK


def test_random_bytes_never_break_the_server(server, generate):
    random_bytes = random.Random(0)
    valid = _sampling(
        temperature=0.5, stop=["x"], seed=3, logit_bias={5: 1.5}, n=2, min_p=0.1, prompt_logprobs=2, min_tokens=3
    ).SerializeToString()
    seen = set()
    for _ in range(300):
        data = bytearray(valid)
        for _ in range(random_bytes.randint(1, 4)):
            data[random_bytes.randrange(len(data))] = random_bytes.randrange(256)
        code, details, _ = generate(bytes(data))
        assert code in (grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT), (bytes(data), code, details)
        seen.add(code)
    assert grpc.StatusCode.INVALID_ARGUMENT in seen
    wait_until(lambda: not server.llm.live, "all ended")


def test_oversized(server, generate):
    code, _, _ = generate(pb.GenerateRequest(text="x" * (2**20 + 1)))
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    with Client(server.address, timeout=10) as client:
        with pytest.raises(InvalidRequestError, match="max-message-mb"):
            client.generate("x" * (2**20 + 1))
        assert client.generate("x" * 2**19, max_tokens=1).text == "x"


def test_abort_needs_an_id(server):
    with Client(server.address, timeout=10) as client, pytest.raises(InvalidRequestError) as caught:
        client.abort("")
    assert caught.value.field == "request_id"


@pytest.mark.parametrize(
    ("prompt", "options", "error"),
    [
        (3.5, {}, InvalidRequestError),
        (b"x", {}, InvalidRequestError),
        ({"messages": 5}, {}, InvalidRequestError),
        ({"text": "x"}, {}, InvalidRequestError),
        ({"prompt_token_ids": ["x"]}, {}, InvalidRequestError),
        ([2**40], {}, InvalidRequestError),
        ({"messages": [{"role": "user"}]}, {}, InvalidRequestError),
        ({"messages": [{"role": "user", "content": 3}]}, {}, InvalidRequestError),
        ("x", {"temperature": -1}, InvalidRequestError),
        ("x", {"temprature": 1}, TypeError),
    ],
)
def test_the_client_refuses_before_it_sends(server, prompt, options, error):
    with Client(server.address, timeout=10) as client, pytest.raises(error):
        client.generate(prompt, **options)
