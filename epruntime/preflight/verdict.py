"""Verdict: all that preflight found, for people (table.py) and for programs (to_dict)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from epruntime.preflight.checks_exchange import OTHER_HOSTS, SAME_HOST, kind_of
from epruntime.preflight.facts import RankFacts, hosts_of
from epruntime.preflight.findings import Finding, Severity
from epruntime.preflight.pairs import PairTime, median

#: version of the JSON's form; it grows when a field changes its meaning or goes.
JSON_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class PairSummary:
    """All measured directions of one kind. Worst: the highest latency, the lowest rate."""

    kind: str
    num_directions: int
    median_latency_s: float
    worst_latency_s: float
    median_bytes_per_s: float
    worst_bytes_per_s: float


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The result of a preflight.

    Attributes:
        ranks: in slot order. transport: its name; "" if it was not reached.
        times: of each measured direction. findings: worst first. seconds: that it took.
    """

    ranks: tuple[RankFacts, ...]
    findings: tuple[Finding, ...]
    times: tuple[PairTime, ...] = ()
    transport: str = ""
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Nothing is in the way of a start; there may be warnings."""
        return not self.errors

    @property
    def errors(self) -> list[Finding]:
        return self.of(Severity.ERROR)

    @property
    def warnings(self) -> list[Finding]:
        return self.of(Severity.WARNING)

    def of(self, severity: Severity) -> list[Finding]:
        return [finding for finding in self.findings if finding.severity is severity]

    def pair_summaries(self) -> list[PairSummary]:
        """One entry for each kind of pair that was measured."""
        found = []
        for kind in (SAME_HOST, OTHER_HOSTS):
            group = [time for time in self.times if kind_of(time, self.ranks) == kind]
            if group:
                latencies, rates = [t.latency_s for t in group], [t.bytes_per_s for t in group]
                found.append(
                    PairSummary(
                        kind=kind,
                        num_directions=len(group),
                        median_latency_s=median(latencies),
                        worst_latency_s=max(latencies),
                        median_bytes_per_s=median(rates),
                        worst_bytes_per_s=min(rates),
                    )
                )
        return found

    def summary(self) -> str:
        """One line."""
        counts = [(len(self.errors), "error"), (len(self.warnings), "warning")]
        found = ", ".join(f"{number} {word}{'s' * (number > 1)}" for number, word in counts if number)
        hosts = len(hosts_of(self.ranks))
        words = [
            f"preflight {'passed' if self.ok else 'failed'} in {self.seconds:.2f} s"
            + (f" with {found}" if found else ""),
            f"{len(self.ranks)} rank{'s' * (len(self.ranks) != 1)} on {hosts} host{'s' * (hosts != 1)}"
            + (f", {self.transport}" if self.transport else ""),
        ]
        words += [
            f"{pairs.kind}: {pairs.median_latency_s * 1e6:.0f} µs, {pairs.median_bytes_per_s / 1e6:.0f} MB/s"
            for pairs in self.pair_summaries()
        ]
        return "; ".join(words)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return {
            "version": JSON_VERSION,
            "ok": self.ok,
            "summary": self.summary(),
            "seconds": round(self.seconds, 3),
            "transport": self.transport,
            "findings": [finding.to_dict() for finding in self.findings],
            "ranks": [rank.to_dict() for rank in self.ranks],
            "pairs": [time.to_dict() for time in self.times],
        }


def worst_first(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    return tuple(sorted(findings, key=lambda finding: finding.severity.order))
