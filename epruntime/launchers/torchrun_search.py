"""How a supervisor finds its coordinator: letters from torchrun's store, tried until one leads to it."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import socket
import subprocess
import sys
import time
from dataclasses import dataclass

from epruntime.comm.control import ControlClient, RankBootstrap
from epruntime.errors import HandshakeError, LaunchError
from epruntime.launchers.caller_thread import CallerThread
from epruntime.launchers.import_path import import_path
from epruntime.launchers.torchrun_environment import TorchrunWorker
from epruntime.launchers.torchrun_meeting import (
    LETTER,
    MODULE,
    REASON,
    LastLetter,
    Letter,
    MeetingLetter,
    messenger_input,
    read_letter,
)

logger = logging.getLogger("epruntime.launchers.torchrun_search")

#: seconds to find the coordinator; to be let in by whoever listens where it should be; of one attempt; between two.
_FIND_S, _REFUSED_S, _CONNECT_S, _RETRY_S = 180.0, 10.0, 3.0, 0.5


@dataclass(frozen=True, kw_only=True)
class Found:
    """The coordinator: a connection to it, the host it is on, and the secret shared with it."""

    client: ControlClient
    host: str
    secret: bytes


class CoordinatorSearch:
    """One supervisor's search.

    Args:
        job_secret: given to all processes of the job by the user; None: it comes with the letter.
    """

    def __init__(self, worker: TorchrunWorker, *, job_secret: bytes | None) -> None:
        self._worker, self._job_secret = worker, job_secret
        self._host = socket.gethostname()
        self._newest: asyncio.Future[Letter] = asyncio.get_running_loop().create_future()
        self._last_error = ""

    async def run(self) -> Found | LastLetter:
        """The coordinator, or how the job ended before it was found.

        Raises:
            LaunchError, HandshakeError: not found, or not let in; says what was tried.
        """
        messenger = await asyncio.create_subprocess_exec(
            sys.executable, "-P", "-m", MODULE, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(import_path())},
            start_new_session=True,  # torchrun's agent signals process groups, and the search goes on
        )  # fmt: skip
        reading = asyncio.ensure_future(self._read(messenger))
        connecting = asyncio.ensure_future(self._connect())
        try:
            await asyncio.wait({reading, connecting}, timeout=_FIND_S, return_when=asyncio.FIRST_COMPLETED)
            if connecting.done():
                return connecting.result()
            if reading.done():
                raise LaunchError(reading.result())
            raise LaunchError(f"the coordinator was not found within {_FIND_S:g} s{self._last_error}")
        finally:
            for task in (reading, connecting):
                task.cancel()
            with contextlib.suppress(ProcessLookupError):
                messenger.kill()
            await asyncio.gather(reading, connecting, messenger.wait(), return_exceptions=True)

    async def _read(self, messenger: asyncio.subprocess.Process) -> str:
        """Takes letters for as long as the messenger brings them; why it ended."""
        assert messenger.stdin is not None
        assert messenger.stdout is not None
        messenger.stdin.write(messenger_input(self._worker))
        reason = "the messenger to torchrun's store ended without a word"
        while line := (await messenger.stdout.readline()).decode(errors="replace"):
            if line.startswith(REASON):
                reason = line.removeprefix(REASON).strip()
            elif line.startswith(LETTER):
                letter = read_letter(bytes.fromhex(line.removeprefix(LETTER)))
                if self._newest.done():
                    self._newest = asyncio.get_running_loop().create_future()
                self._newest.set_result(letter)
            else:
                logger.debug("messenger: %s", line.rstrip())
        return reason

    async def _connect(self) -> Found | LastLetter:
        """Tries the newest letter again and again: a coordinator of an earlier start may have left an old one."""
        connector = CallerThread("epruntime-connect")
        tried: MeetingLetter | None = None
        refused_since = 0.0
        while True:
            letter = await asyncio.shield(self._newest)
            if isinstance(letter, LastLetter):
                return letter
            if letter != tried:
                tried, refused_since = letter, 0.0
            secret = self._secret(letter)
            try:
                client = await connector.run(functools.partial(self._attempt, letter, secret))
            except HandshakeError as error:
                if error.__cause__ is None:  # it was reached, and does not want this one
                    refused_since = refused_since or time.monotonic()
                    if time.monotonic() - refused_since > _REFUSED_S:
                        raise HandshakeError(str(error) + (_SECRET_HINT if self._job_secret else "")) from error
                elif not self._last_error:
                    logger.warning(
                        "host %s does not reach the coordinator on host %s yet: %s. If this lasts, set "
                        "EPRUNTIME_HOST_IP there to an address that is reached from here, or open its ports",
                        self._host,
                        letter.host,
                        error,
                    )
                self._last_error = f": {error}"
                await asyncio.sleep(_RETRY_S)
            else:
                return Found(client=client, host=letter.host, secret=secret)

    def _attempt(self, letter: MeetingLetter, secret: bytes) -> ControlClient:
        bootstrap = RankBootstrap(
            address=letter.address,
            secret=secret,
            slot=self._worker.rank,
            incarnation=self._worker.restart_count,
            host=self._host,
            local_rank=self._worker.local_rank,
            pool="torchrun",
            connect_timeout_s=_CONNECT_S,
        )
        return ControlClient.connect(bootstrap, signature={})

    def _secret(self, letter: MeetingLetter) -> bytes:
        if self._job_secret is None and not letter.secret:
            raise HandshakeError(_UNEQUAL.format(has=letter.host, lacks=self._host))
        if self._job_secret is not None and letter.secret:
            raise HandshakeError(_UNEQUAL.format(has=self._host, lacks=letter.host))
        return self._job_secret or letter.secret


_SECRET_HINT = ". EPRUNTIME_JOB_SECRET must have one value on all hosts"
_UNEQUAL = "EPRUNTIME_JOB_SECRET is set on host {has} and not on host {lacks}: set it for all workers, or for none"
