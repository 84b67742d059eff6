"""RequestState: one request's fault stays its own."""

from __future__ import annotations

import asyncio

import pytest

from epruntime.engine.processor import InputProcessor, Limits
from epruntime.engine.request_state import RequestState
from epruntime.engine.scheduler import TokenUpdate
from epruntime.errors import RequestFailedError
from epruntime.plan import FINISH_NONE
from epruntime.sampling_params import SamplingParams


class Letters:
    """A tokenizer of 26 letters, which raises on other ids, as sentencepiece does."""

    def decode(self, ids, *, skip_special_tokens: bool) -> str:
        return "".join("abcdefghijklmnopqrstuvwxyz"[i] for i in ids)


def _state() -> RequestState:
    processor = InputProcessor(None, Limits(max_model_len=64, vocab_size=32, eos_token_ids=()))
    request = processor.process({"prompt_token_ids": [0]}, SamplingParams(), rid=1, request_id="r", arrival_time=0.0)
    return RequestState(request, Letters())  # type: ignore[arg-type]


def test_a_token_that_the_tokenizer_does_not_know_ends_its_request_alone() -> None:
    async def body() -> None:
        state = _state()
        state.update(TokenUpdate(1, 1, FINISH_NONE))
        assert (await state.next()).outputs[0].text == "b"
        state.update(TokenUpdate(1, 30, FINISH_NONE))
        assert state.finished
        with pytest.raises(RequestFailedError, match="request r: token 30 cannot be made into text: IndexError"):
            await state.next()

    asyncio.run(body())


def test_the_first_time_on_a_rank_counts() -> None:
    async def body() -> None:
        state = _state()
        assert state.metrics.scheduled_time is None
        state.scheduled()
        first = state.metrics.scheduled_time
        state.scheduled()
        assert state.metrics.scheduled_time == first

    asyncio.run(body())
