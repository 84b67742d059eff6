"""Tests on stand-in hosts. Where none can be made they are skipped, with the reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from epruntime.testing.hosts import why_not

_HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mine = [item for item in items if _HERE in item.path.parents and "without_hosts" not in item.keywords]
    if mine and (reason := why_not()) is not None:
        for item in mine:
            item.add_marker(pytest.mark.skip(reason=f"no stand-in hosts: {reason}"))
