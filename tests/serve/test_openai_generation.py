"""Streams of several prompts, merged: what is held for a reader that does not come, and how they end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest

from epruntime.serve.openai.generation import merged


class Counted:
    """Streams that count what they were asked for, and how many were closed."""

    def __init__(self) -> None:
        self.asked = self.closed = 0

    async def stream(self, length: int, error: Exception | None = None) -> AsyncGenerator[int, None]:
        try:
            for item in range(length):
                self.asked += 1
                yield item
            if error is not None:
                raise error
        finally:
            self.closed += 1


async def _let_others_run() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def test_a_stream_is_asked_for_more_when_its_last_item_was_taken() -> None:
    async def main() -> None:
        fast, idle = Counted(), asyncio.Event()

        async def silent() -> AsyncGenerator[int, None]:
            await idle.wait()
            yield 0

        items = merged([fast.stream(1000), silent(), silent(), silent()])
        for number in range(1, 4):
            await anext(items)
            await _let_others_run()
            assert fast.asked == number
        await items.aclose()
        assert fast.closed == 1

    asyncio.run(main())


def test_items_come_with_the_number_of_their_stream() -> None:
    async def main() -> None:
        got = [item async for item in merged([Counted().stream(length) for length in (3, 0, 2)])]
        assert sorted(got) == [(0, 0), (0, 1), (0, 2), (2, 0), (2, 1)]

    asyncio.run(main())


def test_the_first_error_ends_all() -> None:
    async def main() -> None:
        streams = Counted()
        with pytest.raises(ValueError, match="no more"):
            async for _ in merged([streams.stream(10**6), streams.stream(2, ValueError("no more"))]):
                pass
        assert streams.closed == 2

    asyncio.run(main())
