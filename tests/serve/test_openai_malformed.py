"""Bodies that no well-behaved client sends: each is refused in OpenAI's form, names what is wrong, and costs little."""

from __future__ import annotations

import gzip
import inspect
import json
import socket
import time

import httpx2
import openai
import pydantic
import pytest
from http_serving import HttpServing
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from epruntime.serve.openai.fields import (
    FIXED,
    IGNORED,
    ChatFields,
    CompletionFields,
    DetokenizeFields,
    TokenizeFields,
)

MIB = 2**20
JSON = {"Content-Type": "application/json"}
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
USER = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def server():
    with HttpServing(max_message_mb=1) as running:
        yield running


@pytest.fixture(scope="module")
def http(server):
    with httpx2.Client(base_url=server.url, timeout=20) as client:
        yield client


def _error(response: httpx2.Response, status: int = 400) -> dict:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert response.headers["X-Request-Id"]
    (error,) = response.json().values()
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["message"]
    return error


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"nonsense", b"[]", b"null", b'"text"', b'{"prompt": "a"} x', b"\xff\xfe", b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud800"}', b'{"prompt": "a", "temperature": NaN}', b'{"prompt": "a", "temperature": Infinity}',
        b'{"prompt": "a", "temperature": 1e999}', b'{"prompt": "a", "n": 1' + b"0" * 5000 + b"}",
        b'{"prompt": "a", "x": ' + b"[" * 200_000, b'{"prompt": ' + b'{"a":' * 50_000,
    ],
    ids=lambda body: repr(body[:30]),
)  # fmt: skip
def test_no_json_or_no_object(http, body):
    began = time.monotonic()
    for path in (COMPLETIONS, CHAT, "/tokenize", "/detokenize"):
        assert _error(http.post(path, content=body, headers=JSON))["type"] == "invalid_request_error"
    assert time.monotonic() - began < 2


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("prompt", 1), ("prompt", None), ("prompt", {}), ("prompt", []), ("prompt", ""), ("prompt", ["a", 1]),
        ("prompt", [[]]), ("prompt", [1.5]), ("prompt", [True]), ("prompt", [[1], "a"]), ("prompt", ["a"] * 1025),
        ("n", 0), ("n", -1), ("n", 129), ("n", "2"), ("n", 1.5), ("n", True), ("n", 10**30),
        ("temperature", -1), ("temperature", "hot"), ("temperature", [1]), ("top_p", 0), ("top_p", 1.1),
        ("min_p", 2), ("top_k", -2), ("repetition_penalty", 0), ("presence_penalty", 3), ("frequency_penalty", -3),
        ("max_tokens", 0), ("max_tokens", -1), ("max_tokens", 2**40), ("min_tokens", -1), ("min_tokens", 17),
        ("seed", -1), ("seed", 2**63), ("seed", "x"), ("stop", ""), ("stop", [""]), ("stop", 1), ("stop", [1]),
        ("stop", ["a"] * 65), ("stop_token_ids", [-1]), ("stop_token_ids", ["a"]), ("logprobs", 21), ("logprobs", True),
        ("logit_bias", {"a": 1}), ("logit_bias", {"1": 101}), ("logit_bias", {"-1": 1}), ("logit_bias", [1]),
        ("logit_bias", {"1": "x"}), ("logit_bias", {"1": 1, "01": 2}), ("logit_bias", {"9" * 5000: 1}),
        ("stream", "yes"), ("stream_options", {}),
        ("ignore_eos", 1), ("skip_special_tokens", "no"), ("prompt_logprobs", 21), ("model", 7), ("echo", 1),
        ("best_of", 2), ("suffix", "x"), ("tools", [{}]), ("no_such_field", 1), ("include_stop_str_in_output", True),
    ],
    ids=lambda value: repr(value)[:30],
)  # fmt: skip
def test_refused_by_the_fields_name(http, field, value):
    error = _error(http.post(COMPLETIONS, json={"prompt": "a", field: value}))
    assert error["param"].split(".")[0] == field
    assert field in error["message"]
    assert len(error["message"]) < 5000


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": ["hi"]}, "messages.0"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user"}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": None}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content.0"),
        ({"messages": [*USER, {"role": "assistant", "content": "", "tool_calls": [{}]}]}, "messages.1.tool_calls"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"functions": [{}]}, "functions"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": 1}, "logprobs"),
        ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
        ({"stream": True, "stream_options": {"nonsense": 1}}, "stream_options.nonsense"),
    ],
    ids=repr,
)
def test_chats_are_refused_by_the_fields_name(http, more, param):
    assert _error(http.post(CHAT, json={"messages": USER, **more}))["param"] == param


@pytest.mark.parametrize(
    ("kind", "create"),
    [
        (ChatFields, openai.resources.chat.completions.Completions.create),
        (CompletionFields, openai.resources.completions.Completions.create),
    ],
)
def test_every_field_of_the_official_client_is_decided_on(kind, create):
    own = {"self", "extra_headers", "extra_query", "extra_body", "timeout"}
    sent = inspect.signature(create).parameters.keys() - own
    assert sent - kind.model_fields.keys() - IGNORED - FIXED.keys() == set()


def test_what_other_clients_send(http):
    """Bodies as lm-eval and guidellm make them."""
    lm_eval_score = {"prompt": [[97, 98]], "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1, "echo": True}
    lm_eval_chat = {"messages": [{**USER[0], "type": "text"}], "max_tokens": 4, "temperature": 0, "stop": [], "seed": 1}
    guidellm = {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}], "stream": True, "stop": None,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True}, "ignore_eos": True,
        "max_completion_tokens": 4,
    }  # fmt: skip
    for path, body in ((COMPLETIONS, lm_eval_score), (CHAT, lm_eval_chat), (CHAT, guidellm)):
        response = http.post(path, json={"model": "echo", **body})
        assert response.status_code == 200, response.text


def test_fields_without_effect_are_ignored(http):
    ignored = {
        "user": "u", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "parallel_tool_calls": True,
        "response_format": {"type": "text"}, "tools": None, "tool_choice": "none", "modalities": ["text"],
        "best_of": None, "no_such_field": None, "prediction": {"type": "content", "content": "x"},
    }  # fmt: skip
    assert http.post(CHAT, json={"messages": USER, **ignored}).status_code == 200


def _errors(kind: type[pydantic.BaseModel], given: dict) -> int:
    try:
        kind.model_validate(given)
    except pydantic.ValidationError as error:
        return error.error_count()
    return 0


@pytest.mark.parametrize("wrong", [None, 1, 1.5, "a", True, [], [None], [1.5], {}])
@pytest.mark.parametrize("kind", [CompletionFields, ChatFields, TokenizeFields, DetokenizeFields])
def test_many_wrong_items_are_one_error(kind, wrong):
    """An error for each of the millions of items that a body can hold would keep everything else waiting."""
    lists = [name for name, field in kind.model_fields.items() if "list[" in str(field.annotation).lower()]
    assert lists
    for name in lists:
        given = {"messages": [], "prompt": "a", "tokens": []} | {name: [wrong] * 1000}
        assert _errors(kind, {key: value for key, value in given.items() if key in kind.model_fields}) < 10, name


@pytest.mark.parametrize(
    ("path", "field", "value"),
    [
        (COMPLETIONS, "prompt", [[1]] * 100_000), (COMPLETIONS, "stop", ["a"] * 100_000),
        (COMPLETIONS, "stop_token_ids", [1] * 100_000), (COMPLETIONS, "logit_bias", {str(i): 1 for i in range(50_000)}),
        (CHAT, "messages", USER * 20_000), (CHAT, "messages", [{"role": "user", "content": ["a"] * 100_000}]),
        ("/tokenize", "messages", USER * 20_000), (COMPLETIONS, "", {f"x{i}": 1 for i in range(50_000)}),
    ],
    ids=lambda value: repr(value)[:30],
)  # fmt: skip
def test_more_than_is_ever_taken(http, path, field, value):
    error = _error(http.post(path, json={field: value} if field else value))
    assert (error["param"] or "").split(".")[0] == field
    assert "000" in error["message"]
    assert len(error["message"]) < 500


def test_more_sequences_than_there_will_ever_be_room_for(server, http, monkeypatch):
    """Not 429: a client would try again for ever."""
    monkeypatch.setattr(server.llm, "queue", 10)
    error = _error(http.post(COMPLETIONS, json={"prompt": ["a", "b", "c"], "n": 4, "max_tokens": 1}))
    assert error["param"] == "prompt"
    assert "12 sequences" in error["message"]
    assert "at most 10" in error["message"]
    assert http.post(COMPLETIONS, json={"prompt": ["a", "b"], "n": 4, "max_tokens": 1}).status_code == 200


@pytest.mark.parametrize("coding", ["gzip", "br", "gzip, identity"])
def test_a_compressed_body_is_named_so(http, coding):
    headers = {**JSON, "Content-Encoding": coding}
    response = http.post(COMPLETIONS, content=gzip.compress(b'{"prompt": "a"}'), headers=headers)
    assert f"Content-Encoding: {coding}" in _error(response, 415)["message"]
    assert response.headers["Accept-Encoding"] == "identity"  # RFC 9110, 12.5.3
    headers["Content-Encoding"] = "identity"
    assert http.post(COMPLETIONS, content=b'{"prompt": "a"}', headers=headers).status_code == 200


def test_other_paths_methods_and_types(http):
    assert _error(http.get("/nope"), 404)["code"] == "not_found"
    response = http.get(COMPLETIONS)
    assert _error(response, 405)["code"] == "method_not_allowed"
    assert response.headers["Allow"] == "POST"
    for headers in ({"Content-Type": "text/plain"}, {"Content-Type": "application/x-www-form-urlencoded"}, {}):
        _error(http.post(COMPLETIONS, content=b'{"prompt": "a"}', headers=headers), 415)
    model = _error(http.post(COMPLETIONS, json={"prompt": "a", "model": "other"}), 404)
    assert (model["code"], model["param"]) == ("model_not_found", "model")
    assert http.head("/health").status_code == 200


@pytest.mark.parametrize("chunked", [False, True])
def test_oversized_body(server, http, chunked):
    body = json.dumps({"prompt": "a" * 2 * MIB}).encode()
    content = (body[i : i + 65536] for i in range(0, len(body), 65536)) if chunked else body
    response = http.post(COMPLETIONS, content=content, headers=JSON)
    assert _error(response, 413)["code"] == "request_too_large"
    assert str(MIB) in response.text
    fits = json.dumps({"prompt": "a" * (MIB - 100), "max_tokens": 1}).encode()
    assert http.post(COMPLETIONS, content=fits, headers=JSON).status_code == 200


def test_an_endless_body_is_cut_off(server):
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    chunk = b"10000\r\n" + b"a" * 0x10000 + b"\r\n"
    with _connection(server) as connection:
        connection.sendall(head.encode() + b"Transfer-Encoding: chunked\r\n\r\n")
        sent, cut = 0, False
        while sent < 64 * MIB and not cut:
            try:
                connection.sendall(chunk)
                sent += len(chunk)
            except ConnectionError:
                cut = True
    assert cut
    assert sent < 16 * MIB  # what is thrown away, and what the sockets hold


def _connection(server: HttpServing) -> socket.socket:
    connection = socket.create_connection(server.url.removeprefix("http://").split(":"))
    connection.settimeout(20)
    return connection


def test_what_is_no_http(server):
    for data in (b"\x16\x03\x01\x02\x00\x01\x00", b"GET\r\n\r\n", b"GET / HTTP/1.1\r\nA: " + b"x" * 100_000):
        with _connection(server) as connection:
            connection.sendall(data + b"\r\n\r\n")
            assert b'"invalid_request_error"' in connection.makefile("rb").read()


_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=12,
)
_fields = st.sampled_from([
    "model", "prompt", "messages", "n", "stop", "stream", "stream_options", "logit_bias", "logprobs", "top_logprobs",
    "max_tokens", "temperature", "seed", "echo", "stop_token_ids", "prompt_logprobs", "tools", "tokens", "x",
])  # fmt: skip


@settings(
    max_examples=150, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(path=st.sampled_from([COMPLETIONS, CHAT, "/tokenize", "/detokenize"]),
       body=st.dictionaries(_fields, _values, max_size=6))  # fmt: skip
def test_fuzzed_bodies_are_answered_or_refused(http, path, body):
    content = json.dumps({"max_tokens": 2, **body}).encode("utf-8", "surrogatepass")
    response = http.post(path, content=content, headers=JSON)
    assert response.status_code in (200, 400, 404), response.text
    if response.status_code != 200:
        _error(response, response.status_code)


@settings(
    max_examples=150, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(body=st.binary(max_size=200))
def test_fuzzed_bytes_are_refused(http, body):
    _error(http.post(COMPLETIONS, content=body, headers=JSON))


def test_the_server_is_well_after_all_that(server, http):
    assert http.get("/health").json() == {"status": "ok"}
    assert server.llm.live == {}
    assert server.gate.live == frozenset()
