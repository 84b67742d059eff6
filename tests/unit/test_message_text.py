"""What a chat message's content may be: a string, or parts of type text, which are joined; all else is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny_tokenizers

from epruntime.client.wire import set_chat
from epruntime.engine.processor import size_of
from epruntime.engine.tokenizer import Tokenizer
from epruntime.errors import InvalidRequestError
from epruntime.proto import inference_pb2 as pb

TEMPLATE = "{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}"


def with_strings(path: Path) -> Tokenizer:
    return Tokenizer(tiny_tokenizers.save(tiny_tokenizers.byte_level(), path, template=TEMPLATE))


def test_content_in_parts_is_joined(tmp_path: Path) -> None:
    tokenizer = with_strings(tmp_path)
    parts = [{"type": "text", "text": "Two plus"}, {"type": "text", "text": "two", "cache_control": {}}, "is"]
    assert tokenizer.encode_chat([{"role": "user", "content": parts}])[0] == "[user] Two plus\ntwo\nis"
    message = pb.GenerateRequest()
    set_chat(message, [{"role": "user", "content": parts}])
    assert message.chat.messages[0].content == "Two plus\ntwo\nis"
    assert (
        size_of({"messages": [{"role": "user", "content": parts}]})
        - size_of({"messages": [{"role": "user", "content": ""}]})
        == 13
    )


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, r"messages\.0\.content.*a string, or a list of parts"),
        (5, "a string, or a list of parts"),
        ([5], r"content\.0=5: must be a part"),
        ([{"text": "hi"}], r"content\.0=.*must be a part"),
        (["a", {"type": "image_url"}], r"content\.1='image_url'.*nothing else is taken"),
        ([{"type": "text"}], "has a 'text', which is a string"),
        ([{"type": "text", "text": 5}], "has a 'text', which is a string"),
        (["a"] * (2**14 + 1), "at most 16384 parts"),
    ],
)
def test_content_that_is_none(content: Any, words: str, tmp_path: Path) -> None:
    chat = [{"role": "user", "content": content}]
    with pytest.raises(InvalidRequestError, match=words):
        with_strings(tmp_path).encode_chat(chat)
    with pytest.raises(InvalidRequestError, match=words):
        set_chat(pb.GenerateRequest(), chat)
