"""The tokenizer's text side: one BOS, chat templates from a file, a bound on length, use from two threads."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import tiny_tokenizers
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import normalizers, pre_tokenizers

from epruntime.engine import token_bound
from epruntime.engine.processor import InputProcessor, Limits
from epruntime.engine.token_bound import bound_of
from epruntime.engine.tokenizer import Tokenizer, load_tokenizer
from epruntime.errors import CheckpointError, ConfigError, InvalidRequestError
from epruntime.sampling_params import SamplingParams

BOS = 1
MESSAGES = [{"role": "user", "content": "Two plus two"}]


@pytest.fixture(params=["byte_level", "byte_fallback"])
def with_bos(request: pytest.FixtureRequest, tmp_path: Path) -> Tokenizer:
    return Tokenizer(tiny_tokenizers.save(getattr(tiny_tokenizers, request.param)(), tmp_path))


@pytest.mark.parametrize("text", ["the cat", "<s>the cat", "<s><s>the cat", "", "<s>", "<s> <s>"])
def test_one_bos_however_the_text_begins(text: str, with_bos: Tokenizer) -> None:
    ids = with_bos.encode(text)
    assert ids[0] == BOS
    assert ids[1:2] != [BOS]
    rest = text
    while rest.startswith("<s>"):
        rest = rest.removeprefix("<s>")
    once = with_bos.hf.encode("<s>" + rest, add_special_tokens=False) if rest != text else with_bos.hf.encode(text)
    assert ids == once, "all else is as transformers has it"


def test_one_bos_where_the_template_writes_it(with_bos: Tokenizer) -> None:
    text, ids = with_bos.encode_chat(MESSAGES)
    assert text == "<s><|user|>Two plus two</s>"
    assert ids == with_bos.hf.encode(text, add_special_tokens=False)
    assert ids.count(BOS) == 1


def test_a_template_that_writes_it_twice_gives_one(tmp_path: Path) -> None:
    path = tiny_tokenizers.save(
        tiny_tokenizers.byte_level(), tmp_path, template="{{ bos_token }}<s>{{ messages[0].content }}"
    )
    assert Tokenizer(path).encode_chat(MESSAGES)[1].count(BOS) == 1


def test_none_is_added_or_taken_where_the_tokenizer_adds_none(tmp_path: Path) -> None:
    path = tiny_tokenizers.save(tiny_tokenizers.byte_level(adds_bos=False), tmp_path)
    tokenizer = Tokenizer(path)
    assert BOS not in tokenizer.encode("the cat")
    assert tokenizer.encode("<s><s>the cat")[:3].count(BOS) == 2, "as written"
    assert tokenizer.encode_chat(MESSAGES)[1].count(BOS) == 1


def test_token_ids_are_left_alone(with_bos: Tokenizer) -> None:
    processor = InputProcessor(with_bos, Limits(max_model_len=32, vocab_size=400, eos_token_ids=(2,)))
    for ids in ([5, 6], [BOS, BOS, 5], [BOS]):
        for prompt in (ids, {"prompt_token_ids": ids}):
            assert processor.tokens(prompt) == (None, ids)


def test_chat_template_from_a_file(tmp_path: Path) -> None:
    path = tiny_tokenizers.save(tiny_tokenizers.byte_level(), tmp_path / "t")
    template = tmp_path / "mine.jinja"
    template.write_text("{% for m in messages %}[{{ m.role }}] {{ m.content }} é{% endfor %}", encoding="utf-8")
    tokenizer = load_tokenizer(path, required=True, chat_template=str(template))
    assert tokenizer is not None
    assert tokenizer.has_chat_template
    assert tokenizer.encode_chat(MESSAGES)[0] == "[user] Two plus two é"
    bare = tiny_tokenizers.save(tiny_tokenizers.byte_level(), tmp_path / "bare", template=None)
    without = Tokenizer(bare)
    assert not without.has_chat_template
    with pytest.raises(InvalidRequestError, match="no chat template"):
        without.encode_chat(MESSAGES)
    with_file = load_tokenizer(bare, required=True, chat_template=str(template))
    assert with_file is not None
    assert with_file.encode_chat(MESSAGES)[0].startswith("[user]")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "cannot be read"),
        (b"\xff\xfe\xfa", "cannot be read"),
        (b"line one\n{% for m in messages %}", "line 2"),
        (b"{{ messages[", "line 1"),
    ],
)
def test_a_template_file_that_is_none(content: bytes | None, words: str, tmp_path: Path) -> None:
    path = tiny_tokenizers.save(tiny_tokenizers.byte_level(), tmp_path / "t")
    file = tmp_path / "template"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match="chat_template.*" + words):
        load_tokenizer(path, required=True, chat_template=str(file))


def test_a_template_without_a_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "template").write_text("x")
    with pytest.raises(ConfigError, match="needs a tokenizer"):
        load_tokenizer(tmp_path, required=False, chat_template=str(tmp_path / "template"))
    with pytest.raises(CheckpointError):
        load_tokenizer(tmp_path, required=True, chat_template=str(tmp_path / "template"))


RAISING = [
    "{{ raise_exception('no') }}",
    "{{ 1 / 0 }}",
    "{{ messages[0].content.nope() }}",
    "{{ messages[0].content + 1 }}",
]


@pytest.mark.parametrize("template", RAISING)
def test_a_template_file_may_want_other_messages_than_the_check_has(template: str, tmp_path: Path) -> None:
    path = tiny_tokenizers.save(tiny_tokenizers.byte_level(), tmp_path / "t")
    file = tmp_path / "template"
    file.write_text("{% if messages[0].content == 'x' %}" + template + "{% endif %}: {{ messages[0].content }}")
    tokenizer = load_tokenizer(path, required=True, chat_template=str(file))
    assert tokenizer is not None
    assert tokenizer.encode_chat(MESSAGES)[0] == ": Two plus two"


@pytest.mark.parametrize("template", RAISING)
def test_whatever_a_template_raises_is_said_of_the_messages(template: str, tmp_path: Path) -> None:
    tokenizer = Tokenizer(tiny_tokenizers.save(tiny_tokenizers.byte_level(), tmp_path, template=template))
    with pytest.raises(InvalidRequestError, match="refuses these messages") as caught:
        tokenizer.encode_chat(MESSAGES)
    assert caught.value.field == "messages"


def test_one_thread_encodes_while_another_decodes(tmp_path: Path) -> None:
    """Also with a file that asks for padding and truncation, which the library takes back at the first call."""
    made = tiny_tokenizers.byte_level()
    made.enable_truncation(max_length=4)
    made.enable_padding(length=16)
    tokenizer = Tokenizer(tiny_tokenizers.save(made, tmp_path))
    text = "Once upon a time " * 200
    expected_ids = tokenizer.encode(text)
    assert len(expected_ids) > 200
    expected_text = tokenizer.decode(expected_ids, skip_special_tokens=True)
    wrong: list[Any] = []
    done = threading.Event()

    def encode() -> None:
        try:
            for i in range(60):
                if tokenizer.encode(text) != expected_ids or not tokenizer.encode_chat(MESSAGES)[1]:
                    wrong.append(i)
        except Exception as error:  # noqa: BLE001 - the test wants whatever it is
            wrong.append(error)
        finally:
            done.set()

    thread = threading.Thread(target=encode)
    thread.start()
    decoded = 0
    while not done.is_set():
        assert tokenizer.decode(expected_ids, skip_special_tokens=True) == expected_text
        decoded += 1
    thread.join()
    assert not wrong
    assert decoded > 0


TEXTS = st.one_of(
    st.text(max_size=60),
    st.text(alphabet=" abc▁<s>/|é", max_size=80),
    st.text(alphabet="x\x04\x06y", max_size=80),
    st.lists(st.sampled_from(["<s>", "</s>", "    ", "abc", "<|user|>", "\n", "<0x41>", "👍", "<tag>"])).map("".join),
)


def _without_letters(letters: str) -> Any:
    """Byte-level, with tokens of these letters gone from the vocabulary, as in published ones."""
    parts = json.loads(tiny_tokenizers.byte_level(adds_bos=False).to_str())
    parts["model"]["merges"] = []
    kept = [token for token in parts["model"]["vocab"] if not set(token) & set(letters)]
    parts["model"]["vocab"] = {token: i for i, token in enumerate(kept)}
    return tokenizers.Tokenizer.from_str(json.dumps(parts))


BOUNDED = {
    "byte_level_gaps": _without_letters("\u0104\u0106xé"),
    "byte_level": tiny_tokenizers.byte_level(),
    "byte_level_tag": tiny_tokenizers.byte_level(adds_bos=False, normalized=True, special=False),
    "byte_fallback": tiny_tokenizers.byte_fallback(),
    "metaspace": tiny_tokenizers.byte_fallback(normalizer=normalizers.Prepend("▁▁")),
}


@pytest.fixture(scope="module")
def bounded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    return {
        name: Tokenizer(tiny_tokenizers.save(made, tmp_path_factory.mktemp(name))) for name, made in BOUNDED.items()
    }


@settings(max_examples=200, deadline=None)
@given(text=TEXTS)
@example(text="<s>" * 40)
@example(text="\U0001f44d" * 30)
def test_the_bound_is_never_too_high(text: str, bounded: dict[str, Tokenizer]) -> None:
    for name, tokenizer in bounded.items():
        assert tokenizer.tokens_at_least(text) <= len(tokenizer.encode(text)), name


def test_the_bound_says_something(bounded: dict[str, Tokenizer]) -> None:
    for name, tokenizer in bounded.items():
        assert tokenizer.tokens_at_least("y" * 10_000) >= 10_000 / 20, name


def test_the_letters_of_bytes_are_the_library_s() -> None:
    assert set(token_bound._LETTERS) == set(pre_tokenizers.ByteLevel.alphabet())
    for byte in (0x04, 0x20, 0x41, 0x7F):
        (found,) = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(chr(byte))
        assert found[0] == token_bound._LETTERS[byte]
    (found,) = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str("é👍")
    assert found[0] == "".join(token_bound._LETTERS[byte] for byte in "é👍".encode())


@pytest.mark.parametrize(
    "made",
    [
        tiny_tokenizers.byte_level(lstrip=True),
        tiny_tokenizers.byte_level(rstrip=True),
        tiny_tokenizers.byte_fallback(normalizer=normalizers.NFC()),
        tiny_tokenizers.byte_fallback(normalizer=normalizers.Strip()),
        tiny_tokenizers.byte_fallback(normalizer=normalizers.Replace("aa", "a")),
        tiny_tokenizers.byte_fallback(byte_fallback=False, unk_token="<pad>"),
    ],
)
def test_no_bound_where_text_may_vanish(made: Any, tmp_path: Path) -> None:
    tokenizer = Tokenizer(tiny_tokenizers.save(made, tmp_path))
    assert bound_of(tokenizer.hf) is None
    assert tokenizer.tokens_at_least("x" * 10_000) == 0


def test_no_bound_where_the_pre_tokenizer_removes_spaces(tmp_path: Path) -> None:
    made = tiny_tokenizers.byte_fallback()
    made.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(), pre_tokenizers.WhitespaceSplit()])
    assert bound_of(Tokenizer(tiny_tokenizers.save(made, tmp_path)).hf) is None


@pytest.mark.parametrize("wrap", [lambda text: text, lambda text: {"prompt": text}])
def test_far_too_long_a_text_is_refused_without_tokenising_it(
    wrap: Any, bounded: dict[str, Tokenizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = bounded["byte_level"]
    processor = InputProcessor(tokenizer, Limits(max_model_len=64, vocab_size=400, eos_token_ids=(2,)))
    monkeypatch.setattr(tokenizer, "encode", lambda text: pytest.fail("tokenised"))
    with pytest.raises(InvalidRequestError, match=r"at least \d+ tokens.*max_model_len is 64.*shorten") as caught:
        processor.process(wrap("x" * 10**6), SamplingParams(), rid=1, request_id="r", arrival_time=0.0)
    assert caught.value.field == "prompt"
    assert len(str(caught.value)) < 300, "the text itself is not repeated"
