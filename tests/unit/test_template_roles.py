"""Roles and places that a chat template does not know: what is sent is in the prompt, or refused by name."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import tiny_tokenizers

from epruntime.engine import chat_template
from epruntime.engine.tokenizer import Tokenizer
from epruntime.errors import InvalidRequestError

#: a loop over a message's parts
TEXTS = "{% for part in m.content if part.type == 'text' %}{{ part.text }}{% endfor %}"
#: as Qwen3's: skips roles that it does not know
KNOWN = (
    "{% for m in messages %}{% if m.role in ('system', 'user', 'assistant') %}<{{ m.role }}>{{ m.content }}"
    "{% elif m.role == 'tool' %}<user>({{ m.content }}){% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
#: as Mistral's and Gemma 3's: the system's message, the first, goes with a user's
FIRST_SYSTEM = (
    "{% set chat = messages %}{% set system = '' %}{% if messages[0].role == 'system' %}"
    "{% set system = messages[0].content %}{% set chat = messages[1:] %}{% endif %}{% for m in chat %}"
    "{% if m.role == 'user' %}<user>{% if loop.last %}{{ system }}{% endif %}{{ m.content }}"
    "{% elif m.role == 'assistant' %}<assistant>{{ m.content }}{% endif %}{% endfor %}"
)
NO_SYSTEM = (
    "{% for m in messages %}{% if m.role not in ('user', 'assistant') %}{{ raise_exception('what role is that?') }}"
    "{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}"
)
STRICT = NO_SYSTEM.replace("('user',", "('system', 'user',")
#: as gpt-oss's: knows the developer, who is the system, too
DEVELOPER = FIRST_SYSTEM.replace("role == 'system'", "role in ('system', 'developer')")


def by_role(first: str, role: str, then: str) -> str:
    chosen = f"{{% if m.role == '{role}' %}}{first}{{% else %}}{then}{{% endif %}}"
    return "{% for m in messages %}<{{ m.role }}>" + chosen + "{% endfor %}"


def prompt(template: str, path: Path, *messages: tuple[str, str], **keywords: object) -> str:
    tokenizer = Tokenizer(tiny_tokenizers.save(tiny_tokenizers.byte_level(), path, template=template))
    chat = [{"role": role, "content": content} for role, content in messages]
    return tokenizer.encode_chat(chat, keywords=keywords)[0]


@pytest.mark.parametrize(
    ("template", "messages", "number"),
    [
        (KNOWN, [("User", "two plus two")], 0),
        (KNOWN, [("user", "two plus two"), ("function", "4")], 1),
        (KNOWN, [("user", "<user>"), ("", "user"), ("user", "")], 1),
        (FIRST_SYSTEM, [("system", "be short")], 0),
        (FIRST_SYSTEM, [("system", "be short"), ("system", "be kind"), ("user", "hi")], 1),
        (FIRST_SYSTEM, [("user", "hi"), ("system", "be short"), ("user", "hi")], 1),
        (FIRST_SYSTEM, [("developer", "be short"), ("developer", "be kind"), ("user", "hi")], 1),
        (FIRST_SYSTEM, [("user", "hi"), ("tool", "4")], 1),
        (DEVELOPER, [("developer", "be short"), ("system", "be kind"), ("user", "hi")], 1),
    ],
)
def test_a_message_that_is_not_shown_is_refused(
    template: str, messages: list[tuple[str, str]], number: int, tmp_path: Path
) -> None:
    role = messages[number][0]
    with pytest.raises(InvalidRequestError, match="chat template shows nothing of a message with this role") as caught:
        prompt(template, tmp_path, *messages)
    assert caught.value.field == f"messages.{number}.role"
    assert str(caught.value).startswith(f"messages.{number}.role={role!r}: ")
    assert ("(it is given to it as 'system')" in str(caught.value)) == (role == "developer")


@pytest.mark.parametrize(
    ("template", "messages", "expected"),
    [
        (KNOWN, [("user", "hi"), ("tool", "4")], "<user>hi<user>(4)<assistant>"),
        (KNOWN, [("user", " \n"), ("function", " \n")], "<user> \n<assistant>"),
        (KNOWN, [("system", "hi"), ("user", "hi"), ("assistant", "hi")], "<system>hi<user>hi<assistant>hi<assistant>"),
        (FIRST_SYSTEM, [("system", "Short! "), ("user", "hi")], "<user>Short! hi"),
        (by_role("{{ m.content | upper | trim }}", "user", "?"), [("user", " hi\n")], "<user>HI"),
        (by_role("{{ m.content.split('</think>')[-1] }}", "assistant", "{{ m.content }}"),
         [("user", "a"), ("assistant", "<think>b</think>c")], "<user>a<assistant>c"),
        ("{{ messages | tojson }}", [("user", "hi")], '[{"role": "user", "content": "hi"}]'),
    ],
)  # fmt: skip
def test_what_is_shown_is_taken(template: str, messages: list[tuple[str, str]], expected: str, tmp_path: Path) -> None:
    assert prompt(template, tmp_path, *messages) == expected


@pytest.mark.parametrize("template", [KNOWN, STRICT, FIRST_SYSTEM])
def test_the_developer_is_the_system_where_only_that_is_known(
    template: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="epruntime.engine.tokenizer"):
        as_developer = prompt(template, tmp_path / "a", ("developer", "be short"), ("user", "hi"))
    assert [message for message in caplog.messages if "does not know the role 'developer'" in message]
    assert as_developer == prompt(template, tmp_path / "b", ("system", "be short"), ("user", "hi"))
    assert "be short" in as_developer


def test_the_developer_is_itself_where_it_is_known(tmp_path: Path) -> None:
    template = by_role("{{ m.content }}", "user", "{{ m.content }}")
    assert prompt(template, tmp_path / "a", ("developer", "a"), ("user", "b")) == "<developer>a<user>b"
    assert prompt(DEVELOPER, tmp_path / "b", ("developer", "a"), ("user", "b")) == "<user>ab"
    with pytest.raises(InvalidRequestError, match="what role is that"):
        prompt(NO_SYSTEM, tmp_path / "c", ("developer", "a"), ("user", "b"))


@pytest.mark.parametrize("role", ["tool", "developer", "function", "ipython"])
@pytest.mark.parametrize(("first", "then"), [(TEXTS, "{{ m.content }}"), ("{{ m.content }}", TEXTS), (TEXTS, TEXTS)])
@pytest.mark.parametrize("odd", ["user", "system", "tool", "developer"])
def test_further_roles_have_a_form_of_their_own(role: str, odd: str, first: str, then: str, tmp_path: Path) -> None:
    told = prompt(by_role(first, odd, then), tmp_path, ("system", "a"), ("user", "b"), (role, "c"))
    assert told == f"<system>a<user>b<{role}>c"


def test_a_role_that_no_trial_shows_has_parts_where_the_others_have(tmp_path: Path) -> None:
    """Here a tool may speak only after two turns."""
    template = "{% if messages | length < 6 and 'tool' in messages | map(attribute='role') %}{{ 1 / 0 }}{% endif %}"
    chat = [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"), ("tool", "e"), ("user", "f")]
    told = prompt(template + by_role(TEXTS, "", TEXTS), tmp_path, *chat)
    assert told == "".join(f"<{role}>{content}" for role, content in chat)


def test_a_list_of_parts_that_is_printed_shows_no_text(tmp_path: Path) -> None:
    template = by_role("{% if loop.last %}" + TEXTS + "{% else %}{{ m.content }}{% endif %}", "user", "{{ m.content }}")
    assert prompt(template, tmp_path / "a", ("system", "a"), ("user", "b")) == "<system>a<user>b"
    with pytest.raises(InvalidRequestError, match=r"^messages\.0\.role='user'"):
        prompt(template, tmp_path / "b", ("user", "a"), ("assistant", "b"), ("user", "c"))


@pytest.mark.parametrize("before", ["{{ strftime_now('%H:%M:%S.%f') }}", 'Tools answer as {"type": "text"}.'])
def test_what_else_a_template_writes_does_not_matter(before: str, tmp_path: Path) -> None:
    told = prompt(before + by_role(TEXTS, "", TEXTS), tmp_path, ("system", "be short"), ("user", "hi"))
    assert told.endswith("<system>be short<user>hi")


def test_keywords_count_for_what_is_shown(tmp_path: Path) -> None:
    template = by_role("{% if show_tools %}{{ m.content }}{% endif %}", "tool", "{{ m.content }}")
    chat = [("user", "a"), ("tool", "b")]
    assert prompt(template, tmp_path, *chat, show_tools=True) == "<user>a<tool>b"
    with pytest.raises(InvalidRequestError, match=r"^messages\.1\.role='tool'"):
        prompt(template, tmp_path, *chat)


def test_a_template_that_refuses_marks_is_believed(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}{% if m.content != 'yes' %}{{ raise_exception('yes!') }}{% endif %}{% endfor %}fine"
    )
    assert prompt(template, tmp_path, ("user", "yes")) == "fine"


@pytest.mark.parametrize(
    ("altered", "expected"),
    [("m.content[:8]", "<user>two plus"), ("m.content|list|join(' ')", "<user>t w o   p l u s")],
)
def test_a_template_that_alters_texts_is_believed(
    altered: str, expected: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="epruntime.engine.tokenizer"):
        told = prompt(f"{{% for m in messages %}}<{{{{ m.role }}}}>{{{{ {altered} }}}}{{% endfor %}}", tmp_path,
                      ("user", "two plus"))  # fmt: skip
    assert told == expected
    assert ["alters texts" in message for message in caplog.messages] == [True]


def test_a_template_that_shows_nothing_at_all(tmp_path: Path) -> None:
    for template in ("Hello.", "{{ strftime_now('%H:%M:%S.%f') }}"):
        with pytest.raises(InvalidRequestError, match=r"^messages\.0\.role='user'"):
            prompt(template, tmp_path / str(len(template)), ("user", "hi"))


def test_one_deadline_holds_for_both_renderings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    loops = "{% if m.content != 'yes' %}{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    template = "{% for m in messages %}" + loops + "{% endif %}{{ m.content }}{% endfor %}"
    monkeypatch.setattr(chat_template, "TEMPLATE_S", 0.3)
    with caplog.at_level(logging.WARNING, logger="epruntime.engine.tokenizer"):
        assert prompt(template, tmp_path, ("user", "yes")) == "yes"
    assert "a chat was taken unchecked" in caplog.messages[-1]
