"""Gloo transport: TCP between CPU ranks, on a process group of its own.

The exchange is made of point-to-point messages instead of gloo's collectives: a collective is handed
to gloo's worker threads, a send or receive starts in the calling thread (two ranks, one host, 4 KiB:
98 us instead of 369 us, `benchmarks/bench_dispatch.py --transport-only`), and a broken receive tells
which peer it was.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from epruntime.comm.transport import GroupInfo, Support, Transport, Work
from epruntime.errors import ConfigError, EngineDeadError, RankLostError

logger = logging.getLogger("epruntime.comm.gloo")

_MAX_TAG = 1 << 30


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
        self._timeout_s = group.timeout_s
        self._tag = 0
        self._failure: EngineDeadError | None = None
        timeout = timedelta(seconds=group.timeout_s)
        self.interface_address = group.interface_address or local_address_towards(group.store_host, group.store_port)
        started = time.monotonic()
        try:
            device = dist.ProcessGroupGloo.create_device(hostname=self.interface_address)
        except RuntimeError as error:
            raise ConfigError(
                f"interface_address={self.interface_address!r} on host {self._hosts[self.rank]}: gloo cannot listen "
                f"there ({error}); name an address of this host that the other ranks reach") from error
        options = dist.ProcessGroupGloo._Options()
        options._devices = [device]
        options._timeout = timeout
        options._threads = 1  # only collectives use these threads, and there are none here
        try:
            store = dist.TCPStore(group.store_host, group.store_port, is_master=False, wait_for_workers=False,
                                  timeout=timeout)
            prefix = dist.PrefixStore(f"epruntime/gen{group.generation}/gloo", store)
            self._group: dist.ProcessGroupGloo | None = dist.ProcessGroupGloo(
                prefix, group.rank, group.world_size, options)
        except RuntimeError as error:
            raise EngineDeadError(
                f"rank {self.rank}: the {self.world_size} ranks of generation {group.generation} did not meet within "
                f"{group.timeout_s:g} s through the store {group.store_host}:{group.store_port} (own address "
                f"{self.interface_address}): {_first_line(error)}; check that every rank runs and that the addresses "
                "reach each other") from error
        logger.debug("rank %d of %d, generation %d: gloo on %s after %.2f s", self.rank, self.world_size,
                     group.generation, self.interface_address, time.monotonic() - started)

    @classmethod
    def supports(cls, group: GroupInfo) -> Support:
        if group.device != "cpu":
            return Support(ok=False, reason=f"moves CPU tensors, the rows are on {group.device!r}")
        if not dist.is_available() or not dist.is_gloo_available():
            return Support(ok=False, reason="this torch is built without gloo")
        if group.world_size > 1 and not (group.store_host and group.store_port):
            return Support(ok=False, reason="needs the address of a TCPStore (store_host, store_port)")
        return Support(ok=True)

    def all_gather_counts(self, counts_N: torch.Tensor) -> torch.Tensor:
        assert counts_N.dtype == torch.int64 and counts_N.dim() == 1, (counts_N.dtype, counts_N.shape)
        counts_N = counts_N.contiguous()
        out_RN = counts_N.new_empty((self.world_size, counts_N.shape[0]))
        out_RN[self.rank] = counts_N
        tag = self._next_tag()
        pending = [(p, self._recv(out_RN[p], p, tag)) for p in self._peers()]
        pending += [(p, self._send(counts_N, p, tag)) for p in self._peers()]
        self._wait(pending, "all_gather_counts")
        return out_RN

    def all_to_all_rows(self, send_RB: torch.Tensor, send_counts: list[int], recv_counts: list[int]) -> Work:
        assert send_RB.dtype == torch.uint8 and send_RB.is_contiguous(), (send_RB.dtype, send_RB.stride())
        assert sum(send_counts) == send_RB.shape[0], (send_counts, send_RB.shape)
        recv_RB = send_RB.new_empty((sum(recv_counts), send_RB.shape[1]))
        tag = self._next_tag()
        sends, receives = _ranges(send_counts), _ranges(recv_counts)
        # Receives are posted first, so that arriving bytes go straight to their place.
        pending = [(p, self._recv(recv_RB[slice(*receives[p])], p, tag)) for p in self._peers() if recv_counts[p]]
        pending += [(p, self._send(send_RB[slice(*sends[p])], p, tag)) for p in self._peers() if send_counts[p]]
        if send_counts[self.rank]:
            recv_RB[slice(*receives[self.rank])] = send_RB[slice(*sends[self.rank])]
        return _Exchange(self, pending, send_RB, recv_RB)

    def barrier(self) -> None:
        self.all_gather_counts(torch.zeros(1, dtype=torch.int64))

    def close(self) -> None:
        """Closes the sockets and ends gloo's threads; waits for nobody. May be called twice."""
        group, self._group = self._group, None
        if group is not None:
            group.abort()

    def _peers(self) -> Iterator[int]:
        # Each rank starts with its right neighbour, so that not all of them send to rank 0 first.
        return ((self.rank + i) % self.world_size for i in range(1, self.world_size))

    def _next_tag(self) -> int:
        self._tag = (self._tag + 1) % _MAX_TAG
        return self._tag

    def _send(self, tensor: torch.Tensor, peer: int, tag: int) -> dist.Work:
        with self._guard(peer, "send"):
            return self._live().send([tensor], peer, tag)

    def _recv(self, tensor: torch.Tensor, peer: int, tag: int) -> dist.Work:
        with self._guard(peer, "receive"):
            return self._live().recv([tensor], peer, tag)

    def _live(self) -> dist.ProcessGroupGloo:
        if self._failure is not None:
            raise self._failure
        if self._group is None:
            raise EngineDeadError(f"rank {self.rank}: the gloo transport is closed; its generation has ended")
        return self._group

    def _wait(self, pending: list[tuple[int, dist.Work]], what: str) -> None:
        for peer, work in pending:
            with self._guard(peer, what):
                work.wait()

    @contextmanager
    def _guard(self, peer: int, what: str) -> Iterator[None]:
        """Turns gloo's error into one that names the peer, and keeps it: a broken group stays broken."""
        started = time.monotonic()
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, EngineDeadError):
                raise
            self._failure = RankLostError(
                slot=peer, host=self._hosts[peer],
                detail=f"gloo exchange {self._tag} ({what}) with it failed on rank {self.rank} after "
                       f"{time.monotonic() - started:.1f} s (limit {self._timeout_s:g} s): {_first_line(error)}")
            raise self._failure from error


class _Exchange(Work):
    """Rows on the wire; holds both buffers until they have moved."""

    def __init__(self, transport: GlooTransport, pending: list[tuple[int, dist.Work]], send_RB: torch.Tensor,
                 recv_RB: torch.Tensor) -> None:
        self._transport, self._pending, self._send_RB, self._recv_RB = transport, pending, send_RB, recv_RB

    def wait(self) -> torch.Tensor:
        self._transport._wait(self._pending, "all_to_all_rows")
        self._pending = []
        return self._recv_RB


def local_address_towards(host: str, port: int) -> str:
    """This host's address on the route to `host`: where a peer that also reaches `host` can reach us.

    On loopback when the store is on loopback, that is, when all ranks share this host. Sends nothing.

    Raises:
        ConfigError: the host name does not resolve, or there is no route to it.
    """
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, proto) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ConfigError(f"store_host={host!r}: no route to it from {socket.gethostname()} ({error}); set the "
                          "interface address, or give the store an address that this host reaches") from error


def _ranges(counts: list[int]) -> list[tuple[int, int]]:
    ends, total = [], 0
    for count in counts:
        ends.append((total, total + count))
        total += count
    return ends


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
