"""In which form a chat template reads text, and where it lies: whatever is sent is in the prompt, or refused."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import tiny_tokenizers
import transformers

from epruntime.engine.tokenizer import Tokenizer
from epruntime.errors import CheckpointError

TEXT = "The capital of France is"
STRINGS = "{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}"
#: as LLaVA's: it goes over parts, images first, and finds none in a string
PARTS = (
    "{% for m in messages %}[{{ m.role }}] "
    "{% for part in m.content | selectattr('type', 'equalto', 'image') %}<image>{% endfor %}"
    "{% for part in m.content | selectattr('type', 'equalto', 'text') %}{{ part.text }} {% endfor %}{% endfor %}"
)
#: refuses a string instead of dropping it
ONLY_PARTS = (
    "{% for m in messages %}{% if m.content is string %}{{ raise_exception('parts, please') }}{% endif %}"
    "{% for part in m.content %}{{ part.text }}{% endfor %}{% endfor %}"
)
EITHER = (
    "{% for m in messages %}{% if m.content is string %}={{ m.content }}{% else %}"
    "{% for part in m.content %}+{{ part.text }}{% endfor %}{% endif %}{% endfor %}"
)


#: a loop over a message's parts
TEXTS = "{% for part in m.content if part.type == 'text' %}{{ part.text }}{% endfor %}"
CHAT = [
    {"role": "system", "content": "be short"},
    {"role": "user", "content": "two plus two"},
    {"role": "assistant", "content": "four"},
    {"role": "user", "content": "and three"},
]


def by_role(first: str, role: str, then: str) -> str:
    return f"{{% for m in messages %}}{{% if m.role {role} %}}{first}{{% else %}}{then}{{% endif %}}{{% endfor %}}"


def with_template(template: str | None, path: Path) -> Tokenizer:
    return Tokenizer(tiny_tokenizers.save(tiny_tokenizers.byte_level(), path, template=template))


def user(content: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": content}]


@pytest.mark.parametrize(
    ("template", "prompt"),
    [(STRINGS, f"[user] {TEXT}"), (PARTS, f"[user] {TEXT} "), (ONLY_PARTS, TEXT), (EITHER, f"={TEXT}")],
    ids=["strings", "parts", "only-parts", "either"],
)
def test_text_is_in_the_prompt(template: str, prompt: str, tmp_path: Path) -> None:
    tokenizer = with_template(template, tmp_path)
    assert tokenizer.encode_chat(user(TEXT))[0] == prompt
    hf = transformers.AutoTokenizer.from_pretrained(tmp_path)
    given = [{"role": "user", "content": [{"type": "text", "text": TEXT}]}] if "part" in template else user(TEXT)
    if template != EITHER:  # which may write the two forms differently: strings come first
        assert hf.apply_chat_template(given, tokenize=False, add_generation_prompt=True) == prompt


@pytest.mark.parametrize(
    "template",
    [
        "{% if messages[0].role != 'system' %}{{ raise_exception('system first') }}{% endif %}"
        + by_role(TEXTS, "!= ''", ""),
        "{% if messages | length < 2 %}{{ raise_exception('two at least') }}{% endif %}" + by_role(TEXTS, "!= ''", ""),
        by_role(TEXTS, "== 'system'", "{{ m.content if m.content is string else m.content[0].text }}"),
        by_role("{{ m.content[0].text }}", "== 'assistant'", "{{ m.content }}"),
        by_role("{{ m.content }}", "== 'system'", TEXTS),
        by_role("{{ 'A: ' + m.content }}", "== 'assistant'", TEXTS),
        by_role("{{ m.content }}", "== 'user'", TEXTS),
    ],
    ids=["system-first", "two-at-least", "system", "assistant", "all-but-system", "all-but-assistant", "all-but-user"],
)
def test_each_role_has_a_form_of_its_own(template: str, tmp_path: Path) -> None:
    prompt, _ = with_template(template, tmp_path).encode_chat(CHAT)
    assert prompt.replace("A: ", "") == "".join(message["content"] for message in CHAT)


@pytest.mark.parametrize("change", ["upper", "title", "trim", "replace('a', 'b')"])
def test_parts_whose_text_is_altered(change: str, tmp_path: Path) -> None:
    template = by_role(TEXTS.replace("part.text", f"part.text | {change}"), "!= ''", "")
    hf = with_template(template, tmp_path / "parts").hf
    expected = hf.apply_chat_template(
        [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in CHAT], tokenize=False
    )
    assert len(expected) == len("".join(message["content"] for message in CHAT))
    assert with_template(template, tmp_path / "again").encode_chat(CHAT)[0] == expected


def test_a_template_file_that_reads_parts(tmp_path: Path) -> None:
    path = tiny_tokenizers.save(tiny_tokenizers.byte_level(), tmp_path, template=STRINGS)
    assert Tokenizer(path, template=PARTS).encode_chat(user(TEXT))[0] == f"[user] {TEXT} "


def test_a_template_that_wants_other_messages_gets_strings(tmp_path: Path) -> None:
    wants_system = "{% if messages[0].role != 'system' %}{{ raise_exception('no system') }}{% endif %}" + STRINGS
    chat = [{"role": "system", "content": "be short"}, *user(TEXT)]
    assert with_template(wants_system, tmp_path).encode_chat(chat)[0] == f"[system] be short[user] {TEXT}"


def test_a_template_that_drops_text_is_told_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="epruntime.engine.tokenizer"):
        with_template(STRINGS, tmp_path / "a")
        with_template(PARTS, tmp_path / "b")
        assert not caplog.messages
        with_template("Hello.", tmp_path / "c")
    assert ["shows no text" in message for message in caplog.messages] == [True]


def test_the_template_of_a_processor(tmp_path: Path) -> None:
    tiny_tokenizers.save(tiny_tokenizers.byte_level(), tmp_path, template=None)
    file = tmp_path / "chat_template.json"
    file.write_text(json.dumps({"chat_template": PARTS}))
    tokenizer = Tokenizer(tmp_path)
    assert tokenizer.has_chat_template
    assert tokenizer.encode_chat(user(TEXT))[0] == f"[user] {TEXT} "
    # the tokenizer's own goes before it
    tiny_tokenizers.save(tiny_tokenizers.byte_level(), tmp_path, template=STRINGS)
    assert Tokenizer(tmp_path).encode_chat(user(TEXT))[0] == f"[user] {TEXT}"


@pytest.mark.parametrize("content", [b"{", b"[]", b"{}", b'{"chat_template": 3}', b"\xff"])
def test_a_damaged_template_of_a_processor(content: bytes, tmp_path: Path) -> None:
    tiny_tokenizers.save(tiny_tokenizers.byte_level(), tmp_path, template=None)
    (tmp_path / "chat_template.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"chat_template\.json"):
        Tokenizer(tmp_path)
