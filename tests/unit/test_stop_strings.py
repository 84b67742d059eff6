"""Stop strings: found across token boundaries as in the whole text, and never leaked."""

from __future__ import annotations

import asyncio
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epruntime.engine.detokenizer import StopMatcher, TokenTexts
from epruntime.engine.processor import InputProcessor, Limits
from epruntime.engine.request_state import RequestState
from epruntime.engine.text_thread import TextThread
from epruntime.engine.token_updates import TokenUpdate
from epruntime.engine.tokenizer import Tokenizer
from epruntime.plan import FINISH_LENGTH, FINISH_NONE, FINISH_STOP
from epruntime.sampling_params import SamplingParams
from epruntime.testing.tiny_tokenizer import save_tokenizer

EOS = 0
#: few characters, of one to four bytes, so that stop strings occur
ALPHABET = "ab\n世é👍"


def _tokenizer() -> Tokenizer:
    """One whose tokens hold single bytes, characters, and several characters."""
    texts = ["ab\nab a世bé", "é世 aab\n\nb👍", "abab世é"] * 9
    with tempfile.TemporaryDirectory() as directory:
        return Tokenizer(save_tokenizer(Path(directory), texts, words=False))


TOKENIZER = _tokenizer()
VOCAB = len(TOKENIZER.hf)


@dataclass
class Outcome:
    text: str
    finish_reason: str | None
    stop_reason: int | str | None
    num_tokens: int


def _generate(ids: list[int], params: SamplingParams, last: int = FINISH_LENGTH) -> tuple[Outcome, list[str]]:
    """What a reader gets of a sequence that samples `ids`, and the text in the pieces in which it came."""

    async def body() -> tuple[Outcome, list[str]]:
        processor = InputProcessor(TOKENIZER, Limits(max_model_len=4096, vocab_size=VOCAB, eos_token_ids=(EOS,)))
        state = RequestState("r", params, (1,), arrival_time=0.0)
        state.admit(
            processor.process([5], params, rid=1, request_id="r", arrival_time=0.0),
            TokenTexts(TOKENIZER),
        )
        pieces, count, thread = [], 0, TextThread()
        for i, token in enumerate(ids):
            finish = last if i == len(ids) - 1 else FINISH_NONE
            state.update(state.sequences[0], TokenUpdate(1, token, finish))
            delta = await state.next(thread)
            (output,) = delta.outputs
            pieces.append(output.text)
            count += len(output.token_ids)
            if delta.finished:
                return Outcome("".join(pieces), output.finish_reason, output.stop_reason, count), pieces
        raise AssertionError("it did not end")

    return asyncio.run(body())


def _whole(ids: list[int], skip: bool) -> str:
    """The text of ids at once. A last character of which bytes are missing is not there."""
    return TOKENIZER.decode(ids, skip_special_tokens=skip).rstrip("�")


def _expected(ids: list[int], params: SamplingParams) -> Outcome:
    """By decoding everything anew after each token: the first stop string that is complete ends the text before it."""
    skip, armed_from = params.skip_special_tokens, 0
    for n in range(1, len(ids) + 1):
        text = _whole(ids[:n], skip)
        if n <= params.min_tokens:
            armed_from = len(text)
            continue
        found = []
        for stop in params.stop:
            ends = (at + len(stop) for at in range(len(text)) if text.startswith(stop, at))
            found += [(end, end - len(stop), stop) for end in ends if end > armed_from]
        if found:
            _, begin, stop = min(found)
            return Outcome(text[:begin], "stop", stop, n)
    return Outcome(_whole(ids, skip), "length", None, len(ids))


def _valid(ids: list[int]) -> bool:
    """No bytes that make no character in the middle (what those become depends on what a decoder has seen)."""
    return "�" not in _whole(ids, False) and "�" not in _whole(ids, True)


TEXTS = st.text(alphabet=ALPHABET, min_size=1, max_size=24)
STOPS = st.lists(st.text(alphabet=ALPHABET, min_size=1, max_size=4), min_size=1, max_size=3)


@st.composite
def _token_ids(draw: st.DrawFn) -> list[int]:
    """Ids of pieces of text, each encoded by itself, with special tokens between."""
    ids: list[int] = []
    for text in draw(st.lists(TEXTS, min_size=1, max_size=4)):
        ids += TOKENIZER.hf.encode(text, add_special_tokens=False)
        if draw(st.booleans()):
            ids.append(TOKENIZER.hf.bos_token_id)
    # as if the output ended by length, perhaps within a character
    return ids[: draw(st.integers(1, len(ids)))]


@settings(max_examples=400, deadline=None)
@given(ids=_token_ids().filter(_valid), stops=STOPS, min_tokens=st.integers(0, 6), skip=st.booleans())
def test_as_in_the_whole_text(ids: list[int], stops: list[str], min_tokens: int, skip: bool) -> None:
    params = SamplingParams(stop=stops, min_tokens=min_tokens, max_tokens=None, skip_special_tokens=skip)
    outcome, pieces = _generate(ids, params)
    expected = _expected(ids, params)
    assert outcome == expected
    for i in range(len(pieces)):  # what was shown was right at any time
        assert expected.text.startswith("".join(pieces[: i + 1]))


@settings(max_examples=300, deadline=None)
@given(
    pieces=st.lists(st.text(alphabet="abc", max_size=4), max_size=12),
    stops=st.lists(st.text(alphabet="abc", min_size=1, max_size=5), min_size=1, max_size=4),
)
def test_the_outcome_does_not_depend_on_how_the_text_is_cut(pieces: list[str], stops: list[str]) -> None:
    def outcome(parts: list[str]) -> tuple[str, str | None]:
        matcher, shown = StopMatcher(stops), ""
        for part in parts:
            text, found = matcher.push(part)
            shown += text
            assert not any(stop in shown for stop in stops)
            if found is not None:
                return shown, found
        return shown + matcher.flush(), None

    whole = "".join(pieces)
    assert outcome(pieces) == outcome(list(whole)) == outcome([whole])


def test_what_cannot_be_a_stop_string_is_shown_at_once() -> None:
    matcher = StopMatcher(["END"])
    assert matcher.push("abcE") == ("abc", None)
    assert matcher.push("x") == ("Ex", None)
    assert matcher.push("EN") == ("", None)
    assert matcher.push("D!") == ("", "END")


@pytest.mark.parametrize(
    ("pieces", "stops", "expected"),
    [
        (["a stop in", "side"], ["p i"], ("a sto", "p i")),
        (["xEN", "EN", "D"], ["END"], ("xEN", "END")),  # a match begins within a part of one
        (["aab", "aac"], ["aabaac", "aac"], ("", "aabaac")),  # both end together: the one that begins first
        (["abcdef"], ["abcdef", "cd"], ("ab", "cd")),  # the one that is complete first
        (["ab", "cdef"], ["abcdef", "cd"], ("ab", "cd")),
        (["STO"], ["STOP"], ("STO", None)),  # ended by length while a part of one was held back
    ],
)
def test_by_hand(pieces: list[str], stops: list[str], expected: tuple[str, str | None]) -> None:
    matcher, shown, found = StopMatcher(stops), "", None
    for piece in pieces:
        text, found = matcher.push(piece)
        shown += text
        if found is not None:
            break
    assert (shown + ("" if found else matcher.flush()), found) == expected


def test_the_end_of_sequence_releases_what_was_held_back() -> None:
    ids = [*TOKENIZER.hf.encode("ab", add_special_tokens=False), EOS]
    outcome, _ = _generate(ids, SamplingParams(stop=["abX"], max_tokens=None), last=FINISH_STOP)
    assert outcome == Outcome("ab", "stop", None, len(ids))


def test_a_stop_string_in_the_last_token_is_the_reason_and_not_the_length() -> None:
    ids = TOKENIZER.hf.encode("aXb", add_special_tokens=False)
    outcome, _ = _generate(ids, SamplingParams(stop=["b"], max_tokens=None), last=FINISH_LENGTH)
    assert (outcome.text, outcome.finish_reason, outcome.stop_reason) == ("aX", "stop", "b")


def test_a_stop_string_that_begins_before_min_tokens_and_ends_behind_counts() -> None:
    matcher = StopMatcher(["END", "a"])
    assert matcher.push("aE", armed=False) == ("a", None)
    assert matcher.push("ND", armed=True) == ("", "END")


def test_long_repetitive_stop_strings_stay_cheap() -> None:
    """A held-back text as long as the stop string, again and again: work per character must not grow with it."""
    stop = "a" * 20_000 + "b"
    matcher = StopMatcher([stop])
    shown = 0
    for _ in range(3):
        for _ in range(400):
            shown += len(matcher.push("a" * 60)[0])
        shown += len(matcher.push("c")[0])
    assert shown == 3 * (400 * 60 + 1)
