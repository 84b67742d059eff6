"""VerifyReport: what every case gave, the verdict, and its exit code; as a dict for JSON, or as a table."""

from __future__ import annotations

import textwrap
from dataclasses import asdict, dataclass, field
from typing import Any

from epruntime.verify.against import AgainstReport
from epruntime.verify.compare import Difference
from epruntime.verify.facts import VerifyFacts
from epruntime.words import counted

BASELINE, IDENTICAL, DIFFERENT = "baseline", "identical", "different"
NOT_EXERCISED, SKIPPED = "not exercised", "skipped"
CAUGHT, NOT_CAUGHT = "caught", "not caught"

#: exit codes
HOLDS, DIFFERS, NOT_PROVEN = 0, 1, 3

_WIDTH = 120
_JSON_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class CaseReport:
    """One line of the table.

    Attributes:
        status: BASELINE, IDENTICAL, DIFFERENT, NOT_EXERCISED (identical, but what was to be varied did not happen) or
            SKIPPED (it makes no sense here); of the control CAUGHT or NOT_CAUGHT.
        counters: what proves that it happened. reason: why it is skipped or not exercised.
        num_tokens: output tokens that were compared of each request. digest: see Comparison.
    """

    name: str
    varied: str
    status: str
    counters: dict[str, int] = field(default_factory=dict)
    num_compared: int = 0
    num_different: int = 0
    num_tokens: int = 0
    digest: str = ""
    difference: Difference | None = None
    reason: str = ""
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class VerifyReport:
    """All of a verification.

    Attributes:
        cases: the baseline, then one for each variation. control: the negative control.
        against: what transformers itself gave, if that was asked for; against_refused: or why it gave nothing.
    """

    facts: VerifyFacts
    cases: tuple[CaseReport, ...]
    control: CaseReport
    against: AgainstReport | None = None
    against_refused: str = ""
    seconds: float = 0.0

    @property
    def exit_code(self) -> int:
        """HOLDS; DIFFERS: a case, or transformers, gave something else; NOT_PROVEN: nothing differs, but the control
        was not caught, something that was to be varied or compared did not happen, or all cases were skipped."""
        if any(case.status == DIFFERENT for case in self.cases) or (self.against is not None and not self.against.ok):
            return DIFFERS
        if self.control.status != CAUGHT or self.against_refused or not self._identical:
            return NOT_PROVEN
        return NOT_PROVEN if any(case.status == NOT_EXERCISED for case in self.cases) else HOLDS

    @property
    def _identical(self) -> list[str]:
        return [case.name for case in self.cases if case.status == IDENTICAL]

    @property
    def ok(self) -> bool:
        return self.exit_code == HOLDS

    @property
    def summary(self) -> str:
        """The verdict in a sentence."""
        different = [case.name for case in self.cases if case.status == DIFFERENT]
        missing = [case.name for case in self.cases if case.status == NOT_EXERCISED]
        if different:
            words = f"the contract does not hold: {', '.join(different)} gave other bits"
            if self.facts.invariance == "fast":
                words += "; invariance=fast does not promise equal ones"
            if self.against is not None and not self.against.ok:
                words += "; and transformers gives something else"
        elif self.against is not None and not self.against.ok:
            words = "the contract holds, but transformers gives something else"
        elif self.control.status != CAUGHT:
            words = "nothing is proven: the negative control was not caught"
        elif missing:
            words = f"no difference, but not all that {', '.join(missing)} should vary did happen"
        elif not self._identical:
            words = "nothing is proven: every case was skipped"
        else:
            number = counted(len(self._identical), "case")
            words = f"{number} bit for bit the same, and the negative control was caught"
            if self.facts.invariance == "fast":
                words = f"nothing differed here, which invariance=fast does not promise: {words}"
            else:
                words = f"the contract holds: {words}"
            if self.against_refused:
                words += "; but nothing was compared with transformers"
        skipped = [case.name for case in self.cases if case.status == SKIPPED]
        if skipped and self._identical:
            words += f"; skipped: {', '.join(skipped)}"
        return f"{words} ({self.seconds:.0f} s, --seed {self.facts.seed})"

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return {
            "version": _JSON_VERSION,
            "ok": self.ok,
            "exit_code": self.exit_code,
            "summary": self.summary,
            "seconds": self.seconds,
            "facts": self.facts.to_dict(),
            "cases": [asdict(case) for case in self.cases],
            "control": asdict(self.control),
            "against": None if self.against is None else self.against.to_dict(),
            "against_refused": self.against_refused,
        }


def render(report: VerifyReport) -> str:
    """Facts, table, differences, and the verdict last, where a terminal ends."""
    rows = [_HEAD, *(_row(case) for case in (*report.cases, report.control))]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    widths[1] = max(len(_HEAD[1]), min(widths[1], _WIDTH - sum(widths) + widths[1] - 2 * (len(widths) - 1)))
    parts = [_head(report.facts), "\n".join(line for row in rows for line in _lines(row, widths))]
    for case in report.cases:
        if case.difference is not None:
            number = f"{case.num_different} of {case.num_compared} outputs differ" if case.num_different else ""
            parts.append(_fold(f"{case.name}: {number}; the first: {case.difference}"))
        elif case.status in (NOT_EXERCISED, SKIPPED):
            parts.append(_fold(f"{case.name} {case.status}: {case.reason}"))
    if report.control.difference is not None:
        parts.append(_fold(f"control, as it should: {report.control.difference}"))
    if report.against is not None:
        parts.append("\n".join(map(_fold, report.against.lines())))
    if report.against_refused:
        parts.append(_fold(f"against transformers: nothing was compared: {report.against_refused}"))
    if any(case.status == DIFFERENT for case in report.cases):
        parts.append(_fold(_next_step(report)))
    elif {report.facts.expert_parallel_size, *report.facts.sizes} == {1}:
        parts.append("only EP 1 was run: --expert-parallel-size N varies ranks, placement and sizes as well")
    parts.append(_fold(report.summary))
    return "\n\n".join(parts)


_HEAD = ("case", "what proves it", "result", "outputs", "tokens", "hash", "s")


def _head(facts: VerifyFacts) -> str:
    signature = ", ".join(f"{name} {value}" for name, value in facts.signature.items())
    others = {name: value for name, value in facts.versions.items() if facts.signature.get(name) != value}
    versions = ", ".join(f"{name} {value}" for name, value in others.items())
    lines = (
        (
            "model",
            f"{facts.model} ({facts.architecture}, {facts.dtype}, {_millions(facts.num_parameters)} M parameters)",
        ),
        (
            "ranks",
            f"EP {facts.expert_parallel_size}, {counted(facts.threads_per_rank, 'thread')} each, on "
            f"{', '.join(facts.hosts)}; launcher {facts.launcher}, transport {facts.transport}, experts "
            f"{facts.experts_backend}, "
            f"invariance={facts.invariance}",
        ),
        ("kernels", signature),
        ("versions", versions),
        (
            "requests",
            f"{facts.num_requests}, {facts.num_greedy} of them greedy and the others sampled; {facts.prompts}, at most "
            f"{facts.longest_prompt} in and {facts.max_tokens} out; --seed {facts.seed}",
        ),
    )
    return "\n".join(_fold(f"{name + ':':<10}{text}", indent=10) for name, text in lines)


def _next_step(report: VerifyReport) -> str:
    kinds = dict.fromkeys(case.name.partition("-")[0] for case in report.cases if case.status == DIFFERENT)
    names = ",".join("sizes" if kind == "size" else kind for kind in kinds)
    return (
        f"to find out more: the same with --seed {report.facts.seed} --cases {names} --trace-layers, which names the "
        "layer; then on one rank, and on one host at a time"
    )


def _millions(number: int) -> str:
    return f"{number / 1e6:.0f}" if number >= 10e6 else f"{number / 1e6:.2g}"


def _row(case: CaseReport) -> tuple[str, ...]:
    if case.status == SKIPPED:
        return (case.name, case.varied, case.status, "", "", "", "")
    counters = ", ".join(f"{name} {value}" for name, value in case.counters.items())
    return (
        case.name,
        f"{case.varied}: {counters}" if counters else case.varied,
        case.status,
        str(case.num_compared),
        str(case.num_tokens),
        case.digest,
        f"{case.seconds:.1f}",
    )


def _lines(row: tuple[str, ...], widths: list[int]) -> list[str]:
    """A row, its second cell wrapped."""
    first, *more = textwrap.wrap(row[1], widths[1]) or [""]
    cells = (row[0], first, *row[2:])
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()]
    return lines + [" " * (widths[0] + 2) + text for text in more]


def _fold(text: str, *, indent: int = 2) -> str:
    return textwrap.fill(text, _WIDTH, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False)
