"""Keywords for the chat template reach it; those that are not the client's are refused by name; all are bounded."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import tiny_tokenizers

from epruntime import LLM
from epruntime.engine import chat_template
from epruntime.engine.processor import InputProcessor, Limits, size_of
from epruntime.engine.template_kwargs import MAX_CHARACTERS, MAX_KEYWORDS
from epruntime.engine.tokenizer import Tokenizer
from epruntime.errors import InvalidRequestError

#: as Qwen3's: thinking is on unless a keyword says otherwise
TEMPLATE = (
    "{{ messages[0].content }}{% if enable_thinking is defined and enable_thinking is false %}<think></think>"
    "{% endif %}{% for a in range(rounds | default(0)) %}{% for b in range(rounds) %}{% endfor %}{% endfor %}"
)
MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    return Tokenizer(tiny_tokenizers.save(tiny_tokenizers.byte_level(), tmp_path, template=TEMPLATE))


def _text(tokenizer: Tokenizer, keywords: Any) -> str | None:
    limits = Limits(max_model_len=4096, vocab_size=400, eos_token_ids=(2,))
    prompt = {"messages": MESSAGES, "chat_template_kwargs": keywords}
    return InputProcessor(tokenizer, limits).tokens(prompt, bounded=True)[0]


def test_the_template_reads_them(tokenizer: Tokenizer) -> None:
    for keywords in (None, {}, {"enable_thinking": True}, {"nobody_reads_this": [1, {"a": None}]}):
        assert _text(tokenizer, keywords) == "hi"
    assert _text(tokenizer, {"enable_thinking": False}) == "hi<think></think>"


@pytest.mark.parametrize(
    "name",
    [
        "tokenize", "add_generation_prompt", "return_dict", "return_tensors", "conversation", "conversations",
        "chat_template", "tools", "documents", "continue_final_message", "padding", "truncation", "max_length",
        "tokenizer_kwargs", "return_assistant_tokens_mask", "messages", "self", "bos_token", "eos_token",
    ],
)  # fmt: skip
def test_what_the_server_sets_is_refused_by_name(name: str, tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequestError, match="set by this server: leave it out") as caught:
        _text(tokenizer, {"enable_thinking": False, name: None})
    assert caught.value.field == f"chat_template_kwargs.{name}"


@pytest.mark.parametrize(
    ("keywords", "said"),
    [
        ([1], "must be an object"),
        ({1: 2}, "must be an object"),
        ({f"k{i}": i for i in range(MAX_KEYWORDS + 1)}, f"at most {MAX_KEYWORDS}"),
        ({"text": "x" * MAX_CHARACTERS}, f"at most {MAX_CHARACTERS} characters"),
        ({"a": object()}, "JSON"),
        ({"a": float("nan")}, "JSON"),
    ],
)
def test_bounds(keywords: Any, said: str, tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequestError, match=said) as caught:
        _text(tokenizer, keywords)
    assert caught.value.field == "chat_template_kwargs"


def test_the_deadline_holds_for_what_keywords_make_of_a_template(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_template, "TEMPLATE_S", 0.3)
    began = time.monotonic()
    with pytest.raises(InvalidRequestError, match=r"did not end .* within 0\.3 s"):
        _text(tokenizer, {"rounds": 99999})
    assert time.monotonic() - began < 60


def test_only_messages_have_them(tokenizer: Tokenizer) -> None:
    processor = InputProcessor(tokenizer, Limits(max_model_len=32, vocab_size=400, eos_token_ids=(2,)))
    for prompt in ({"prompt": "a", "chat_template_kwargs": {}}, {"chat_template_kwargs": {}}):
        with pytest.raises(InvalidRequestError, match="exactly one key"):
            processor.tokens(prompt)


def test_llm_chat_gives_them_to_every_conversation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LLM, "generate", lambda self, prompts, params, **options: prompts)
    llm = object.__new__(LLM)
    keywords = {"enable_thinking": False}
    for messages in (MESSAGES, [MESSAGES, MESSAGES]):
        prompts = llm.chat(messages, chat_template_kwargs=keywords)
        assert prompts == [{"messages": MESSAGES, "chat_template_kwargs": keywords}] * len(messages)


def test_the_size_of_a_chat_is_that_of_its_messages() -> None:
    assert size_of({"chat_template_kwargs": {"a": 1}, "messages": MESSAGES}) == size_of({"messages": MESSAGES}) > 0
