"""Bodies that are nearly right: a request that works, with one part replaced, absent or added, anywhere inside."""

from __future__ import annotations

import copy
import json
from typing import Any

import httpx2
import pytest
from http_serving import HttpServing
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from serving import wait_until

FUZZ = settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

COMMON = {
    "model": "echo", "max_tokens": 3, "n": 2, "temperature": 0.5, "top_p": 0.9, "seed": 5, "stop": ["zz"],
    "presence_penalty": 0.5, "frequency_penalty": 0.5, "logit_bias": {"7": -3}, "user": "me", "top_k": 4, "min_p": 0.1,
    "repetition_penalty": 1.1, "stop_token_ids": [3], "min_tokens": 1, "ignore_eos": True, "skip_special_tokens": True,
    "stream": False,
}  # fmt: skip
BODIES: dict[str, list[dict[str, Any]]] = {
    "/v1/completions": [
        {**COMMON, "prompt": "ab", "logprobs": 2, "echo": False},
        {**COMMON, "prompt": [[97, 98], [99]]},
        {**COMMON, "prompt": ["a", "b"], "stream": True, "stream_options": {"include_usage": True}},
    ],
    "/v1/chat/completions": [
        {**COMMON, "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "ab"}],
         "logprobs": True, "top_logprobs": 2},
        {**COMMON, "messages": [{"role": "user", "content": [{"type": "text", "text": "ab"}]}], "stream": True},
    ],
    "/tokenize": [{"prompt": "ab"}, {"messages": [{"role": "user", "content": "ab"}]}],
    "/detokenize": [{"tokens": [97, 98]}],
}  # fmt: skip
ABSENT = object()
VALUES = st.one_of(
    st.sampled_from([ABSENT, None, True, False, 0, 1, -1, 2, 0.5, 21, 2**31, 2**63, 10**30, -0.0, 1e308, "", "a",
                     "\ud800", "\x00", [], {}, [None], {"a": 1}, "97", "echo"]),
    st.text(max_size=4), st.integers(-5, 200), st.lists(st.integers(-1, 120), max_size=3),
    st.dictionaries(st.text(max_size=4), st.integers(), max_size=2),
)  # fmt: skip


@pytest.fixture(scope="module")
def server():
    with HttpServing(max_message_mb=1) as running:
        yield running


@pytest.fixture(scope="module")
def http(server):
    with httpx2.Client(base_url=server.url, timeout=30) as client:
        yield client
        # whatever came before, it serves, and nothing is left of it
        answer = client.post("/v1/completions", json={"prompt": "ab", "max_tokens": 3})
        assert answer.json()["choices"][0]["text"] == "aba"
    wait_until(lambda: not server.llm.live and not server.gate.live, "every request has ended")


def _places(tree: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths of everything inside a JSON tree, and of one more entry in each object and list."""
    found = [path] if path else []
    if isinstance(tree, dict):
        for key, value in tree.items():
            found += _places(value, (*path, key))
        found.append((*path, "extra"))
    elif isinstance(tree, list):
        for index, value in enumerate(tree):
            found += _places(value, (*path, index))
    return found


def _put(tree: Any, path: tuple[Any, ...], value: Any) -> Any:
    tree = copy.deepcopy(tree)
    at = tree
    for key in path[:-1]:
        at = at[key]
    if value is ABSENT:
        if isinstance(at, list):
            del at[path[-1]]
        else:
            at.pop(path[-1], None)
    else:
        at[path[-1]] = value
    return tree


@st.composite
def requests(draw: Any) -> tuple[str, Any]:
    path = draw(st.sampled_from(sorted(BODIES)))
    body = draw(st.sampled_from(BODIES[path]))
    for _ in range(draw(st.integers(1, 2))):
        body = _put(body, draw(st.sampled_from(_places(body) or [("x",)])), draw(VALUES))
    return path, body


def _is_error(answer: Any) -> bool:
    return (
        answer.keys() == {"error"}
        and answer["error"].keys() == {"message", "type", "param", "code"}
        and bool(answer["error"]["message"])
    )


@FUZZ
@given(made=requests())
@example(made=("/v1/completions", {"prompt": "ab", "stream": True, "n": 128, "max_tokens": 2}))
@example(made=("/v1/completions", {"prompt": [97, 2**40]}))
@example(
    made=("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]})
)
@example(made=("/v1/chat/completions", {"messages": [{"role": "user", "content": None}], "stream": True}))
def test_nearly_right(http, made):
    path, body = made
    content = json.dumps(body).encode("utf-8", "surrogatepass")
    response = http.post(path, content=content, headers={"Content-Type": "application/json"})
    if response.status_code != 200:
        assert response.status_code in (400, 404, 422), (response.status_code, response.text)
        assert _is_error(response.json()), response.text
    elif response.headers["content-type"].startswith("text/event-stream"):
        events = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
        assert events[-1] == "[DONE]"
        for event in events[:-1]:
            assert not _is_error(json.loads(event)), event
    else:
        assert not _is_error(response.json())
