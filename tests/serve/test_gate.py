"""The gate's errors, which all requests share."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Callable
from typing import Any

import pytest

from epruntime.errors import EngineDeadError, EPRuntimeError, RankLostError, UnavailableError
from epruntime.serve.gate import Gate


def _frames(kind: type[EPRuntimeError], call: Callable[[], Any]) -> int:
    with pytest.raises(kind) as caught:
        call()
    return len(traceback.extract_tb(caught.value.__traceback__))


def test_an_error_of_many_requests_keeps_nothing_of_them() -> None:
    async def main() -> None:
        gate = Gate()
        gate.die(RankLostError(slot=1, host="b", detail="step 3"))
        assert len({_frames(EngineDeadError, gate.admit) for _ in range(5)}) == 1
        gate = Gate()
        await gate.close("the server stops")

        def cut_off() -> None:
            assert gate.closing is not None
            raise gate.closing

        assert len({_frames(UnavailableError, cut_off) for _ in range(5)}) == 1

    asyncio.run(main())
