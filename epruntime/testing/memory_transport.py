"""MemoryTransport: ranks that are threads of one process, for tests of what is done with a transport."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch

from epruntime.comm.transport import GroupInfo, Support, Transport, Work

T = TypeVar("T")
_TIMEOUT_S = 20.0


class _Board:
    """Where the threads leave what they send: (number of the call, source, destination) -> rows."""

    def __init__(self) -> None:
        self._parcels: dict[tuple[int, int, int], torch.Tensor] = {}
        self._changed = threading.Condition()

    def put(self, key: tuple[int, int, int], rows: torch.Tensor) -> None:
        with self._changed:
            self._parcels[key] = rows.clone()
            self._changed.notify_all()

    def take(self, key: tuple[int, int, int]) -> torch.Tensor:
        with self._changed:
            if not self._changed.wait_for(lambda: key in self._parcels, _TIMEOUT_S):
                raise AssertionError(f"nothing came for call, source, destination {key}")
            return self._parcels.pop(key)


class _Arriving(Work):
    def __init__(self, collect: Callable[[], torch.Tensor]) -> None:
        self._collect = collect

    def wait(self) -> torch.Tensor:
        return self._collect()


class MemoryTransport(Transport):
    """One rank of `board`. Calls are numbered, so that ranks whose calls differ in number wait in vain."""

    name = "memory"

    def __init__(self, group: GroupInfo, board: _Board | None = None) -> None:
        self.rank, self.world_size = group.rank, group.world_size
        self._board, self._calls = board or _Board(), 0

    @classmethod
    def supports(cls, group: GroupInfo) -> Support:
        return Support(ok=False, reason="for threads of one process")

    def all_gather_counts(self, counts_N: torch.Tensor) -> torch.Tensor:
        rows_RN = counts_N.unsqueeze(0)
        return self._exchange([rows_RN] * self.world_size, [True] * self.world_size).wait()

    def all_to_all_rows(self, send_RB: torch.Tensor, send_counts: list[int], recv_counts: list[int]) -> Work:
        return self._exchange(list(send_RB.split(send_counts)), [count > 0 for count in recv_counts], send_RB[:0])

    def barrier(self) -> None:
        self.all_gather_counts(torch.zeros(1, dtype=torch.int64))

    def close(self) -> None:
        return

    def _exchange(self, parts: list[torch.Tensor], awaited: list[bool], nothing: torch.Tensor | None = None) -> Work:
        call, self._calls = self._calls, self._calls + 1
        for destination, part in enumerate(parts):
            if len(part):
                self._board.put((call, self.rank, destination), part)

        def collect() -> torch.Tensor:
            found = [
                self._board.take((call, source, self.rank)) for source in range(self.world_size) if awaited[source]
            ]
            return torch.cat(found) if found else parts[0][:0] if nothing is None else nothing

        return _Arriving(collect)


def run_threads(
    world_size: int, function: Callable[[Transport], T], *, wrap: Any = lambda transport: transport
) -> list[T]:
    """Results of `function(wrap(transport))` on each rank, in rank order."""
    board = _Board()
    with ThreadPoolExecutor(world_size) as executor:
        transports = [
            wrap(MemoryTransport(GroupInfo(rank=rank, world_size=world_size), board)) for rank in range(world_size)
        ]
        futures = [executor.submit(function, transport) for transport in transports]
        return [future.result(timeout=2 * _TIMEOUT_S) for future in futures]
