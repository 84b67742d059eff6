"""Retries of the clients: only before the first chunk, after the server's hint, within the timeout."""

from __future__ import annotations

import asyncio
import socket
import threading
import time

import pytest
from fake_llm import FakeLLM
from serving import Serving, wait_until

from epruntime.client import AsyncClient, Client
from epruntime.client.retry import Attempts
from epruntime.errors import (
    ConfigError,
    EngineDeadError,
    EPRuntimeError,
    InvalidRequestError,
    QueueFullError,
    RequestAbortedError,
    RequestTimeoutError,
    UnavailableError,
)
from epruntime.testing.patience import PATIENCE_S, soon


@pytest.mark.parametrize(
    "error", [UnavailableError("x"), EngineDeadError("x"), UnavailableError("x", retry_after_s=None)]
)
def test_waits_double_within_their_jitter(error):
    for base in (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 8.0):
        waits = []
        for _ in range(200):
            attempts = Attempts(retries=20, timeout=None)
            for _ in range([0.25, 0.5, 1.0, 2.0, 4.0, 8.0].index(base)):
                attempts.wait_s(error)
            waits.append(attempts.wait_s(error))
        assert base * 0.8 <= min(waits) < base < max(waits) <= base * 1.2


def test_a_hint_is_a_lower_bound():
    waits = [Attempts(1, None).wait_s(QueueFullError("x", retry_after_s=3.0)) for _ in range(200)]
    assert 3.0 <= min(waits) < max(waits) <= 3.6
    assert Attempts(9, None).wait_s(UnavailableError("x", retry_after_s=61.0)) is None


def test_no_retry_beyond_the_number_or_the_timeout():
    attempts = Attempts(2, None)
    assert [attempts.wait_s(UnavailableError("x")) is None for _ in range(3)] == [False, False, True]
    assert Attempts(0, None).wait_s(UnavailableError("x")) is None
    assert Attempts(9, 2.0).wait_s(UnavailableError("x", retry_after_s=2.5)) is None
    attempts = Attempts(9, 100.0)
    assert 99 < attempts.timeout() <= 100


@pytest.mark.parametrize(
    "error",
    [
        InvalidRequestError("x", field="request_id"), InvalidRequestError("x", field="prompt"), ConfigError("x"),
        RequestAbortedError("x"), RequestTimeoutError("x"), EPRuntimeError("x"),
    ],
)  # fmt: skip
def test_what_will_not_pass_is_not_tried_again(error):
    assert Attempts(9, None).wait_s(error) is None


def test_an_id_that_an_earlier_try_still_holds_is_waited_for():
    attempts = Attempts(9, None)
    attempts.wait_s(UnavailableError("the connection broke"))
    assert attempts.wait_s(InvalidRequestError("a live request has this id", field="request_id")) is not None
    assert attempts.wait_s(InvalidRequestError("x", field="prompt")) is None


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_server_that_comes_up_later_is_found(kind):
    port = _free_port()
    results = []

    def call() -> None:
        if kind == "sync":
            with Client(f"127.0.0.1:{port}", timeout=PATIENCE_S, retries=20) as client:
                results.append((client.generate("abc", max_tokens=3).text, client.tokenize("abc").token_ids))
            return

        async def main() -> None:
            async with AsyncClient(f"127.0.0.1:{port}", timeout=PATIENCE_S, retries=20) as client:
                text = (await client.generate("abc", max_tokens=3)).text
                results.append((text, (await client.tokenize("abc")).token_ids))

        asyncio.run(main())

    thread = threading.Thread(target=call)
    thread.start()
    time.sleep(0.6)
    with Serving(grpc_port=port):
        thread.join(PATIENCE_S)
    assert results == [("abc", [97, 98, 99])]


def test_a_full_queue_is_tried_again_after_the_hint():
    llm = FakeLLM(queue=0)
    llm.retry_after_s = 0.4
    with Serving(llm) as server, Client(server.address, timeout=10) as client:
        began = time.monotonic()
        stream = client.stream("abc", max_tokens=3)
        wait_until(lambda: llm.num_refused > 0, "it was refused")
        llm.queue = 1
        assert stream.result().text == "abc"
        assert 0.4 <= time.monotonic() - began < soon(5)
        llm.queue, llm.retry_after_s = 0, 30.0
        with pytest.raises(QueueFullError):  # the hint is beyond the timeout: said at once
            client.generate("abc")
        assert time.monotonic() - began < soon(8)


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_after_the_first_chunk_never(kind):
    with Serving(FakeLLM(delay_s=0.01)) as server:

        def fail() -> None:
            server.llm.fail_all(UnavailableError("a rank was lost", retry_after_s=0.01))

        if kind == "sync":
            with Client(server.address, timeout=10) as client:
                stream = client.stream("abc", max_tokens=1000)
                next(stream)
                server.call(fail)
                with pytest.raises(UnavailableError, match="a rank was lost"):
                    list(stream)
        else:

            async def main() -> None:
                async with AsyncClient(server.address, timeout=10) as client:
                    stream = client.stream("abc", max_tokens=1000)
                    await anext(stream)
                    await asyncio.to_thread(server.call, fail)
                    with pytest.raises(UnavailableError, match="a rank was lost"):
                        await stream.result()

            asyncio.run(main())
        assert len(server.llm.ended) == 1


def test_before_the_first_chunk_a_failed_request_is_sent_again():
    with Serving(FakeLLM(delay_s=0.3)) as server, Client(server.address, timeout=10) as client:
        stream = client.stream("abc", max_tokens=1, request_id="mine")
        wait_until(lambda: "mine" in server.llm.live, "it has begun")
        server.call(server.llm.fail_all, UnavailableError("a rank was lost", retry_after_s=0.01))
        assert stream.result().text == "a"
        assert server.llm.ended == ["mine", "mine"]


def test_closing_ends_the_wait():
    llm = FakeLLM(queue=0)
    llm.retry_after_s = 50.0
    with Serving(llm) as server, Client(server.address) as client:
        stream = client.stream("abc")
        threading.Timer(0.3, stream.close).start()
        began = time.monotonic()
        with pytest.raises(RequestAbortedError):
            next(stream)
        assert time.monotonic() - began < soon(5)

        async def main() -> None:
            async with AsyncClient(server.address) as aio:
                stream = aio.stream("abc")
                asyncio.get_running_loop().call_later(0.3, stream.close)
                with pytest.raises(RequestAbortedError):
                    await anext(stream)

        asyncio.run(main())
        assert time.monotonic() - began < soon(10)
        assert not llm.params  # none was ever taken
