"""grpc.health.v1: SERVING only while requests are taken and every rank steps; Watch tells each change."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from fake_llm import FakeLLM
from grpc_health.v1 import health_pb2, health_pb2_grpc
from serving import Serving, wait_until

from epruntime.client import AsyncClient, Client
from epruntime.engine.status import EngineState
from epruntime.errors import RankLostError, UnavailableError
from epruntime.proto import keys

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
LOST = RankLostError(slot=1, host="b", detail="layer 3, all_to_all")


def _check(stub: health_pb2_grpc.HealthStub) -> set[int]:
    return {
        stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=60).status for service in ("", keys.SERVICE)
    }


@pytest.mark.parametrize("service", ["", keys.SERVICE])
def test_check_and_watch_follow_gate_and_engine(service):
    with Serving(ready=False) as server, grpc.insecure_channel(server.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        watch = stub.Watch(health_pb2.HealthCheckRequest(service=service), timeout=60)
        llm = server.llm
        for change, expected in (
            (None, NOT_SERVING),  # loading
            ((server.gate.ready, llm), SERVING),
            ((llm.become, EngineState.STALLED, "rank 1 on host b: no progress for 6 s"), NOT_SERVING),
            ((llm.become, EngineState.READY), SERVING),
            ((llm.become, EngineState.RESTARTING, "rank 1 on host b was lost"), NOT_SERVING),
            ((llm.become, EngineState.READY), SERVING),
            ((server.gate.drain,), NOT_SERVING),
        ):
            if change is not None:
                server.call(*change)
            assert _check(stub) == {expected}, change
            assert next(watch).status == expected, change
        watch.cancel()


def test_a_dead_engine_is_not_serving_at_once():
    with Serving() as server, grpc.insecure_channel(server.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        assert _check(stub) == {SERVING}
        server.call(server.llm.die, LOST)
        assert _check(stub) == {NOT_SERVING}


def test_unknown_service_and_list():
    with Serving() as server, grpc.insecure_channel(server.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        with pytest.raises(grpc.RpcError) as caught:
            stub.Check(health_pb2.HealthCheckRequest(service="other"), timeout=60)
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        watch = stub.Watch(health_pb2.HealthCheckRequest(service="other"), timeout=60)
        assert next(watch).status == UNKNOWN
        watch.cancel()
        listed = stub.List(health_pb2.HealthListRequest(), timeout=60).statuses
        assert {name: response.status for name, response in listed.items()} == {"": SERVING, keys.SERVICE: SERVING}


def test_watchers_that_never_read_hold_up_no_other():
    async def main(server: Serving) -> None:
        async with grpc.aio.insecure_channel(server.address) as channel, AsyncClient(server.address) as client:
            stub = health_pb2_grpc.HealthStub(channel)
            idle = [stub.Watch(health_pb2.HealthCheckRequest(service="")) for _ in range(20)]
            for state, words in ((EngineState.STALLED, "not serving"), (EngineState.READY, "serving")) * 20:
                await asyncio.to_thread(server.call, server.llm.become, state)
                assert await client.health(timeout=60) == words
            for watch in idle:
                watch.cancel()

    with Serving() as server:
        asyncio.run(main(server))


def test_watchers_are_forgotten_when_they_leave():
    with Serving() as server, grpc.insecure_channel(server.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        watches = [stub.Watch(health_pb2.HealthCheckRequest(service="")) for _ in range(5)]
        assert [next(watch).status for watch in watches] == [SERVING] * 5
        wait_until(lambda: server.server.num_health_watchers == 5, "all watch")
        for watch in watches:
            watch.cancel()
        wait_until(lambda: server.server.num_health_watchers == 0, "all have left")


def test_the_state_that_clients_are_told():
    llm = FakeLLM()
    with Serving(llm) as server, Client(server.address, timeout=10, retries=0) as client:
        server.call(llm.become, EngineState.STALLED, "rank 1 on host b: no progress for 6 s")
        info = client.info()
        assert (info.state, info.state_reason) == ("stalled", "rank 1 on host b: no progress for 6 s")
        assert client.generate("abc", max_tokens=3).text == "abc"  # requests are still taken
        server.call(llm.become, EngineState.RESTARTING, "rank 1 on host b was lost")
        assert client.info().state == "restarting"
        with pytest.raises(UnavailableError, match="rank 1 on host b was lost") as caught:
            client.generate("abc")
        assert caught.value.retry_after_s is not None
        server.call(llm.become, EngineState.READY)
        assert (client.info().state, client.info().state_reason) == ("ready", "")
        server.call(llm.die, LOST)
        assert client.info().state == "dead"
