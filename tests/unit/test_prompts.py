"""What `generate` takes, of the client and of LLM alike; what it does not is refused in words."""

from __future__ import annotations

from typing import Any

import pytest

from epruntime.client import wire
from epruntime.client.facts import tokenize_request
from epruntime.engine.llm import LLM
from epruntime.errors import InvalidRequestError
from epruntime.prompts import params_list, prompt_list
from epruntime.sampling_params import SamplingParams

ONE, OTHER = SamplingParams(seed=1), SamplingParams(seed=2)


@pytest.mark.parametrize(
    ("prompts", "expected", "single"),
    [
        ("a", ["a"], True),
        ({"prompt": "a"}, [{"prompt": "a"}], True),
        ([5, 6], [[5, 6]], True),
        ((5, 6), [[5, 6]], True),
        (["a", [5]], ["a", [5]], False),
        ([], [], False),
        ((text for text in "ab"), ["a", "b"], False),
    ],
)
def test_one_or_many(prompts: Any, expected: list[Any], single: bool) -> None:
    assert prompt_list(prompts) == (expected, single)


@pytest.mark.parametrize("wrong", [5, None, 1.5, True, b"text", bytearray(b"text"), object()])
def test_what_is_neither(wrong: Any) -> None:
    taken = "must be a string, a list of token ids, a dict with 'prompt', 'prompt_token_ids' or 'messages', or a list"
    with pytest.raises(InvalidRequestError, match=f"^prompts=.*: {taken} of those$"):
        prompt_list(wrong)


def test_parameters_for_all_or_each() -> None:
    assert params_list(ONE, 2) == [ONE, ONE]
    assert params_list([ONE, OTHER], 2) == params_list((ONE, OTHER), 2) == [ONE, OTHER]
    assert params_list((params for params in (ONE, OTHER)), 2) == [ONE, OTHER]
    assert params_list(ONE, 0) == params_list([], 0) == []
    with pytest.raises(InvalidRequestError, match=r"^sampling_params='1 of them': 2 prompts need as many"):
        params_list([ONE], 2)


@pytest.mark.parametrize("wrong", [5, "x", {"max_tokens": 5}, [5, ONE], None])
def test_parameters_that_are_none(wrong: Any) -> None:
    with pytest.raises(InvalidRequestError, match=r"^sampling_params=.*: must be a SamplingParams for all prompts, or"):
        params_list(wrong, 2)


@pytest.mark.parametrize("wrong", [5, None, "hi", {"role": "user", "content": "hi"}])
def test_messages_that_are_no_list(wrong: Any) -> None:
    told = "must be a list of dicts with 'role' and 'content'"
    with pytest.raises(InvalidRequestError, match=told):
        wire.request({"messages": wrong}, {})
    with pytest.raises(InvalidRequestError, match=told):
        LLM.chat(object.__new__(LLM), wrong)


def test_a_conversation_to_tokenize_that_is_no_list() -> None:
    with pytest.raises(InvalidRequestError, match="must be a list of dicts"):
        tokenize_request(5)  # type: ignore[arg-type]


def test_a_name_that_is_no_parameter() -> None:
    with pytest.raises(TypeError, match=r"^max_token is not a sampling parameter; did you mean max_tokens\?$"):
        wire.split_params(None, {"max_token": 5}, 1)
    with pytest.raises(TypeError, match=r"^colour is not a sampling parameter$"):
        wire.split_params(None, {"colour": 5}, 1)
