"""Pools of local echo ranks, and that a test leaves nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile

import pytest
from leftovers import Leftovers

from epruntime.launchers.local import LocalLauncher
from epruntime.launchers.pool import RankPool
from epruntime.launchers.store import host_store

ENTRY = "epruntime.testing.echo_rank"


def run(coroutine, seconds: float = 240) -> None:
    asyncio.run(asyncio.wait_for(coroutine, seconds))


@contextlib.asynccontextmanager
async def pool_of(num_ranks: int = 2, **options):
    pool = await RankPool.start(num_ranks, launcher=LocalLauncher(entry_module=ENTRY), **options)
    try:
        yield pool
    finally:
        await pool.stop()


@pytest.fixture(autouse=True)
def nothing_left(tmp_path_factory, monkeypatch):
    """Every test has a temporary folder of its own, and leaves nothing in it or elsewhere."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("t")))
    monkeypatch.setenv("TMPDIR", tempfile.tempdir)
    host_store("127.0.0.1")  # what a first use opens for good is no leak
    before = Leftovers.now()
    yield
    assert before.grown_by() == {}
