"""Transports with one fault, to show that it would be found: they wrap a true one and change what it delivers."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from epruntime.comm.transport import GroupInfo, Support, Transport, Work


class _Altered(Work):
    def __init__(self, work: Work, alter: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._work, self._alter = work, alter

    def wait(self) -> torch.Tensor:
        return self._alter(self._work.wait())


class WrappedTransport(Transport):
    """Passes everything on; the base of those below."""

    def __init__(self, inner: Transport) -> None:
        self._inner = inner
        self.name, self.rank, self.world_size = inner.name, inner.rank, inner.world_size

    @classmethod
    def supports(cls, group: GroupInfo) -> Support:
        return Support(ok=False, reason="made from another transport, by hand")

    def all_gather_counts(self, counts_N: torch.Tensor) -> torch.Tensor:
        return self._inner.all_gather_counts(counts_N)

    def all_to_all_rows(self, send_RB: torch.Tensor, send_counts: list[int], recv_counts: list[int]) -> Work:
        return self._inner.all_to_all_rows(send_RB, send_counts, recv_counts)

    def barrier(self) -> None:
        self._inner.barrier()

    def close(self) -> None:
        self._inner.close()


class WrongOrder(WrappedTransport):
    """Delivers the rows of the sources in reverse order of ranks, as a permuted device list can make a library do."""

    def all_to_all_rows(self, send_RB: torch.Tensor, send_counts: list[int], recv_counts: list[int]) -> Work:
        def alter(rows_NB: torch.Tensor) -> torch.Tensor:
            return torch.cat(rows_NB.split(recv_counts)[::-1])

        return _Altered(super().all_to_all_rows(send_RB, send_counts, recv_counts), alter)


class FlippedBit(WrappedTransport):
    """Flips one bit in the last row of each message that is longer than `min_bytes`."""

    min_bytes = 100_000

    def all_to_all_rows(self, send_RB: torch.Tensor, send_counts: list[int], recv_counts: list[int]) -> Work:
        def alter(rows_NB: torch.Tensor) -> torch.Tensor:
            if rows_NB.nbytes > self.min_bytes:
                rows_NB[-1, rows_NB.shape[1] // 2] ^= 0x10
            return rows_NB

        return _Altered(super().all_to_all_rows(send_RB, send_counts, recv_counts), alter)


class WrongCounts(WrappedTransport):
    """Gathers the counts of the ranks in reverse order."""

    def all_gather_counts(self, counts_N: torch.Tensor) -> torch.Tensor:
        return super().all_gather_counts(counts_N).flip(0)


class SlowLink(WrappedTransport):
    """Takes `delay_s` more, and a second for each `bytes_per_s` bytes, for what comes from rank `source`."""

    def __init__(self, inner: Transport, *, source: int, delay_s: float = 0.0, bytes_per_s: float = 1e15) -> None:
        super().__init__(inner)
        self._source, self._delay_s, self._bytes_per_s = source, delay_s, bytes_per_s

    def all_to_all_rows(self, send_RB: torch.Tensor, send_counts: list[int], recv_counts: list[int]) -> Work:
        late_bytes = recv_counts[self._source] * send_RB.shape[1]

        def alter(rows_NB: torch.Tensor) -> torch.Tensor:
            if late_bytes:
                time.sleep(self._delay_s + late_bytes / self._bytes_per_s)
            return rows_NB

        return _Altered(super().all_to_all_rows(send_RB, send_counts, recv_counts), alter)
