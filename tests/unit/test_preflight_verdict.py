"""The verdict as people and programs see it, and the page that explains each finding."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from preflight_facts import rank, two_hosts

from epruntime.preflight.facts import MachineFacts, RankFacts
from epruntime.preflight.findings import CATALOG, Severity, finding
from epruntime.preflight.pairs import PairTime
from epruntime.preflight.table import MAX_LISTED, WIDTH, render
from epruntime.preflight.verdict import Verdict, worst_first

ROOT = Path(__file__).parents[2]


def _times(ranks: list[RankFacts]) -> tuple[PairTime, ...]:
    return tuple(
        PairTime(source=s, destination=d, latency_s=1e-4, least_latency_s=5e-5, bytes_per_s=1e9, probe_bytes=4096)
        for s in range(len(ranks)) for d in range(len(ranks)) if s != d
    )  # fmt: skip


def _verdict(*findings: str, ranks: list[RankFacts] | None = None) -> Verdict:
    ranks = ranks or two_hosts()
    made = [finding(id, slots=(3,), hosts=("b",), found="x", expected="y") for id in findings]
    return Verdict(
        ranks=tuple(ranks), findings=worst_first(made), times=_times(ranks), transport="gloo", seconds=0.25
    )  # fmt: skip


def test_errors_decide_and_come_first() -> None:
    verdict = _verdict("pairs-not-measured", "clock-skew", "memory-short")
    assert not verdict.ok
    assert [f.severity for f in verdict.findings] == [Severity.ERROR, Severity.WARNING, Severity.INFO]
    assert verdict.summary().startswith("preflight failed in 0.25 s with 1 error, 1 warning; 4 ranks on 2 hosts, gloo;")
    assert "other hosts: 100 µs, 1000 MB/s" in verdict.summary()
    assert _verdict("clock-skew", "mtu-differs").ok
    assert "passed in 0.25 s with 2 warnings" in _verdict("clock-skew", "mtu-differs").summary()


def test_json_holds_everything_in_plain_values() -> None:
    data = json.loads(json.dumps(_verdict("memory-short").to_dict()))
    assert (data["version"], data["ok"], data["transport"]) == (1, False, "gloo")
    assert data["findings"] == [
        {
            "id": "memory-short", "severity": "error", "slots": [3], "hosts": ["b"], "found": "x", "expected": "y",
            "remedy": CATALOG["memory-short"].remedy,
        }
    ]  # fmt: skip
    assert [entry["slot"] for entry in data["ranks"]] == [0, 1, 2, 3]
    assert data["ranks"][3]["host"] == "b"
    assert data["ranks"][0]["memory_needed"] == {
        "weights": 2**30, "kv": 2**30, "exchange": 1000, "libraries": 1000
    }  # fmt: skip
    assert len(data["pairs"]) == 12
    assert data["pairs"][0] == {
        "source": 0, "destination": 1, "latency_us": 100.0, "least_latency_us": 50.0, "mb_per_s": 1000.0,
        "probe_bytes": 4096,
    }  # fmt: skip


def test_the_table_is_at_most_120_columns_wide() -> None:
    long = "a-host-with-a-name-that-no-column-has-room-for.example.org"
    ranks = [
        rank(slot, long, address="2001:db8:1234:5678:9abc:def0:1234:5678", interface="enp0s31f6np0", open_files=1048576)
        for slot in range(4)
    ]
    words = (
        "a finding with so many words that they need more than one line of any terminal, and then some more of them "
        * 3
    )
    verdict = replace(
        _verdict(ranks=ranks), findings=(finding("clock-skew", slots=(0,), hosts=(long,), found=words, expected=words),)
    )
    text = render(verdict)
    assert max(map(len, text.splitlines())) <= WIDTH == 120
    assert "WARNING clock-skew (rank 0 on host a-host-with" in text
    assert "remedy:" in text
    assert text.splitlines()[-1].startswith("preflight passed")


@pytest.mark.parametrize(("num_ranks", "listed"), [(1, False), (4, True), (16, False)])
def test_few_pairs_are_listed_one_by_one_and_many_are_summed_up(num_ranks: int, listed: bool) -> None:
    text = render(_verdict(ranks=[rank(slot, "a" if slot % 2 else "b") for slot in range(num_ranks)]))
    assert ("from  to" in text) == listed
    assert ("directions" in text) == (num_ranks > 1)
    assert num_ranks * (num_ranks - 1) <= MAX_LISTED or not listed


def test_facts_with_a_field_missing_are_a_difference_in_version() -> None:
    from epruntime.errors import ProtocolError

    with pytest.raises(ProtocolError, match=r"lack 'boot_id'.*differ in version"):
        MachineFacts.from_wire({"host_name": "a"})


@pytest.mark.parametrize("id", CATALOG)
def test_every_finding_is_documented(id: str) -> None:
    text = (ROOT / "docs/preflight.md").read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith(f"| `{id}` |")]
    assert len(rows) == 1
    assert f"| {CATALOG[id].severity}" in rows[0]


def test_the_page_names_no_finding_that_there_is_not() -> None:
    text = (ROOT / "docs/preflight.md").read_text(encoding="utf-8")
    named = {line.split("`")[1] for line in text.splitlines() if line.startswith("| `") and "| error" in line.lower()}
    assert named <= set(CATALOG)
