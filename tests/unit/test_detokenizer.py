"""Incremental decoding: equal to decoding at once, never half a character."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models
from transformers import PreTrainedTokenizerFast

from epruntime.engine.detokenizer import Detokenizer, TokenTexts
from epruntime.engine.tokenizer import Tokenizer
from epruntime.testing.tiny_tokenizer import save_tokenizer


def _byte_level() -> Tokenizer:
    with tempfile.TemporaryDirectory() as directory:
        return Tokenizer(save_tokenizer(Path(directory), ["the quick brown fox", "over the lazy dog"], vocab_size=300))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return _byte_level()


def _pieces(tokenizer: Tokenizer, prompt: str, text: str) -> list[str]:
    detokenizer = Detokenizer(TokenTexts(tokenizer), tokenizer.encode(prompt), skip_special_tokens=True)
    return [detokenizer.push(token) for token in tokenizer.encode(text)]


@pytest.mark.parametrize("text", ["the fox", "你好,世界", "a👩‍👩‍👧b", "naïve — café", "\n\n  x", "é"])
def test_pieces_join_to_the_text_and_hold_no_half_character(tokenizer: Tokenizer, text: str) -> None:
    pieces = _pieces(tokenizer, "the", text)
    assert "".join(pieces) == text
    assert not any("�" in piece for piece in pieces)


@settings(max_examples=150, deadline=None)
@given(text=st.text(max_size=40).filter(lambda t: "�" not in t))
def test_any_text_survives(text: str) -> None:
    tokenizer = _CACHED
    assert "".join(_pieces(tokenizer, "the dog", text)) == text


def test_a_character_that_never_ends_is_dropped(tokenizer: Tokenizer) -> None:
    whole = tokenizer.encode("x世")
    detokenizer = Detokenizer(TokenTexts(tokenizer), [1], skip_special_tokens=True)
    assert "".join(detokenizer.push(token) for token in whole[:-1]) == "x"


def test_bytes_that_are_tokens_of_their_own() -> None:
    """As in sentencepiece models: each byte of an unfinished character shows as a replacement character of its own."""
    letters = {letter: i for i, letter in enumerate("ab")}
    raw = RawTokenizer(models.BPE(letters | {f"<0x{i:02X}>": 2 + i for i in range(256)}, [], byte_fallback=True))
    raw.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    with tempfile.TemporaryDirectory() as directory:
        PreTrainedTokenizerFast(tokenizer_object=raw).save_pretrained(directory)
        tokenizer = Tokenizer(directory)
    ids = [2 + byte for byte in "👍".encode()]
    assert tokenizer.decode(ids[:3], skip_special_tokens=True) == "���"
    detokenizer = Detokenizer(TokenTexts(tokenizer), [0], skip_special_tokens=True)
    assert [detokenizer.push(token) for token in [0, *ids, 1]] == ["a", "", "", "", "👍", "b"]


def test_endless_invalid_bytes_do_not_grow_the_window(tokenizer: Tokenizer) -> None:
    continuation = tokenizer.encode("世")[-1]
    detokenizer = Detokenizer(TokenTexts(tokenizer), [1], skip_special_tokens=True)
    for _ in range(500):
        detokenizer.push(continuation)
        assert len(detokenizer._ids) <= 140
    # and good text behind them still comes out
    assert "".join(detokenizer.push(t) for t in tokenizer.encode(" the fox")).endswith("the fox")


def test_special_tokens_are_left_out_on_request(tokenizer: Tokenizer) -> None:
    eos = tokenizer.hf.eos_token_id
    for skip, expected in ((True, "ab"), (False, "a<eos>b")):
        detokenizer = Detokenizer(TokenTexts(tokenizer), [1], skip_special_tokens=skip)
        ids = [*tokenizer.encode("a"), eos, *tokenizer.encode("b")]
        assert "".join(detokenizer.push(token) for token in ids) == expected


_CACHED = _byte_level()
