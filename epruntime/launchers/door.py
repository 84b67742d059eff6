"""Door: where ranks come in; open only while one is expected."""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
from collections.abc import AsyncIterator

from epruntime.comm.control import ControlServer
from epruntime.errors import LaunchError

#: longest path of a Unix socket that every system takes, bytes.
_MAX_SOCKET_PATH = 100
_SOCKET_NAME = "control"


class Door:
    """The listener of a pool's control server.

    Args:
        host: address to listen on; None: a Unix socket in a private directory.
    """

    def __init__(self, server: ControlServer, host: str | None) -> None:
        self._server, self._host = server, host
        self._directory: tempfile.TemporaryDirectory[str] | None = None
        self._address, self._holders = "", 0
        self._opening = asyncio.Lock()

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[str]:
        """Listens while it is held by anybody; gives the control address.

        Raises:
            LaunchError: it cannot.

        Afterwards there is no listener and no file, also if this process is killed later.
        """
        self._holders += 1
        try:
            async with self._opening:
                if not self._address:
                    self._address = await self._listen()
            yield self._address
        finally:
            self._holders -= 1
            if not self._holders:
                self.close()

    def close(self) -> None:
        """Closes it, whoever holds it. Safe to call again."""
        self._address = ""
        self._server.close_listeners()
        if self._directory is not None:
            self._directory.cleanup()
            self._directory = None

    async def _listen(self) -> str:
        """Raises LaunchError: there is no address, or no folder, for it."""
        try:
            if self._host is not None:
                return await self._server.listen_tcp(self._host)
            self._directory = private_directory()
            return await self._server.listen_unix(f"{self._directory.name}/{_SOCKET_NAME}")
        except OSError as error:
            where = "in a temporary folder (TMPDIR)" if self._host is None else f"on {self._host}"
            hint = "" if self._host is None else "; EPRUNTIME_HOST_IP names another address of this host"
            raise LaunchError(f"the coordinator cannot listen for ranks {where}: {error}{hint}") from error


def private_directory() -> tempfile.TemporaryDirectory[str]:
    """A fresh directory that only this user can enter, short enough for the path of a Unix socket in it."""
    directory = tempfile.TemporaryDirectory(prefix="epruntime-", ignore_cleanup_errors=True)  # mode 0700
    if len(os.fsencode(directory.name)) > _MAX_SOCKET_PATH - len(_SOCKET_NAME) - 1:
        directory.cleanup()
        directory = tempfile.TemporaryDirectory(prefix="epruntime-", dir="/tmp", ignore_cleanup_errors=True)
    return directory
