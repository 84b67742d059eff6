"""Three ranks, one of which stands still with the interpreter's lock held: it is blamed, not those that wait for it."""

from __future__ import annotations

import asyncio
import socket
import tempfile
import time

import pytest
from deaths import dead, settings, slow_pool, tokens, until
from leftovers import Leftovers

from epruntime.engine.async_llm import AsyncLLM
from epruntime.engine.status import EngineState, EngineStatus
from epruntime.errors import RankLostError
from epruntime.launchers.store import host_store
from epruntime.testing import tiny_models
from epruntime.testing.patience import soon
from epruntime.testing.slow_rank import SLOW, STUCK_TOKENS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

STEP_TIMEOUT_S = 4.0


def test_a_stuck_rank_is_killed_at_the_step_s_deadline_and_named(tmp_path_factory, monkeypatch):
    monkeypatch.setenv(SLOW, "1:0:stuck")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("t")))
    _, made = tiny_models.build("mixtral", 0)
    model = tiny_models.save(made, tmp_path_factory.mktemp("tiny"))
    host_store("127.0.0.1")
    before = Leftovers.now()

    async def body() -> None:
        pool = await slow_pool(3)
        try:
            llm = await AsyncLLM.create(settings(model, 3, step_timeout_s=STEP_TIMEOUT_S), rank_pool=pool)
            seen: list[EngineStatus] = []
            llm.on_status(seen.append)
            pids = [rank.info.pid for rank in pool.ranks]
            assert len(await tokens(llm, [5, 6], 3)) == 3
            began = time.monotonic()
            prompts = [[5 + i] * STUCK_TOKENS for i in range(3)]  # one for each rank
            results = await asyncio.gather(*(tokens(llm, p, 4) for p in prompts), return_exceptions=True)
            took = time.monotonic() - began
            assert STEP_TIMEOUT_S - 0.1 < took < soon(STEP_TIMEOUT_S + 4)
            for error in results:
                assert isinstance(error, RankLostError)
                assert (error.slot, error.host) == (1, socket.gethostname())
                text = str(error)
                assert (
                    f"it did not end a step within {STEP_TIMEOUT_S:g} s (step_timeout_s): its heartbeats go on" in text
                )
                assert "but its progress stands still; killed; last progress" in text
                assert "ago: step " in text
            assert dead(pids[1])
            assert [status.state for status in seen] == [EngineState.STALLED, EngineState.DEAD]
            assert seen[0].reason.startswith(f"rank 1 on host {socket.gethostname()} has not moved for more than 2 s")
            # without restart the engine is dead and says why; the other ranks are well
            with pytest.raises(RankLostError, match="rank 1 on host"):
                await tokens(llm, [5], 1)
            assert llm.errored
            began = time.monotonic()
            await llm.shutdown()
            await until(lambda: all(rank.progress.stamp.step < 0 for rank in (pool.ranks[0], pool.ranks[2])), "free")
        finally:
            await pool.stop()
        assert time.monotonic() - began < soon(10)
        assert all(dead(pid) for pid in pids)

    asyncio.run(asyncio.wait_for(body(), 110))
    assert before.grown_by(descriptors=False) == {}
