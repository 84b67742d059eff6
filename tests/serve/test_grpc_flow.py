"""Readers that are slow or never read, and more requests than fit: bounded, and no cost to the others."""

from __future__ import annotations

import json
import os
import time

import grpc
import psutil
import pytest
from fake_llm import FakeLLM
from raw_http2 import UnreadCall
from serving import Serving, wait_until

from epruntime.client import Client
from epruntime.errors import QueueFullError
from epruntime.proto import inference_pb2 as pb
from epruntime.proto import keys
from epruntime.serve.grpc import servicer
from epruntime.serve.grpc.pieces import MAX_BYTES
from epruntime.testing.patience import soon

GENERATE = f"/{keys.SERVICE}/Generate"


def _raw(channel: grpc.Channel):
    return channel.unary_stream(GENERATE, pb.GenerateRequest.SerializeToString, pb.GenerateResponse.FromString)


def test_a_slow_reader_gets_merged_pieces_of_bounded_size():
    text = "x" * 16384
    # a window that does not grow: how much goes out unread is no matter of how fast either side is
    window = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 2**16)]
    with Serving() as server, grpc.insecure_channel(server.address, options=window) as channel:
        sampling = pb.SamplingParams(max_tokens=-1, logprobs=20)
        # gRPC's own limit of 4 MiB for received messages holds on this channel
        call = _raw(channel)(pb.GenerateRequest(text=text, request_id="slow", sampling=sampling), timeout=60)
        messages = [next(call)]
        wait_until(lambda: server.llm.live["slow"].generated == [len(text)], "all generated")
        messages += call
    assert "".join(m.text for m in messages) == text
    assert sum(len(m.token_ids) for m in messages) == sum(len(m.logprobs) for m in messages) == len(text)
    assert all(len(m.token_ids) == len(m.logprobs) for m in messages)
    assert [m.final for m in messages] == [False] * (len(messages) - 1) + [True]
    assert messages[-1].usage.output_tokens == len(text)
    # merged while nothing could be written, and cut again
    assert max(len(m.token_ids) for m in messages) > 1000
    assert max(m.ByteSize() for m in messages) < 2 * MAX_BYTES
    assert server.llm.yields["slow"] < len(text) / 2


def test_clients_that_never_read_cost_the_others_nothing():
    """40 streams whose clients take not a byte of output: no growth beyond their own output, and nobody waits."""
    process = psutil.Process(os.getpid())
    tokens, count = 8_000, 40
    with Serving() as server, Client(server.address, timeout=20) as client:
        client.generate("abc", max_tokens=50)
        sizes = []
        for turn in range(3):
            ids = [f"{turn}-{i}" for i in range(count)]
            calls = [
                UnreadCall(
                    server.address,
                    GENERATE,
                    pb.GenerateRequest(
                        text="abc", request_id=i, sampling=pb.SamplingParams(max_tokens=tokens)
                    ).SerializeToString(),
                )
                for i in ids
            ]
            wait_until(lambda ids=ids: set(ids) <= set(server.llm.live), "all have begun")
            began = time.monotonic()
            for _ in range(10):
                assert client.generate("abc", max_tokens=20, timeout=10).usage.output_tokens == 20
            assert time.monotonic() - began < soon(10)
            wait_until(lambda ids=ids: all(server.llm.live[i].generated == [tokens] for i in ids), "all generated", 120)
            # what gRPC takes without a reader is a few messages; the rest stays merged in one delta
            assert max(server.llm.yields[i] for i in ids) < tokens / 10
            sizes.append(process.memory_info().rss)
            for call in calls:
                call.close()
            wait_until(lambda: not server.llm.live and not server.gate.live, "all have gone")
        assert sizes[-1] - sizes[0] < 16 * 2**20, sizes


def test_a_client_that_never_reads_loses_its_request(monkeypatch):
    monkeypatch.setattr(servicer, "UNREAD_S", 0.3)
    request = pb.GenerateRequest(text="abc", request_id="idle", sampling=pb.SamplingParams(max_tokens=100_000))
    with Serving(FakeLLM(delay_s=0.001)) as server:
        call = UnreadCall(server.address, GENERATE, request.SerializeToString())
        wait_until(lambda: "idle" in server.llm.live, "it has begun")
        wait_until(lambda: "idle" in server.llm.ended and not server.gate.live, "it has been ended")
        call.close()


def test_a_full_queue_is_resource_exhausted_with_a_hint():
    with Serving(FakeLLM(queue=0)) as server, Client(server.address, timeout=10, retries=0) as client:
        with pytest.raises(QueueFullError) as caught:
            client.generate("abc")
        assert caught.value.retry_after_s == 2.5
        cause = caught.value.__cause__
        assert cause.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        trailers = dict(cause.trailing_metadata())
        assert trailers[keys.RETRY_AFTER_MS] == trailers["grpc-retry-pushback-ms"] == "2500"
        # google/rpc/error_details.proto, as a library that nobody here wrote reads it
        status_pb2 = pytest.importorskip("google.rpc.status_pb2")
        error_details_pb2 = pytest.importorskip("google.rpc.error_details_pb2")
        status = status_pb2.Status.FromString(trailers["grpc-status-details-bin"])
        assert (status.code, status.message) == (grpc.StatusCode.RESOURCE_EXHAUSTED.value[0], cause.details())
        info = error_details_pb2.RetryInfo()
        assert status.details[0].Unpack(info)
        assert info.retry_delay.ToMilliseconds() == 2500


def test_grpc_libraries_retry_by_their_own_policy():
    """The refusal comes without headers, which gRPC proposal A6 asks for, and its pushback is followed."""
    policy = {"maxAttempts": 3, "initialBackoff": "40s", "maxBackoff": "40s", "backoffMultiplier": 1,
              "retryableStatusCodes": ["RESOURCE_EXHAUSTED"]}  # fmt: skip
    config = json.dumps({"methodConfig": [{"name": [{"service": keys.SERVICE}], "retryPolicy": policy}]})
    llm = FakeLLM(queue=0)
    llm.retry_after_s = 0.3
    with (
        Serving(llm) as server,
        grpc.insecure_channel(server.address, options=[("grpc.service_config", config)]) as channel,
    ):
        began = time.monotonic()
        call = _raw(channel)(pb.GenerateRequest(text="abc", sampling=pb.SamplingParams(max_tokens=3)), timeout=30)
        wait_until(lambda: llm.num_refused > 0, "it was refused")
        llm.queue = 1
        assert "".join(m.text for m in call) == "abc"
        assert 0.3 <= time.monotonic() - began < soon(8)


def test_a_full_queue_takes_nothing_from_those_inside():
    llm = FakeLLM(delay_s=0.005, queue=3)
    with Serving(llm) as server, Client(server.address, timeout=20, retries=0) as client:
        inside = [client.stream("abc", max_tokens=60, request_id=str(i)) for i in range(3)]
        wait_until(lambda: len(llm.live) == 3, "the queue is full")
        for _ in range(20):
            with pytest.raises(QueueFullError):
                client.generate("abc")
        assert [stream.result().usage.output_tokens for stream in inside] == [60] * 3
        assert client.generate("abc", max_tokens=3).text == "abc"
