"""Transport: the seam for the all-to-all. It moves bytes and counts and knows no expert.

One transport object belongs to one generation: a member rank that leaves makes every object of that
generation useless, and a new one is made under a new store prefix. Calls are collective: every rank
of the generation makes the same calls in the same order, also with nothing to send, and from one thread.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class Support:
    """Answer of `supports`: yes, or no with a reason that is logged."""

    ok: bool
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class GroupInfo:
    """Who takes part, and where they meet.

    Attributes:
        rank, world_size: this rank's place in the exchange group (its ep_rank).
        generation: number of the membership; part of the store prefix.
        store_host, store_port: the coordinator's TCPStore; unused by one-rank transports.
        hosts: host name per rank (who shares memory is *not* told by it); slots: its slot, by which errors name it;
            empty: the same number.
        device: torch device type of the rows ("cpu" or "cuda").
        timeout_s: bound of every wait.
        interface_address: this host's address that the others reach; "": chosen by epruntime.comm.interfaces.
    """

    rank: int
    world_size: int
    generation: int = 0
    store_host: str = ""
    store_port: int = 0
    hosts: tuple[str, ...] = ()
    slots: tuple[int, ...] = ()
    device: str = "cpu"
    timeout_s: float = 120.0
    interface_address: str = ""


class Work(ABC):
    """An exchange in flight. `wait` may be called once, and returns the received rows."""

    @abstractmethod
    def wait(self) -> torch.Tensor: ...


class Transport(ABC):
    """All-to-all among the ranks of one generation.

    Errors: a lost peer or an exceeded timeout raises `epruntime.errors.RankLostError` or, where the
    peer cannot be told, `EngineDeadError`; never a hang.
    """

    name: str
    rank: int
    world_size: int

    @abstractmethod
    def __init__(self, group: GroupInfo) -> None:
        """Joins the group; returns when all its ranks have met."""

    @classmethod
    @abstractmethod
    def supports(cls, group: GroupInfo) -> Support: ...

    @abstractmethod
    def all_gather_counts(self, counts_N: torch.Tensor) -> torch.Tensor:
        """int64 [N] from each rank -> int64 [world_size, N], row r from rank r. The same on every rank."""

    @abstractmethod
    def all_to_all_rows(self, send_RB: torch.Tensor, send_counts: list[int], recv_counts: list[int]) -> Work:
        """Starts an exchange of rows.

        Args:
            send_RB: uint8 [sum(send_counts), row_bytes], contiguous, rows for rank 0 first.
            send_counts, recv_counts: rows to and from each rank; recv_counts[r] equals what rank r sends here.

        Returns:
            Work whose wait() gives uint8 [sum(recv_counts), row_bytes], rows of rank 0 first. `send_RB`
            must not be changed before it returns.
        """

    @abstractmethod
    def barrier(self) -> None: ...

    @abstractmethod
    def close(self) -> None: ...
