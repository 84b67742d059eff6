"""The HTTP front end around its endpoints: who may call, ids, health, and clients that leave or do not read."""

from __future__ import annotations

import json
import socket
import threading
import time

import httpx2
import pytest
from fake_llm import FakeLLM
from http_serving import HttpServing
from serving import wait_until

from epruntime.config import ServeConfig
from epruntime.engine.status import EngineState
from epruntime.errors import ConfigError, RankLostError
from epruntime.serve.access import AccessCheck
from epruntime.serve.openai import connection as connections
from epruntime.testing.patience import soon

LONG = {"prompt": "abc", "max_tokens": 100_000, "stream": True}


def _connection(server: HttpServing) -> socket.socket:
    connection = socket.create_connection(server.url.removeprefix("http://").split(":"))
    connection.settimeout(60)
    return connection


def _send(connection: socket.socket, body: dict, path: str = "/v1/completions") -> None:
    content = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    connection.sendall(head.encode() + content)


# who may call


def test_a_token_is_needed_where_one_is_set(monkeypatch):
    monkeypatch.setenv("EPRUNTIME_API_KEY", "from-the-environment")
    with HttpServing(api_key=("one", "two")) as server, httpx2.Client(base_url=server.url) as http:
        for path in ("/health", "/ping", "/version"):
            assert http.get(path).status_code == 200
        for token in ("one", "two", "from-the-environment"):
            assert http.get("/v1/models", headers={"Authorization": f"Bearer {token}"}).status_code == 200
        for wrong in ("Bearer three", "Bearer on", "Bearer onee", "Bearer", "Basic one", "one", "Bearer one two", ""):
            for path in ("/v1/models", "/metrics", "/openapi.json", "/nope"):
                response = http.get(path, headers={"Authorization": wrong} if wrong else {})
                assert response.status_code == 401, (wrong, path)
                assert response.headers["WWW-Authenticate"] == "Bearer"
                assert response.json()["error"]["code"] == "invalid_api_key"
        assert http.post("/v1/completions", json=LONG).status_code == 401
        assert server.llm.params == {}


def test_access_check():
    assert AccessCheck().allows(None)
    check = AccessCheck(["secret-token"])
    assert check.allows("Bearer secret-token")
    assert check.allows("bearer  secret-token ")
    assert not check.allows(None)
    assert not check.allows("Bearer sécret-token")
    assert not check.allows("Bearer \udcff")
    assert "secret-token" not in repr(check)
    assert "secret-token" not in repr(ServeConfig(api_key=("secret-token",)))
    for bad in ("", "a b", "schlüssel", "a\n"):
        with pytest.raises(ConfigError, match="printable ASCII"):
            AccessCheck([bad])


def test_cors_for_allowed_origins_only():
    origin = "https://app.example"
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
    with HttpServing(api_key=("k",), allowed_origins=(origin,)) as server, httpx2.Client(base_url=server.url) as http:
        allowed = http.options("/v1/chat/completions", headers={"Origin": origin, **asked})
        assert (allowed.status_code, allowed.headers["Access-Control-Allow-Origin"]) == (200, origin)
        other = http.options("/v1/chat/completions", headers={"Origin": "https://evil.example", **asked})
        assert "Access-Control-Allow-Origin" not in other.headers
        refused = http.get("/v1/models", headers={"Origin": origin})
        assert (refused.status_code, refused.headers["Access-Control-Allow-Origin"]) == (401, origin)
    with HttpServing() as server:
        plain = httpx2.get(server.url + "/v1/models", headers={"Origin": origin})
        assert "Access-Control-Allow-Origin" not in plain.headers


# ids, description, metrics


def test_request_ids():
    with HttpServing() as server, httpx2.Client(base_url=server.url) as http:
        first, second = (
            http.post("/v1/completions", json={"prompt": "a"}, headers={"X-Request-Id": "mine-1"}) for _ in range(2)
        )
        assert first.headers["X-Request-Id"] == second.headers["X-Request-Id"] == "mine-1"
        assert first.json()["id"].startswith("cmpl-mine-1-")
        assert first.json()["id"] != second.json()["id"]
        assert http.get("/nope", headers={"X-Request-Id": "mine-2"}).headers["X-Request-Id"] == "mine-2"
        for odd in ("a b", "x" * 129):
            assert http.get("/health", headers={"X-Request-Id": odd}).headers["X-Request-Id"] != odd
        assert http.get("/health").headers["X-Request-Id"] != http.get("/health").headers["X-Request-Id"]


def test_description_lists_paths_and_fields():
    with HttpServing() as server:
        described = httpx2.get(server.url + "/openapi.json").json()
        assert httpx2.get(server.url + "/docs").status_code == 404
    body = described["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert {"messages", "temperature", "stream_options"} <= body["properties"].keys()
    assert "$ref" not in json.dumps(body)


def test_tokenize_and_detokenize():
    with HttpServing() as server, httpx2.Client(base_url=server.url) as http:
        for body in (
            {"prompt": "hi"},
            {"messages": [{"role": "user", "content": "hi"}], "add_generation_prompt": True},
        ):
            answer = http.post("/tokenize", json={**body, "return_token_strs": True})
            assert answer.json() == {
                "count": 2, "max_model_len": 65536, "tokens": [104, 105], "token_strs": ["h", "i"]
            }  # fmt: skip
        assert http.post("/detokenize", json={"tokens": [104, 105]}).json() == {"prompt": "hi"}
        for path, body in (
            ("/tokenize", {}), ("/tokenize", {"prompt": "a", "messages": []}), ("/detokenize", {"tokens": [2**40]}),
            ("/tokenize", {"prompt": "a", "add_special_tokens": False}),
        ):  # fmt: skip
            assert http.post(path, json=body).status_code == 400


@pytest.mark.parametrize("stream", [False, True])
def test_ids_are_refused_by_the_requests_own_name_of_them(stream):
    with HttpServing() as server, httpx2.Client(base_url=server.url) as http:
        for path, body in (
            ("/v1/completions", {"prompt": [-1], "stream": stream}),
            ("/v1/completions", {"prompt": [0x110000], "stream": stream}),
            ("/v1/completions", {"prompt": [[104], [0x110000]], "stream": stream}),
            ("/detokenize", {"tokens": [0x110000]}),
            ("/detokenize", {"tokens": [-1]}),
        ):
            answer, param = http.post(path, json=body), "tokens" if path == "/detokenize" else "prompt"
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, param)
            assert error["message"].startswith(f"{param}=")


def test_metrics_are_mounted():
    async def read(accept: str) -> tuple[bytes, str]:
        return accept.encode(), "text/plain; version=0.0.4"

    with HttpServing(metrics=read) as server:
        answer = httpx2.get(server.url + "/metrics", headers={"Accept": "text/x"})
        assert (answer.text, answer.headers["content-type"]) == ("text/x", "text/plain; version=0.0.4")


# health


def test_health_follows_server_and_ranks():
    with HttpServing(ready=False) as server, httpx2.Client(base_url=server.url) as http:

        def check(status: int, words: str) -> None:
            for path in ("/health", "/ping"):
                response = http.get(path)
                assert (response.status_code, words in response.text) == (status, True), response.text
                assert status == 200 or int(response.headers["Retry-After"]) >= 1

        def complete() -> httpx2.Response:
            return http.post("/v1/completions", json={"prompt": "a"})

        check(503, "being loaded")
        assert (complete().status_code, complete().headers["Retry-After"]) == (503, "5")
        assert http.get("/v1/models").status_code == 503
        server.call(server.gate.ready, server.llm)
        check(200, "ok")
        server.call(server.llm.become, EngineState.STALLED, "rank 1 on host b is silent")
        check(503, "rank 1 on host b")
        assert complete().status_code == 200
        server.call(server.llm.become, EngineState.RESTARTING, "rank 1 on host b was lost")
        check(503, "rank 1 on host b")
        assert complete().status_code == 503
        assert "Retry-After" in complete().headers
        server.call(server.llm.become, EngineState.READY)
        check(200, "ok")
        server.call(server.gate.drain)
        check(503, "draining")
        assert complete().status_code == 503
        assert http.get("/v1/models").status_code == 200
        server.call(server.llm.die, RankLostError(slot=1, host="b", detail="step 3"))
        check(503, "rank 1 on host b is lost")
        assert "rank 1 on host b is lost" in complete().text


def test_health_is_open():
    lost = RankLostError(slot=1, host="b", detail="killed by SIGKILL")
    with HttpServing(api_key=("t",)) as server, httpx2.Client(base_url=server.url) as http:
        server.call(server.llm.die, lost)
        assert http.get("/health").json()["error"]["message"] == "rank 1 on host b is lost: killed by SIGKILL"


# clients that leave or do not read


@pytest.mark.parametrize(
    "body",
    [
        LONG, {**LONG, "stream": False}, {**LONG, "prompt": ["abc", "xyz"], "n": 2},
        {**LONG, "prompt": ["a"] * 3, "stream": False},
    ],
    ids=["stream", "whole", "several-streams", "several-whole"],
)  # fmt: skip
def test_a_client_that_leaves_frees_its_requests(body):
    with HttpServing(FakeLLM(delay_s=0.01)) as server:
        prompts = body["prompt"] if isinstance(body["prompt"], list) else [body["prompt"]]
        with _connection(server) as connection:
            _send(connection, body)
            wait_until(lambda: len(server.llm.live) == len(prompts), "they run")
        wait_until(lambda: not server.llm.live, "they are freed")
        wait_until(lambda: not server.gate.live, "their ids are free")
        assert len(server.llm.ended) == len(prompts)


def test_a_client_that_leaves_before_the_first_token_frees_its_request():
    with HttpServing(FakeLLM(delay_s=60)) as server:
        with _connection(server) as connection:
            _send(connection, LONG)
            wait_until(lambda: len(server.llm.live) == 1, "it is admitted")
        wait_until(lambda: not server.llm.live, "it is freed", 20)


def test_a_slow_reader_is_not_written_to_and_costs_the_others_nothing(monkeypatch):
    monkeypatch.setattr(connections, "STALL_S", 1.0)
    with HttpServing() as server, _connection(server) as slow:
        _send(slow, {**LONG, "max_tokens": 10_000_000})
        wait_until(lambda: len(server.llm.live) == 1, "it runs")
        (name,) = server.llm.live
        taken = -1
        while taken != server.llm.yields[name]:  # until the sockets are full
            taken = server.llm.yields[name]
            began = time.monotonic()
            other = httpx2.post(server.url + "/v1/completions", json={"prompt": "xyz", "max_tokens": 3})
            assert other.json()["choices"][0]["text"] == "xyz"
            assert time.monotonic() - began < soon(2)
            time.sleep(0.3)
        wait_until(lambda: not server.llm.live, "a reader that takes nothing is given up")


def test_a_large_answer_may_take_longer_than_a_stall(monkeypatch):
    monkeypatch.setattr(connections, "STALL_S", 1.0)
    text = "a" * 4_000_000
    with HttpServing() as server, _connection(server) as slow:
        _send(slow, {"prompt": text}, "/tokenize")
        answer = b""
        while part := slow.recv(2**18):
            answer += part
            time.sleep(0.05)
            if answer.endswith(b"}"):
                break
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["count"] == len(text)


def test_headers_must_arrive_in_time(monkeypatch):
    monkeypatch.setattr(connections, "HEADERS_S", 1.0)
    with HttpServing() as server, _connection(server) as silent, _connection(server) as trickling:
        ended = threading.Event()

        def trickle() -> None:
            try:
                trickling.sendall(b"GET /health HTTP/1.1\r\n")
                while not ended.wait(0.05):
                    trickling.sendall(b"A: b\r\n")
            except ConnectionError:
                ended.set()

        thread = threading.Thread(target=trickle)
        thread.start()
        assert silent.recv(1) == b""
        try:
            wait_until(ended.is_set, "the trickling connection is closed")
        finally:
            ended.set()
            thread.join()
        # a connection in use is kept for the next request, whose headers get as long again
        with httpx2.Client(base_url=server.url) as http:
            assert http.get("/health").status_code == 200
            time.sleep(1.2)
            assert http.get("/health").status_code == 200


def test_bodies_must_arrive_in_time(monkeypatch):
    from epruntime.serve.openai import body

    monkeypatch.setattr(body, "BODY_S", 0.3)
    with HttpServing() as server, _connection(server) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n{"
        )
        answer = connection.makefile("rb").read()
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b'"request_timeout"' in answer


def test_stop_ends_streams_with_the_reason():
    with HttpServing(FakeLLM(delay_s=0.01)) as server:
        with httpx2.stream("POST", server.url + "/v1/completions", json=LONG) as answer:
            lines = answer.iter_lines()
            assert next(lines).startswith("data: {")
            server.run(server.gate.close("the server stops"))
            events = [line for line in lines if line]
        assert "the server stops" in json.loads(events[-1].removeprefix("data: "))["error"]["message"]
        assert "data: [DONE]" not in events
