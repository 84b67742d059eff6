"""The one-rank transport: what is sent to itself is received. Same interface, no copy, no wait."""

from __future__ import annotations

import torch

from epruntime.comm.transport import GroupInfo, Support, Transport, Work


class _Done(Work):
    def __init__(self, rows_NB: torch.Tensor) -> None:
        self._rows_NB = rows_NB

    def wait(self) -> torch.Tensor:
        return self._rows_NB


class LocalTransport(Transport):
    """All-to-all of a single rank. The received rows are the sent tensor itself."""

    name = "local"

    def __init__(self, group: GroupInfo) -> None:
        self.rank, self.world_size = group.rank, group.world_size

    @classmethod
    def supports(cls, group: GroupInfo) -> Support:
        if group.world_size != 1:
            return Support(ok=False, reason=f"serves one rank, the group has {group.world_size}")
        return Support(ok=True)

    def all_gather_counts(self, counts_N: torch.Tensor) -> torch.Tensor:
        return counts_N.unsqueeze(0)

    def all_to_all_rows(self, send_RB: torch.Tensor, send_counts: list[int], recv_counts: list[int]) -> Work:
        assert send_counts == recv_counts, (send_counts, recv_counts)
        return _Done(send_RB)

    def barrier(self) -> None:
        return

    def close(self) -> None:
        return
