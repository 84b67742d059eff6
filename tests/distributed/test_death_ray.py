"""A rank that is a Ray actor, killed: its requests end and name it, and it is replaced by an actor in the same slot."""

from __future__ import annotations

import asyncio
import signal
import socket
import tempfile
import time

import pytest
from deaths import BOUND_S, dead, end, error_of, ready, settings, tokens, until
from leftovers import Leftovers

from epruntime.engine.async_llm import AsyncLLM
from epruntime.engine.status import EngineState
from epruntime.errors import RankLostError
from epruntime.testing import tiny_models
from epruntime.testing.reference import greedy_reference

ray = pytest.importorskip("ray")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

PROMPT, COUNT = [5, 17, 99, 3], 6


def test_a_killed_actor_is_replaced_and_a_stopped_one_is_killed(tmp_path_factory, monkeypatch):
    _, made = tiny_models.build("mixtral", 0)
    expected = greedy_reference(made, [PROMPT], max_new_tokens=COUNT).tokens[0]
    model = tiny_models.save(made, tmp_path_factory.mktemp("tiny"))

    async def body() -> None:
        llm = await AsyncLLM.create(settings(model, launcher="ray", restart=True))
        try:
            pool = llm._pool
            for how, verdict in ((signal.SIGKILL, "its actor died"), (signal.SIGSTOP, "no heartbeat for")):
                rank = pool.ranks[1]
                request = asyncio.create_task(tokens(llm, PROMPT, 480))
                await until(lambda rank=rank: (stamp := rank.progress.stamp) is not None and stamp.step > 2, "step")
                began = time.monotonic()
                pid = end(rank, how)
                error = await error_of(request, began, BOUND_S if how == signal.SIGKILL else 2 * BOUND_S)
                assert isinstance(error, RankLostError)
                assert (error.slot, error.host) == (1, socket.gethostname())
                for words in (verdict, "last progress", "step "):  # and a layer, unless it has not reached one
                    assert words in str(error)
                assert llm.status.state is EngineState.RESTARTING
                await ready(llm)
                assert dead(pid)
                assert await tokens(llm, PROMPT, COUNT) == expected
                assert pool.ranks[1].info.incarnation == rank.info.incarnation + 1
        finally:
            await llm.shutdown()

    # Ray's sockets need a short path, so the temporary folder is a fresh one in the system's.
    with tempfile.TemporaryDirectory(prefix="ept-", dir="/tmp") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        monkeypatch.setenv("TMPDIR", folder)
        before = Leftovers.now()
        asyncio.run(asyncio.wait_for(body(), 220))
        assert before.grown_by(descriptors=False) == {}
    assert not ray.is_initialized()
