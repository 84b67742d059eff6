"""How supervisors and what uses them hear of the end of a torchrun job; without torchrun."""

from __future__ import annotations

import asyncio
import threading

import pytest
from supervised_job import START_S, job

from epruntime.errors import LaunchError
from epruntime.launchers.pool import RankPool
from epruntime.launchers.torchrun import TorchrunLauncher
from epruntime.testing.patience import PATIENCE_S


def test_ranks_that_outlive_the_hub_can_be_stopped(caplog):
    with job(2) as it:
        it.supervise(0, 1)

        async def body() -> None:
            pool = await RankPool.start(2, launcher=TorchrunLauncher(), threads_per_rank=1, start_timeout_s=START_S)
            await asyncio.to_thread(it.hub.close)
            for rank in pool.ranks:
                rank.process.kill()
            await asyncio.wait_for(pool.stop(), PATIENCE_S)
            with pytest.raises(LaunchError, match="the job has ended"):
                await RankPool.start(1, launcher=TorchrunLauncher(), threads_per_rank=1, start_timeout_s=START_S)

        asyncio.run(asyncio.wait_for(body(), START_S))
    assert "could not be confirmed dead" not in caplog.text


def test_who_waits_for_workers_when_the_hub_is_closed_is_told():
    told: list[LaunchError] = []
    with job(2) as it:

        def wait() -> None:
            with pytest.raises(LaunchError, match="the job has ended") as caught:
                it.hub.run(it.hub.seats(2, 600.0))
            told.append(caught.value)

        waiting = threading.Thread(target=wait, daemon=True)
        waiting.start()
        it.hub.run(asyncio.sleep(0.1))
        it.hub.close()
        waiting.join(PATIENCE_S)
    assert len(told) == 1
