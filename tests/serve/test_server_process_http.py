"""run_server as a process: HTTP beside gRPC on the same engine, through signals and death."""

from __future__ import annotations

import json
import signal
import threading
import time

import httpx2
import pytest
from fake_process import DEADLINE_S, Process
from serving import wait_until

from epruntime.client import Client
from epruntime.serve.server import ONE_WISH_S


class Stream:
    """A long completion, read in a thread of its own; starts when its first event is there."""

    def __init__(self, url: str, max_tokens: int) -> None:
        self.events: list[str] = []
        self._begun = threading.Event()
        self._body = {"prompt": "abc", "max_tokens": max_tokens, "stream": True}
        self._url = url + "/v1/completions"
        self._thread = threading.Thread(target=self._read)
        self._thread.start()
        assert self._begun.wait(DEADLINE_S)

    def _read(self) -> None:
        with httpx2.stream("POST", self._url, json=self._body, timeout=DEADLINE_S) as answer:
            for line in answer.iter_lines():
                if line:
                    self.events.append(line.removeprefix("data: "))
                    self._begun.set()

    def end(self) -> list[str]:
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive()
        return self.events


def _refuses(url: str) -> bool:
    return httpx2.get(url + "/health").status_code == 503


def test_sigterm_drains_both_front_ends():
    with Process() as server:
        address, url = server.urls()
        with Client(address) as client:
            assert client.generate("abc", max_tokens=2).text == "ab"
            stream = Stream(url, 200)
            server.popen.send_signal(signal.SIGTERM)
            wait_until(lambda: _refuses(url), "draining")
            refused = httpx2.post(url + "/v1/completions", json={"prompt": "a"})
            assert (refused.status_code, refused.headers["Retry-After"]) == (503, "1")
            assert "draining" in refused.json()["error"]["message"]
            assert client.info().running_requests == 1
            events = stream.end()
        assert events[-1] == "[DONE]"
        assert "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1]) == ("abc" * 67)[:200]
        assert server.end()[0] == 0


def test_second_signal_stops_at_once():
    with Process() as server:
        _, url = server.urls()
        stream = Stream(url, 100_000)
        server.popen.send_signal(signal.SIGINT)
        wait_until(lambda: _refuses(url), "draining")
        time.sleep(2 * ONE_WISH_S)
        server.popen.send_signal(signal.SIGINT)
        assert "stopped before this request ended" in json.loads(stream.end()[-1])["error"]["message"]
        assert server.end()[0] == 130


def test_a_reader_that_does_not_read_holds_up_nothing():
    with Process(delay_s=0, drain_s=0.5) as server:
        _, url = server.urls()
        with httpx2.stream("POST", url + "/v1/completions", json={"prompt": "a", "max_tokens": 10**6, "stream": True}):
            server.popen.send_signal(signal.SIGTERM)
            code, _, err = server.end()
        assert code == 0
        assert "Traceback" not in err


def test_dead_engine_is_told():
    with Process("dies") as server:
        _, url = server.urls()
        stream = Stream(url, 100_000)
        assert "rank 1 on host b is lost" in json.loads(stream.end()[-1])["error"]["message"]
        health = httpx2.get(url + "/health")
        assert (health.status_code, "rank 1 on host b" in health.text) == (503, True)
        assert server.end()[0] == 1


def test_health_while_loading():
    # the port is not printed before the model is loaded; a probe knows it from the configuration
    import socket

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with Process("load", http_port=port) as server:
        assert server.popen.stdout.readline() == "loading\n"
        assert _refuses(f"http://127.0.0.1:{port}")
        server.popen.send_signal(signal.SIGTERM)
        assert server.end()[0] == 128 + signal.SIGTERM


def test_without_http():
    with Process(http_port=-1) as server:
        assert server.urls()[1] == ""
        server.popen.send_signal(signal.SIGTERM)
        assert server.end()[0] == 0


@pytest.mark.parametrize(("host", "warned"), [("127.0.0.1", 0), ("localhost", 0), ("0.0.0.0", 2)])
def test_reachable_without_token_or_tls_is_warned_about(host, warned, caplog):
    import asyncio

    from epruntime.config import ServeConfig
    from epruntime.serve.gate import Gate
    from epruntime.serve.server import FrontEnds

    async def main() -> str:
        front_ends = FrontEnds(ServeConfig(host=host, port=0, grpc_port=0), Gate())
        try:
            return await front_ends.start()
        finally:
            await front_ends.stop()

    where = asyncio.run(main())
    assert f"HTTP on http://{host}:" in where
    said = [record.getMessage() for record in caplog.records if record.name == "epruntime.serve.server"]
    assert len(said) == warned
    assert all(where in line for line in said)
