"""Which pairs of ranks are timed together, and what came of it. Pure; `exchange.py` does the timing.

In a round no host takes part in more than one pair, so that pairs do not take the network from each other.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

#: pairs that are timed at most; of more, each pair of hosts has its part.
MAX_PAIRS = 512
#: bytes of a pair's first bandwidth probe, and of its last at most. Each is up to GROWTH times the one before, and no
#: longer than about PROBE_S: a link that lets a burst through and is slow after it does not keep everybody waiting.
FIRST_PROBE_BYTES, MAX_PROBE_BYTES, GROWTH = 64 << 10, 4 << 20, 4
PROBE_S = 0.1


@dataclass(frozen=True, kw_only=True)
class PairTime:
    """What was measured from `source` to `destination`.

    Attributes:
        latency_s: half the median round trip of a small row; least_latency_s: half the shortest, in which other work
            on the same cores has little part. bytes_per_s: best rate of a probe of `probe_bytes`.
    """

    source: int
    destination: int
    latency_s: float
    least_latency_s: float
    bytes_per_s: float
    probe_bytes: int

    def to_dict(self) -> dict[str, Any]:
        return {
            "source": self.source,
            "destination": self.destination,
            "latency_us": round(self.latency_s * 1e6, 1),
            "least_latency_us": round(self.least_latency_s * 1e6, 1),
            "mb_per_s": round(self.bytes_per_s / 1e6, 1),
            "probe_bytes": self.probe_bytes,
        }


@dataclass(frozen=True, kw_only=True)
class Probe:
    """A pair to be timed: `first` begins. `num_bytes`: of each bandwidth probe, there and back."""

    first: int
    second: int
    num_bytes: int = FIRST_PROBE_BYTES


Round = tuple[Probe, ...]


def schedule(hosts: Sequence[str], *, max_pairs: int = MAX_PAIRS) -> list[Round]:
    """Rounds in which all pairs, or `max_pairs` of them, are timed.

    Every pair of hosts comes up early: first one pair of ranks for each of them, then a second one, and so on.

    Args:
        hosts: of each rank.
    """
    by_hosts: defaultdict[tuple[str, str], list[tuple[int, int]]] = defaultdict(list)
    for second in range(len(hosts)):
        for first in range(second):
            a, b = sorted((hosts[first], hosts[second]))
            by_hosts[a, b].append((first, second))
    depth = max(map(len, by_hosts.values()), default=0)
    ordered = [pairs[level] for level in range(depth) for pairs in by_hosts.values() if level < len(pairs)]
    rounds: list[list[Probe]] = []
    busy: list[set[str]] = []
    for first, second in ordered[:max_pairs]:
        needed = {hosts[first], hosts[second]}
        place = next((i for i, taken in enumerate(busy) if not taken & needed), len(rounds))
        if place == len(rounds):
            rounds.append([])
            busy.append(set())
        rounds[place].append(Probe(first=first, second=second))
        busy[place] |= needed
    return [tuple(probes) for probes in rounds]


def with_sizes(rounds: Sequence[Round], times: Sequence[PairTime]) -> list[Round]:
    """The rounds again, with probes as large as what was measured allows; pairs that are too slow for a larger probe,
    or were not measured, are left out."""
    slowest: dict[tuple[int, int], float] = {}
    for time in times:
        key = (min(time.source, time.destination), max(time.source, time.destination))
        slowest[key] = min(time.bytes_per_s, slowest.get(key, time.bytes_per_s))
    out = []
    for probes in rounds:
        larger = []
        for probe in probes:
            lasting = int(slowest.get((probe.first, probe.second), 0.0) * PROBE_S)
            size = min(lasting, GROWTH * probe.num_bytes, MAX_PROBE_BYTES)
            if size >= 2 * probe.num_bytes:
                larger.append(replace(probe, num_bytes=size))
        if larger:
            out.append(tuple(larger))
    return out


def rounds_again(
    rounds: Sequence[Round], times: Sequence[PairTime], wanted: Collection[tuple[int, int]]
) -> list[Round]:
    """The rounds again with the wanted pairs (lower rank first) only, and probes as large as they had at last."""
    sizes = {(time.source, time.destination): time.probe_bytes for time in times}
    out = []
    for probes in rounds:
        kept = [
            replace(probe, num_bytes=sizes.get((probe.first, probe.second), probe.num_bytes))
            for probe in probes
            if (probe.first, probe.second) in wanted
        ]
        if kept:
            out.append(tuple(kept))
    return out


def merged(times: Sequence[PairTime]) -> list[PairTime]:
    """One entry per source and destination: the lower latency, and the best rate of the largest probe."""
    found: dict[tuple[int, int], PairTime] = {}
    for time in times:
        old = found.get((time.source, time.destination))
        if old is not None:
            best = max(time, old, key=lambda one: (one.probe_bytes, one.bytes_per_s))
            time = replace(
                best,
                latency_s=min(time.latency_s, old.latency_s),
                least_latency_s=min(time.least_latency_s, old.least_latency_s),
            )
        found[time.source, time.destination] = time
    return [found[key] for key in sorted(found)]


def rounds_to_wire(rounds: Sequence[Round]) -> list[list[list[int]]]:
    return [[[probe.first, probe.second, probe.num_bytes] for probe in probes] for probes in rounds]


def rounds_from_wire(data: Sequence[Sequence[Sequence[int]]]) -> list[Round]:
    return [tuple(Probe(first=a, second=b, num_bytes=n) for a, b, n in probes) for probes in data]


def num_pairs(num_ranks: int) -> int:
    return num_ranks * (num_ranks - 1) // 2


def median(values: Sequence[float]) -> float:
    return statistics.median(values) if values else 0.0
