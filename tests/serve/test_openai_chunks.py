"""Chunks of a stream: the role first, then text in every chunk, then the end; log-probabilities wait for their text."""

from __future__ import annotations

import json

import httpx2
import pytest
from fake_llm import FakeLLM
from http_serving import HttpServing

#: "b", "bc", "bca" may each become the stop string that never comes, so that many tokens bring no text of their own
BODY = {"max_tokens": 40, "stop": ["bcax"], "seed": 1, "n": 2}
PATHS = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "abc"}]},
    "/v1/completions": {"prompt": "abc"},
}


@pytest.fixture(scope="module")
def http():
    with HttpServing(FakeLLM(delay_s=0.001)) as server, httpx2.Client(base_url=server.url, timeout=60) as client:
        yield client


def _text(path: str, choice: dict) -> str:
    return choice["delta"].get("content", "") if "chat" in path else choice["text"]


def _tokens(path: str, choice: dict) -> list[str]:
    found = choice["logprobs"]
    if found is None:
        return []
    return [one["token"] for one in found["content"]] if "chat" in path else found["tokens"]


@pytest.mark.parametrize("usage", [None, {"include_usage": True}, {"continuous_usage_stats": True}])
@pytest.mark.parametrize("logprobs", [False, True])
@pytest.mark.parametrize("path", PATHS)
def test_no_chunk_is_empty(http, path, logprobs, usage):
    wanted = {"logprobs": True if "chat" in path else 0} if logprobs else {}
    body = {**BODY, **PATHS[path], **wanted}
    whole = {choice["index"]: choice for choice in http.post(path, json=body).json()["choices"]}
    answer = http.post(path, json={**body, "stream": True, **({"stream_options": usage} if usage else {})}).text
    events = [line.removeprefix("data: ") for line in answer.splitlines() if line]
    assert events[-1] == "[DONE]"
    chunks = [json.loads(event) for event in events[:-1]]
    if usage is not None:
        assert chunks[-1]["usage"]["completion_tokens"] == 80
    by_index: dict[int, list[dict]] = {0: [], 1: []}
    for chunk in chunks:
        for choice in chunk["choices"]:
            by_index[choice["index"]].append(choice)
    for index, choices in by_index.items():
        if "chat" in path:
            opening = choices.pop(0)
            assert opening["delta"] == {"role": "assistant", "content": ""}
            assert whole[index]["message"]["content"] == "".join(_text(path, choice) for choice in choices)
        else:
            assert whole[index]["text"] == "".join(_text(path, choice) for choice in choices)
        assert all(_text(path, choice) for choice in choices[:-1])
        assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["length"]
        assert len(choices) > 3
        assert [token for choice in choices for token in _tokens(path, choice)] == _tokens(
            path, {**whole[index], "delta": {}}
        )
        if logprobs:
            assert sum(len(_tokens(path, choice)) for choice in choices) == 40
            if "chat" not in path:
                offsets = [offset for choice in choices for offset in choice["logprobs"]["text_offset"]]
                assert offsets == whole[index]["logprobs"]["text_offset"]
