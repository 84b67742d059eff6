"""Checks of what came through the transport, and how fast. Pure functions: measurements in, findings out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from epruntime.preflight.expectations import EXPECTED, Expectations
from epruntime.preflight.facts import RankFacts, Setting
from epruntime.preflight.findings import Finding, finding
from epruntime.preflight.pairs import PairTime, median, num_pairs
from epruntime.preflight.payload import Mismatch

SAME_HOST, OTHER_HOSTS = "same host", "other hosts"


def check_mismatches(mismatches: Sequence[Mismatch], ranks: Sequence[RankFacts]) -> list[Finding]:
    """Every byte came where it belongs. One finding per kind and destination.

    Args:
        ranks: by their place in the exchange.
    """
    groups: defaultdict[tuple[str, int], list[Mismatch]] = defaultdict(list)
    for mismatch in mismatches:
        groups[mismatch.kind, mismatch.destination].append(mismatch)
    found = []
    for (kind, destination), group in groups.items():
        first = group[0]
        involved = dict.fromkeys([destination, *(mismatch.source for mismatch in group)])
        more = f" (and {len(group) - 1} more)" if len(group) > 1 else ""
        found.append(
            finding(
                f"exchange-{kind}",
                slots=tuple(ranks[place].slot for place in involved),
                hosts=tuple(dict.fromkeys(ranks[place].host for place in involved)),
                found=f"rank {destination} received from rank {first.source}: {first.detail}{more}",
                expected="what that rank sent, in order and bit by bit",
            )
        )
    return found


def kind_of(time: PairTime, ranks: Sequence[RankFacts]) -> str:
    same = ranks[time.source].host == ranks[time.destination].host
    return SAME_HOST if same else OTHER_HOSTS


@dataclass(frozen=True, kw_only=True)
class _Kind:
    """All directions of one kind, and what is usual among them."""

    name: str
    times: list[PairTime]
    expected: Expectations

    @property
    def usual_s(self) -> float:
        return median([time.least_latency_s for time in self.times])

    @property
    def usual_rate(self) -> float:
        return median([time.bytes_per_s for time in self.times])

    def late(self) -> list[PairTime]:
        return [time for time in self.times if time.least_latency_s > self.expected.latency_s]

    def thin(self) -> list[PairTime]:
        return [time for time in self.times if time.bytes_per_s < self.expected.bytes_per_s]

    def later_than_others(self) -> list[PairTime]:
        most_s = max(self.expected.slower_latency * self.usual_s, self.expected.slower_latency_s)
        return [time for time in self.times if time.least_latency_s > most_s]

    def thinner_than_others(self) -> list[PairTime]:
        least = self.expected.slower_rate * self.usual_rate
        return [time for time in self.times if time.bytes_per_s < least]


def _kinds(times: Sequence[PairTime], ranks: Sequence[RankFacts], expected: Expectations) -> list[_Kind]:
    groups: defaultdict[str, list[PairTime]] = defaultdict(list)
    for time in times:
        groups[kind_of(time, ranks)].append(time)
    return [_Kind(name=name, times=group, expected=expected) for name, group in groups.items()]


def suspects(
    times: Sequence[PairTime], ranks: Sequence[RankFacts], expected: Expectations = EXPECTED
) -> set[tuple[int, int]]:
    """Pairs (lower rank first) of which `check_times` would say something: worth another look, for other work on the
    same cores can make any pair slow for a moment."""
    found: set[tuple[int, int]] = set()
    for kind in _kinds(times, ranks, expected):
        for time in (*kind.late(), *kind.thin(), *kind.later_than_others(), *kind.thinner_than_others()):
            found.add((min(time.source, time.destination), max(time.source, time.destination)))
    return found


def check_times(
    times: Sequence[PairTime], ranks: Sequence[RankFacts], expected: Expectations = EXPECTED
) -> list[Finding]:
    """Latency and bandwidth of every pair against what is expected, and against the median of its kind.

    Of a kind that is slow as a whole there is one finding, with the worst pair; of pairs that are slower than others
    one for each pair of hosts.
    """
    found = []
    for kind in _kinds(times, ranks, expected):
        if late := kind.late():
            worst = max(late, key=lambda time: time.least_latency_s)
            found.append(
                _of_pair(
                    "latency-high", worst, ranks,
                    found=f"{_us(worst.least_latency_s)} one way at best ({_share(late, kind)})",
                    expected=f"at most {_us(expected.latency_s)}",
                )
            )  # fmt: skip
        if thin := kind.thin():
            worst = min(thin, key=lambda time: time.bytes_per_s)
            found.append(
                _of_pair(
                    "bandwidth-low", worst, ranks,
                    found=f"{_mb(worst.bytes_per_s)} ({_share(thin, kind)})",
                    expected=f"at least {_mb(expected.bytes_per_s)}",
                )
            )  # fmt: skip
        found += _slower_than_others(kind, ranks)
    return found


def _slower_than_others(kind: _Kind, ranks: Sequence[RankFacts]) -> list[Finding]:
    """One finding for each pair of hosts, about its worst direction."""
    later, thinner = kind.later_than_others(), kind.thinner_than_others()
    groups: defaultdict[frozenset[str], list[PairTime]] = defaultdict(list)
    for time in kind.times:
        if time in later or time in thinner:
            groups[frozenset((ranks[time.source].host, ranks[time.destination].host))].append(time)
    found = []
    for group in groups.values():
        worst = max(
            group, key=lambda time: max(time.least_latency_s / kind.usual_s, kind.usual_rate / time.bytes_per_s)
        )
        words = []
        if worst in later:
            words.append((f"{_us(worst.least_latency_s)} one way at best", f"about {_us(kind.usual_s)}"))
        if worst in thinner:
            words.append((_mb(worst.bytes_per_s), f"about {_mb(kind.usual_rate)}"))
        others = [time for time in group if time is not worst]
        more = f" (the worst of {len(group)} such directions between these hosts)" if others else ""
        found.append(
            _of_pair(
                "pair-slow", worst, ranks, others=others,
                found=" and ".join(measured for measured, _ in words) + more,
                expected=" and ".join(usual for _, usual in words) + f", the median of {kind.name}",
            )
        )  # fmt: skip
    return found


def check_step_time(
    times: Sequence[PairTime], ranks: Sequence[RankFacts], setting: Setting, expected: Expectations = EXPECTED
) -> list[Finding]:
    """The exchanges of a full step at the slowest rate leave time for the rest of it.

    A full step: every rank computes `step_tokens` tokens and sends each of them to its experts in every MoE layer,
    spread evenly over all ranks, and as much comes back (a row per expert).
    """
    if not times:
        return []
    slowest = min(times, key=lambda t: t.bytes_per_s)
    row = setting.hidden_size * setting.dtype_bytes
    to_one = setting.step_tokens * setting.top_k / len(ranks) * row  # bytes to one rank in one layer, one way
    seconds = 2 * to_one * setting.num_moe_layers / slowest.bytes_per_s
    most = expected.exchange_part * setting.step_timeout_s
    if seconds <= most:
        return []
    return [
        _of_pair(
            "exchange-slow", slowest, ranks,
            found=f"the exchanges of a step of {setting.step_tokens} tokens per rank take about {seconds:.3g} s at "
            f"{_mb(slowest.bytes_per_s)}",
            expected=f"at most {most:g} s ({expected.exchange_part:.0%} of step_timeout_s)",
        )
    ]  # fmt: skip


def check_measured(times: Sequence[PairTime], num_ranks: int) -> list[Finding]:
    """Says so if there was no time for all pairs."""
    measured = len({frozenset((t.source, t.destination)) for t in times})
    total = num_pairs(num_ranks)
    if measured >= total:
        return []
    return [
        finding(
            "pairs-not-measured",
            found=f"{measured} of {total} pairs of ranks were timed, within the time there is for it",
            expected="a pair of ranks for each pair of hosts, at least",
        )
    ]


def _of_pair(
    id: str,
    time: PairTime,
    ranks: Sequence[RankFacts],
    *,
    found: str,
    expected: str,
    others: Sequence[PairTime] = (),
) -> Finding:
    """About the direction `time`; of `others`, of the same hosts, the ranks are named."""
    source, destination = ranks[time.source], ranks[time.destination]
    involved = (ranks[place] for one in (time, *others) for place in (one.source, one.destination))
    return finding(
        id,
        slots=tuple(dict.fromkeys(rank.slot for rank in involved)),
        hosts=tuple(dict.fromkeys((source.host, destination.host))),
        found=f"rank {source.slot} to rank {destination.slot}: {found}",
        expected=expected,
    )


def _share(part: Sequence[PairTime], kind: _Kind) -> str:
    return f"{kind.name}; {len(part)} of {len(kind.times)} directions are beyond it"


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:.0f} µs" if seconds < 1e-2 else f"{seconds * 1e3:.0f} ms"


def _mb(bytes_per_s: float) -> str:
    rate = bytes_per_s / 1e6
    return f"{rate:.0f} MB/s" if rate >= 100 else f"{rate:.3g} MB/s"
