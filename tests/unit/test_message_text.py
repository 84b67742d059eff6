"""What a chat message may be: a role, and a string or parts of type text, which are joined; all else is refused."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_tokenizers

from epruntime.client.wire import set_chat
from epruntime.engine.llm import LLM
from epruntime.engine.processor import size_of
from epruntime.engine.tokenizer import Tokenizer
from epruntime.errors import InvalidRequestError
from epruntime.proto import inference_pb2 as pb
from epruntime.serve.openai.prompts import chat_of

TEMPLATE = "{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}"
TWO = [{"type": "text", "text": "Two plus"}, {"type": "text", "text": "two", "cache_control": {}}, "is"]


def by_client(messages: Any) -> Any:
    message = pb.GenerateRequest()
    set_chat(message, messages)
    return message.chat.messages[0].content


def by_http(messages: Any) -> Any:
    return chat_of(messages, None)["messages"][0]["content"]


@pytest.fixture(params=["LLM", "client", "HTTP"])
def taken(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[Any], str]:
    """The text of the first message, as each way in has it."""
    tokenizer = Tokenizer(tiny_tokenizers.save(tiny_tokenizers.byte_level(), tmp_path, template=TEMPLATE))
    ways = {"LLM": lambda chat: tokenizer.encode_chat(chat)[0].partition("] ")[2], "client": by_client, "HTTP": by_http}
    return ways[request.param]


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    "content",
    [
        TWO,
        tuple(TWO),
        [UserDict(TWO[0]), "two", "is"],
        [{**TWO[0], "annotations": [], "image_url": None}, "two", "is"],
    ],
    ids=["list", "tuple", "mapping", "idle-keys"],
)
def test_content_in_parts_is_joined(content: Any, taken: Callable[[Any], str]) -> None:
    assert taken(user(content)) == "Two plus\ntwo\nis"
    assert size_of({"messages": user(content)}) - size_of({"messages": user("")}) == 13


@pytest.mark.parametrize(
    ("content", "field", "words"),
    [
        (None, "", "a string, or a list of parts"),
        (5, "", "a string, or a list of parts"),
        ([], "", "has no parts"),
        ([5], ".0", "=5: must be a part"),
        ([{"text": "hi"}], ".0", "must be a part"),
        (["a", {"type": "image_url"}], ".1", "='image_url'.*nothing else is taken"),
        ([{"type": "text"}], ".0", "has a 'text', which is a string"),
        ([{"type": "text", "text": 5}], ".0", "has a 'text', which is a string"),
        ([{"type": "text", "text": "look", "image_url": {"url": "x"}}], ".0.image_url", "is not taken"),
        ([{"type": "text", "text": "look", "image": ""}], ".0.image", "is not taken"),
        (["a"] * (2**14 + 1), "", "at most 16384 parts"),
        (nested(1500), ".0", "=<list>: must be a part"),
        ({"a": nested(1500)}, "", "=<dict>: must be a string"),
        ("a\ud800", "", "not valid Unicode text.*position 1"),
        (["a", "\udc00"], ".1", "not valid Unicode text"),
        ([{"type": "text", "text": "\ud83d"}], ".0.text", "not valid Unicode text"),
    ],
)
def test_content_that_is_none(content: Any, field: str, words: str, taken: Callable[[Any], str]) -> None:
    with pytest.raises(InvalidRequestError, match=words) as caught:
        taken([*user("hi"), *user(content)])
    assert caught.value.field == f"messages.1.content{field}"


@pytest.mark.parametrize("way", ["LLM", "client"])
@pytest.mark.parametrize(
    ("message", "field"),
    [
        (None, ""),
        ("hi", ""),
        ({"content": "hi"}, ""),
        ({"role": nested(1500)}, ""),
        ({"role": "u\ud800", "content": "hi"}, ".role"),
        ({"role": "user", "content": None}, ".content"),
    ],
)
def test_a_message_that_is_none(way: str, message: Any, field: str, tmp_path: Path) -> None:
    tokenizer = Tokenizer(tiny_tokenizers.save(tiny_tokenizers.byte_level(), tmp_path, template=TEMPLATE))
    with pytest.raises(InvalidRequestError) as caught:
        (by_client if way == "client" else tokenizer.encode_chat)([*user("hi"), message])
    assert caught.value.field == f"messages.1{field}"


def test_a_message_may_be_any_mapping(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chat: Any = [UserDict(role="user", content="hi")]
    tokenizer = Tokenizer(tiny_tokenizers.save(tiny_tokenizers.byte_level(), tmp_path, template=TEMPLATE))
    assert tokenizer.encode_chat(chat)[0] == "[user] hi"
    assert by_client(chat) == "hi"
    monkeypatch.setattr(LLM, "generate", lambda self, prompts, params, **options: prompts)
    assert len(LLM.chat(object.__new__(LLM), [*chat, *chat])) == 1, "one conversation"
