"""Ranks that stay up for all end-to-end tests and load model after model."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from epruntime.engine.ranks import Ranks


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Four ranks of one compute thread each."""
    with Ranks(4, threads_per_rank=1) as running:
        yield running
