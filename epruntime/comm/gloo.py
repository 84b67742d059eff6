"""Gloo transport: TCP between CPU ranks, on a process group of its own.

The exchange is made of point-to-point messages instead of gloo's collectives: a broken receive tells which peer it
was, and messages with nothing in them are not sent. It takes about as long (`benchmarks/results/dispatch.md`).
"""

from __future__ import annotations

import logging
import re
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

from epruntime.comm.interfaces import rank_address
from epruntime.comm.transport import GroupInfo, Support, Transport, Work
from epruntime.errors import ConfigError, EngineDeadError, RankLostError

logger = logging.getLogger("epruntime.comm.gloo")

dist: Any = torch.distributed  # its type stubs lack the store classes and most of ProcessGroupGloo

_MAX_TAG = 1 << 30
#: Messages on the wire: peer and what waits for it.
_Pending = list[tuple[int, Any]]


class GlooTransport(Transport):
    """All-to-all over gloo's TCP pairs. Not thread-safe: one thread makes all calls of a rank.

    Raises (constructor):
        ConfigError: the interface address is not one of this host's.
        EngineDeadError: the ranks did not meet within `group.timeout_s`.
    """

    name = "gloo"

    def __init__(self, group: GroupInfo) -> None:
        self.rank, self.world_size = group.rank, group.world_size
        self._hosts = group.hosts if len(group.hosts) == group.world_size else ("?",) * group.world_size
        self._slots = group.slots or tuple(range(group.world_size))
        self._timeout_s = group.timeout_s
        self._tag = 0
        self._failure: EngineDeadError | None = None
        timeout = timedelta(seconds=group.timeout_s)
        self.interface_address = group.interface_address or rank_address(group.store_host, group.store_port).address
        started = time.monotonic()
        try:
            device = dist.ProcessGroupGloo.create_device(hostname=self.interface_address)
        except RuntimeError as error:
            raise ConfigError(
                f"interface_address={self.interface_address!r} on host {self._hosts[self.rank]}: gloo cannot listen "
                f"there ({error}); name an address of this host that the other ranks reach"
            ) from error
        options = dist.ProcessGroupGloo._Options()
        options._devices = [device]
        options._timeout = timeout
        options._threads = 1  # only collectives use these threads, and there are none here
        try:
            store = dist.TCPStore(
                group.store_host, group.store_port, is_master=False, wait_for_workers=False, timeout=timeout
            )
            prefix = dist.PrefixStore(f"epruntime/gen{group.generation}/gloo", store)
            self._group: Any = dist.ProcessGroupGloo(prefix, group.rank, group.world_size, options)
        except RuntimeError as error:
            raise EngineDeadError(
                f"rank {self.rank}: the {self.world_size} ranks of generation {group.generation} did not meet within "
                f"{group.timeout_s:g} s through the store {group.store_host}:{group.store_port} (own address "
                f"{self.interface_address}): {cause(error)}; check that every rank runs and that the addresses "
                "reach each other"
            ) from error
        logger.debug(
            "rank %d of %d, generation %d: gloo on %s after %.2f s",
            self.rank,
            self.world_size,
            group.generation,
            self.interface_address,
            time.monotonic() - started,
        )

    @classmethod
    def supports(cls, group: GroupInfo) -> Support:
        if group.device != "cpu":
            return Support(ok=False, reason=f"moves CPU tensors, the rows are on {group.device!r}")
        if not dist.is_available() or not dist.is_gloo_available():
            return Support(ok=False, reason="this torch is built without gloo")
        if not (group.store_host and group.store_port):
            return Support(ok=False, reason="needs the address of a TCPStore (store_host, store_port)")
        return Support(ok=True)

    def all_gather_counts(self, counts_N: torch.Tensor) -> torch.Tensor:
        assert counts_N.dtype == torch.int64, counts_N.dtype
        counts_N = counts_N.contiguous()
        out_RN = counts_N.new_empty((self.world_size, counts_N.shape[0]))
        out_RN[self.rank] = counts_N
        peers = self._peers()
        self._finish(self._start([(p, out_RN[p]) for p in peers], [(p, counts_N) for p in peers]), "all_gather_counts")
        return out_RN

    def all_to_all_rows(self, send_RB: torch.Tensor, send_counts: list[int], recv_counts: list[int]) -> Work:
        assert send_RB.dtype == torch.uint8, send_RB.dtype
        assert send_RB.is_contiguous(), send_RB.stride()
        assert sum(send_counts) == send_RB.shape[0], (send_counts, send_RB.shape)
        recv_RB = send_RB.new_empty((sum(recv_counts), send_RB.shape[1]))
        sends, receives = _ranges(send_counts), _ranges(recv_counts)
        pending = self._start(
            [(p, recv_RB[slice(*receives[p])]) for p in self._peers() if recv_counts[p]],
            [(p, send_RB[slice(*sends[p])]) for p in self._peers() if send_counts[p]],
        )
        if send_counts[self.rank]:
            recv_RB[slice(*receives[self.rank])] = send_RB[slice(*sends[self.rank])]
        return _Exchange(self, pending, send_RB, recv_RB)

    def barrier(self) -> None:
        self.all_gather_counts(torch.zeros(1, dtype=torch.int64))

    def close(self) -> None:
        """Closes the sockets and ends gloo's threads; waits for nobody. May be called twice.

        Peers that wait for this rank get an error at once. A wait on this rank in another thread goes on to its own
        timeout: gloo has no way to wake it.
        """
        group, self._group = self._group, None
        if group is not None:
            group.abort()

    def _peers(self) -> list[int]:
        # Each rank starts with its right neighbour, so that not all of them send to rank 0 first.
        return [(self.rank + i) % self.world_size for i in range(1, self.world_size)]

    def _start(self, receives: list[tuple[int, torch.Tensor]], sends: list[tuple[int, torch.Tensor]]) -> _Pending:
        """Posts receives, then sends, so that arriving bytes go straight to their place."""
        if self._failure is not None:
            raise self._failure
        if self._group is None:
            raise EngineDeadError(f"rank {self.rank}: the gloo transport is closed; its generation has ended")
        self._tag = (self._tag + 1) % _MAX_TAG
        peer = self.rank
        pending: _Pending = []
        try:
            for peer, tensor in receives:
                pending.append((peer, self._group.recv([tensor], peer, self._tag)))
            for peer, tensor in sends:
                pending.append((peer, self._group.send([tensor], peer, self._tag)))
        except RuntimeError as error:
            raise self._lost(peer, "start of an exchange", 0.0, error) from error
        return pending

    def _finish(self, pending: _Pending, what: str) -> None:
        peer, started = self.rank, time.monotonic()
        try:
            for peer, work in pending:  # noqa: B007 - named in the error
                work.wait()
        except RuntimeError as error:
            raise self._lost(peer, what, time.monotonic() - started, error) from error

    def _lost(self, peer: int, what: str, after_s: float, error: RuntimeError) -> RankLostError:
        """Gloo's error as one that names the peer. It is kept: a broken group stays broken."""
        self._failure = RankLostError(
            slot=self._slots[peer],
            host=self._hosts[peer],
            detail=f"gloo exchange {self._tag} ({what}) with it failed on rank {self._slots[self.rank]} after "
            f"{after_s:.1f} s (limit {self._timeout_s:g} s): {cause(error)}",
        )
        return self._failure


class _Exchange(Work):
    """Rows on the wire; holds both buffers until they have moved."""

    def __init__(
        self, transport: GlooTransport, pending: _Pending, send_RB: torch.Tensor, recv_RB: torch.Tensor
    ) -> None:
        self._transport, self._pending, self._send_RB, self._recv_RB = transport, pending, send_RB, recv_RB

    def wait(self) -> torch.Tensor:
        self._transport._finish(self._pending, "all_to_all_rows")
        self._pending = []
        return self._recv_RB


def _ranges(counts: list[int]) -> list[tuple[int, int]]:
    ends, total = [], 0
    for count in counts:
        ends.append((total, total + count))
        total += count
    return ends


def cause(error: BaseException) -> str:
    """What went wrong, of a gloo error's text: without the place in gloo's sources, and without its advice and jokes.

    "[.../tcp/pair.cc:537] Read error [127.0.0.1]:2442: Connection reset by peer. This is typically caused by ... GLHF!"
    """
    first = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
    text = re.sub(r"^\[[^\]]+:\d+\] ", "", first)
    return re.split(r"\.? (?:This is typically|Check the logs|Note that|You can|GLHF)", text)[0].rstrip(". ")
