"""A verdict as text, at most 120 columns wide."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from epruntime.preflight.facts import RankFacts
from epruntime.preflight.findings import Finding
from epruntime.preflight.pairs import PairTime
from epruntime.preflight.verdict import Verdict

WIDTH = 120
#: directions that are listed one by one.
MAX_LISTED = 16


def render(verdict: Verdict) -> str:
    """Ranks, pairs, findings, and the summary last, where a terminal ends."""
    parts = []
    if verdict.ranks:
        parts.append(_table(_RANK_HEAD, [_rank(rank) for rank in verdict.ranks]))
    if verdict.times:
        parts.append(_table(_KIND_HEAD, _kinds(verdict)))
        if 1 < len(verdict.times) <= MAX_LISTED:
            parts.append(_table(_PAIR_HEAD, [_pair(time, verdict.ranks) for time in verdict.times]))
    parts += [_finding(finding) for finding in verdict.findings]
    parts.append(_fold(verdict.summary()))
    return "\n\n".join(parts)


_RANK_HEAD = ("rank", "host", "address", "interface", "threads", "memory free", "needed", "files", "clock")
_KIND_HEAD = ("pairs", "directions", "latency", "worst", "bandwidth", "worst")
_PAIR_HEAD = ("from", "to", "latency", "bandwidth", "hosts")


def _rank(rank: RankFacts) -> tuple[str, ...]:
    machine = rank.machine
    return (
        str(rank.slot),
        _cut(rank.host, 18),
        _cut(machine.address or "-", 28),
        _cut(machine.interface or "-", 10),
        f"{machine.threads}/{machine.cores}",
        f"{machine.free_memory / 2**30:.1f} GiB",
        f"{rank.need.total / 2**30:.1f} GiB",
        "∞" if machine.open_files < 0 else str(machine.open_files),
        f"{rank.clock_offset_s * 1e3:+.1f} ms" if abs(rank.clock_offset_s) < 1 else f"{rank.clock_offset_s:+.1f} s",
    )


def _kinds(verdict: Verdict) -> list[tuple[str, ...]]:
    return [
        (
            pairs.kind,
            str(pairs.num_directions),
            _us(pairs.median_latency_s),
            _us(pairs.worst_latency_s),
            _mb(pairs.median_bytes_per_s),
            _mb(pairs.worst_bytes_per_s),
        )
        for pairs in verdict.pair_summaries()
    ]


def _pair(time: PairTime, ranks: Sequence[RankFacts]) -> tuple[str, ...]:
    source, destination = ranks[time.source], ranks[time.destination]
    hosts = _cut(source.host, 30)
    if source.host != destination.host:
        hosts += f" → {_cut(destination.host, 30)}"
    return str(source.slot), str(destination.slot), _us(time.latency_s), _mb(time.bytes_per_s), hosts


def _finding(finding: Finding) -> str:
    head = f"{finding.severity.upper()} {finding.id} ({finding.where})"
    lines = (("found", finding.found), ("expected", finding.expected), ("remedy", finding.remedy))
    return "\n".join([_fold(head), *(_fold(f"  {name + ':':<9} {text}", indent=12) for name, text in lines)])


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in (head, *rows)
    )


def _fold(text: str, *, indent: int = 2) -> str:
    return textwrap.fill(text, WIDTH, subsequent_indent=" " * indent, drop_whitespace=True)


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:.0f} µs"


def _mb(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e6:.0f} MB/s"
