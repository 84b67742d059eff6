"""`tokenize` refuses texts that are longer than any prompt may be, before any work is done for them."""

from __future__ import annotations

import asyncio

import pytest
from fake_engine import MAX_MODEL_LEN, fake_engine

from epruntime.engine.processor import MAX_TOKENIZED
from epruntime.errors import InvalidRequestError


@pytest.mark.parametrize(
    "prompt",
    [
        "a" * (MAX_TOKENIZED + 1),
        {"prompt": "a" * (MAX_TOKENIZED + 1)},
        {"prompt_token_ids": [1] * (MAX_TOKENIZED + 1)},
        {"messages": [{"role": "user", "content": "a" * MAX_TOKENIZED}]},
    ],
    ids=["text", "named text", "ids", "chat"],
)
def test_too_long_to_be_of_use(prompt) -> None:
    async def body() -> None:
        async with fake_engine() as (engine, _, tokenizer):
            with pytest.raises(InvalidRequestError, match=f"at most {MAX_TOKENIZED} characters.*in parts") as caught:
                await engine.tokenize(prompt)
            assert caught.value.field == "prompt"
            assert tokenizer.encoded == []
            assert f"{MAX_MODEL_LEN} tokens" in str(caught.value)
            assert len(str(caught.value)) < 300

    asyncio.run(body())


def test_the_longest_is_taken() -> None:
    async def body() -> None:
        async with fake_engine() as (engine, _, _):
            assert len((await engine.tokenize("a" * MAX_TOKENIZED))[1]) == MAX_TOKENIZED

    asyncio.run(body())
