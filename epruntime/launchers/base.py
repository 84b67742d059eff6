"""Launcher: the seam for what starts ranks. It gets them a place and a process, and watches that process.

place -> seats -> spawn (one per seat) -> RankProcess -> release

All else is the same whatever the launcher: the rank dials the control channel, and talks there.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from dataclasses import dataclass

from epruntime.comm.control import RankBootstrap


@dataclass(frozen=True, kw_only=True)
class Seat:
    """Where a rank will run. Seats are ordered by host, so that neighbours in the slot order share one.

    Attributes:
        slot: 0..num_ranks-1; host: host name; local_rank: index among the seats of that host.
        threads: compute threads it may use.
    """

    slot: int
    host: str
    local_rank: int
    threads: int


class RankProcess(ABC):
    """A started rank, as its launcher sees it.

    Attributes:
        exited: done when the process is gone, with how: "exit code 1", "killed by SIGKILL". Never an exception.
        host: name of the host where it runs, if that may be another than its seat's; else None.
    """

    exited: asyncio.Future[str]
    host: str | None = None

    @abstractmethod
    def output_tail(self) -> list[str]:
        """The last lines it wrote; empty where the launcher cannot see them."""

    @abstractmethod
    def terminate(self) -> None:
        """Asks it to end (SIGTERM); a launcher that cannot ask may do nothing."""

    @abstractmethod
    def kill(self) -> None:
        """Ends it without asking (SIGKILL). Returns at once; `exited` tells when it is done."""


class Launcher(ABC):
    """Starts ranks. Used on one asyncio loop; one launcher serves one pool.

    Attributes:
        name: as in the configuration.
    """

    name: str

    @abstractmethod
    async def place(self, num_ranks: int, *, threads_per_rank: int | None, timeout_s: float) -> list[Seat]:
        """Gets room for all ranks.

        Args:
            threads_per_rank: compute threads per rank; None divides each host's cores.
            timeout_s: seconds within which there must be room.

        Raises:
            LaunchError: no room in time; says what was asked and what there is.
        """

    @property
    @abstractmethod
    def control_host(self) -> str | None:
        """Address of this machine that all placed ranks reach; None if all share this machine's file system.
        Valid after `place`."""

    @abstractmethod
    async def spawn(self, bootstrap: RankBootstrap) -> RankProcess:
        """Starts the rank of one seat. When cancelled, it leaves no process behind.

        Raises:
            LaunchError: it could not be started.
        """

    @abstractmethod
    async def release(self) -> None:
        """Gives back all that `place` got. Called once, after every rank has ended, also if `place` failed."""
