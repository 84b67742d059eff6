"""Many ranks with the same trouble are one finding for a host, or a pair of hosts, with the worst case and a count."""

from __future__ import annotations

from dataclasses import replace

import pytest
from preflight_facts import SETTING, rank

from epruntime.preflight import checks_hosts
from epruntime.preflight.checks_exchange import check_times
from epruntime.preflight.checks_network import Call, check_addresses, check_calls
from epruntime.preflight.expectations import Expectations
from epruntime.preflight.findings import Severity
from epruntime.preflight.pairs import PairTime

LIMITS = Expectations(latency_s=1.0, bytes_per_s=1.0)
RANKS = [rank(slot, "ab"[slot // 8]) for slot in range(16)]


def _times(late_us: dict[tuple[int, int], float]) -> list[PairTime]:
    """All directions of 16 ranks on two hosts: 100 µs, but for those that are named."""
    return [
        PairTime(
            source=source, destination=destination, latency_s=1e-3, bytes_per_s=1e9, probe_bytes=1,
            least_latency_s=late_us.get((source, destination), 100.0) * 1e-6,
        )
        for source in range(16) for destination in range(16) if source != destination
    ]  # fmt: skip


def test_an_oversubscribed_host_is_one_finding() -> None:
    """23 of the 56 directions on host a are late, and one between the hosts."""
    late = {(s, d): 600.0 + s for s in range(8) for d in range(8) if s != d and (s * d) % 2}
    late |= {(s, (s + 2) % 8): 700.0 for s in range(0, 8, 2)} | {(6, 1): 5000.0, (3, 9): 800.0}
    on_host_a = [pair for pair in late if pair != (3, 9)]
    found = check_times(_times(late), RANKS, LIMITS)
    assert [(finding.id, finding.hosts) for finding in found] == [("pair-slow", ("a",)), ("pair-slow", ("a", "b"))]
    one_host, between = found
    assert f"rank 6 to rank 1: 5000 µs one way at best (the worst of {len(on_host_a)} such" in one_host.found
    assert set(one_host.slots) == {slot for pair in on_host_a for slot in pair}
    assert one_host.slots[:2] == (6, 1)
    assert between.found == "rank 3 to rank 9: 800 µs one way at best"
    assert between.slots == (3, 9)


def test_calls_that_strangers_answer_are_counted() -> None:
    calls = [
        Call(source=source, target=target, address="10.0.0.2:1", answered_by=-1, error="")
        for source in range(8)
        for target in range(8, 16)
    ]
    (finding,) = check_calls(calls, RANKS)
    assert (finding.id, finding.slots, finding.hosts) == ("wrong-peer", tuple(range(16)), ("a", "b"))
    assert "rank 0 called rank 8" in finding.found
    assert "a stranger answered (and 63 more such calls)" in finding.found


@pytest.mark.parametrize(
    ("limits", "slots", "severity", "said"),
    [
        ([200] * 4, (0, 1, 2, 3), Severity.WARNING, "200 open files"),
        ([200, 70, 65536, -1], (0, 1), Severity.ERROR, "70 open files"),
        ([65536] * 4, (), None, ""),
    ],
)
def test_open_files_are_one_finding_for_a_host(limits, slots, severity, said) -> None:
    ranks = [rank(slot, open_files=limit) for slot, limit in enumerate(limits)]
    found = checks_hosts.check_open_files(ranks)
    assert [(f.slots, f.severity) for f in found] == ([(slots, severity)] if slots else [])
    assert said in "".join(finding.found for finding in found)


def test_no_address_is_one_finding_for_a_host() -> None:
    ranks = [rank(slot, "ab"[slot // 2], address="" if slot < 2 else "10.0.0.2") for slot in range(4)]
    found = [finding for finding in check_addresses(ranks) if finding.id == "address-none"]
    assert [(finding.slots, finding.hosts) for finding in found] == [((0, 1), ("a",))]


def test_locked_memory_is_one_finding_for_a_host() -> None:
    ranks = [rank(slot, locked_memory=(slot + 1) << 20) for slot in range(4)]
    (finding,) = checks_hosts.check_locked_memory(ranks, replace(SETTING, device="cuda"))
    assert finding.slots == (0, 1, 2, 3)
    assert finding.found.startswith("1 MiB")


@pytest.mark.parametrize(
    ("experts", "ranks", "idle", "said"),
    [
        (4, 4, (), ""),
        (8, 3, (), ""),
        (0, 16, (), ""),  # not known
        (4, 5, (4,), "5 ranks for 4 experts per layer: 1 rank has none"),
        (1, 3, (1, 2), "3 ranks for 1 expert per layer: 2 ranks have none"),
    ],
)
def test_more_ranks_than_experts(experts, ranks, idle, said) -> None:
    setting = replace(SETTING, num_physical_experts=experts)
    found = checks_hosts.check_idle_ranks([rank(slot) for slot in range(ranks)], setting)
    assert [(f.id, f.severity, f.slots) for f in found] == ([("ranks-idle", Severity.WARNING, idle)] if idle else [])
    assert said in "".join(finding.found for finding in found)
