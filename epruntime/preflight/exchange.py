"""What a rank does with the transport of its generation: payloads through it, then the clock on it.

Collective: every rank of the generation calls the same functions with the same arguments.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from epruntime.comm.progress import Collective, Stamps
from epruntime.comm.transport import Transport, Work
from epruntime.preflight.pairs import PairTime, Probe, Round, median
from epruntime.preflight.payload import Mismatch, inspect_counts, inspect_rows, outgoing, trials

#: round trips whose median is a pair's latency; of the first one, which also waits for the other rank, nothing is used.
NUM_PINGS = 15
#: probes in each direction, of which the best counts.
NUM_PROBES = 2
_PING_BYTES = 64
_PROBE_ROW_BYTES = 4096


def check_exchange(transport: Transport, stamps: Stamps, *, seed: int = 0) -> list[Mismatch]:
    """Sends each rank its own payload in several exchanges, and says what arrived wrong here.

    All exchanges are under way at once before the first is waited for, as in a step.
    """
    rank, found = transport.rank, []
    planned = trials(transport.world_size)
    started: list[Work] = []
    for trial in planned:
        counts_R = torch.tensor(trial.counts[rank], dtype=torch.int64)
        stamps.wait(Collective.COUNTS)
        counts_RR = transport.all_gather_counts(counts_R)
        stamps.go_on()
        found += inspect_counts(trial, counts_RR, rank)
        incoming = [row[rank] for row in trial.counts]
        started.append(transport.all_to_all_rows(outgoing(trial, rank, seed=seed), list(trial.counts[rank]), incoming))
    for trial, work in zip(planned, started, strict=True):
        stamps.wait(Collective.DISPATCH)
        rows_NB = work.wait()
        stamps.go_on()
        found += inspect_rows(trial, rows_NB, rank, seed=seed)
    return found


def time_pairs(transport: Transport, stamps: Stamps, rounds: Sequence[Round]) -> list[PairTime]:
    """Times the pairs of each round, one round after the other. Both directions are told by the pair's first rank."""
    found: list[PairTime] = []
    for probes in rounds:
        mine = next((probe for probe in probes if transport.rank in (probe.first, probe.second)), None)
        found += _Timing(transport, stamps, mine).run()
    return found


class _Timing:
    """One round on one rank: a pair, or nothing to do but to make the same calls."""

    def __init__(self, transport: Transport, stamps: Stamps, probe: Probe | None) -> None:
        self._transport, self._stamps, self._probe = transport, stamps, probe
        self._first = probe is not None and transport.rank == probe.first
        self._ping_NB = torch.zeros((1, _PING_BYTES), dtype=torch.uint8)
        num_rows = 0 if probe is None else max(1, probe.num_bytes // _PROBE_ROW_BYTES)
        self._probe_NB = torch.zeros((num_rows, _PROBE_ROW_BYTES), dtype=torch.uint8)

    def run(self) -> list[PairTime]:
        trips = [self._timed(self._ping_NB, self._ping_NB) for _ in range(NUM_PINGS + 1)][1:]
        there_s = [self._timed(self._probe_NB, self._ping_NB) for _ in range(NUM_PROBES)]
        back_s = [self._timed(self._ping_NB, self._probe_NB) for _ in range(NUM_PROBES)]
        if self._probe is None or not self._first:
            return []
        first, second, size = self._probe.first, self._probe.second, self._probe_NB.nbytes
        least_s = min(trips) / 2

        def time_of(source: int, destination: int, seconds: list[float]) -> PairTime:
            # The other way is a ping, and its time is taken off; at least half is left, whatever the noise.
            best_s = max(min(seconds) - least_s, min(seconds) / 2, 1e-9)
            return PairTime(
                source=source, destination=destination, latency_s=median(trips) / 2, least_latency_s=least_s,
                bytes_per_s=size / best_s, probe_bytes=size,
            )  # fmt: skip

        return [time_of(first, second, there_s), time_of(second, first, back_s)]

    def _timed(self, there_NB: torch.Tensor, back_NB: torch.Tensor) -> float:
        """Seconds from the first rank's start of sending until the answer is here; on the other ranks of no meaning."""
        start = time.perf_counter()
        self._move(there_NB, from_first=True)
        self._move(back_NB, from_first=False)
        return time.perf_counter() - start

    def _move(self, rows_NB: torch.Tensor, *, from_first: bool) -> None:
        sends, receives = [0] * self._transport.world_size, [0] * self._transport.world_size
        sending = False
        if self._probe is not None:
            peer = self._probe.second if self._first else self._probe.first
            sending = self._first == from_first
            (sends if sending else receives)[peer] = len(rows_NB)
        self._stamps.wait(Collective.DISPATCH)
        self._transport.all_to_all_rows(rows_NB if sending else rows_NB[:0], sends, receives).wait()
        self._stamps.go_on()
