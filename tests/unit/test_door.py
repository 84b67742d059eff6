"""The coordinator's door for ranks: where it cannot listen, the start says why and what to do."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

import pytest

from epruntime.comm import auth
from epruntime.comm.control import ControlServer
from epruntime.errors import LaunchError
from epruntime.launchers.door import Door


def _open(host: str | None) -> None:
    async def body() -> None:
        server = ControlServer(auth.new_secret(), on_join=lambda connection: None)
        async with Door(server, host).open():
            raise AssertionError("it is open")

    asyncio.run(body())


def test_an_address_of_another_host() -> None:
    with pytest.raises(LaunchError, match=r"cannot listen for ranks on 203\.0\.113\.1: .*; EPRUNTIME_HOST_IP names"):
        _open("203.0.113.1")  # TEST-NET-3, nobody's


def test_no_folder_for_the_socket(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "absent"))
    with pytest.raises(LaunchError, match=r"cannot listen for ranks in a temporary folder \(TMPDIR\): .*absent"):
        _open(None)
