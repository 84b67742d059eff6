"""Which pairs are timed together, and what is found in their times. Expected values are arithmetic."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest
from preflight_facts import SETTING, rank

from epruntime.preflight.checks_exchange import check_measured, check_step_time, check_times, suspects
from epruntime.preflight.expectations import Expectations
from epruntime.preflight.findings import Severity
from epruntime.preflight.pairs import (
    FIRST_PROBE_BYTES,
    MAX_PROBE_BYTES,
    PairTime,
    Probe,
    merged,
    rounds_again,
    rounds_from_wire,
    rounds_to_wire,
    schedule,
    with_sizes,
)

LIMITS = Expectations(latency_s=1e-3, bytes_per_s=100e6)
MANY = [f"h{number // 8}" for number in range(64)]


@pytest.mark.parametrize("hosts", [["a"] * 4, ["a", "b"], ["a", "a", "b", "b", "c"], MANY[:24]])
def test_every_pair_is_timed_once_and_no_host_twice_in_a_round(hosts: list[str]) -> None:
    rounds = schedule(hosts)
    pairs = [(probe.first, probe.second) for probes in rounds for probe in probes]
    assert sorted(pairs) == list(combinations(range(len(hosts)), 2))
    for probes in rounds:
        taking_part = [name for probe in probes for name in {hosts[probe.first], hosts[probe.second]}]
        assert len(taking_part) == len(set(taking_part))


def test_of_many_pairs_each_pair_of_hosts_has_its_part() -> None:
    rounds = schedule(MANY, max_pairs=40)
    probes = [probe for probes in rounds for probe in probes]
    assert len(probes) == 40
    of_hosts = {tuple(sorted((MANY[probe.first], MANY[probe.second]))) for probe in probes}
    assert len(of_hosts) == 8 * 9 // 2  # 28 pairs of hosts, and each with itself


def test_one_rank_has_no_pairs() -> None:
    assert schedule(["a"]) == []


def test_rounds_survive_the_wire() -> None:
    rounds = schedule(["a", "b", "c", "a"])
    assert rounds_from_wire(rounds_to_wire(rounds)) == rounds


def _time(source: int, destination: int, us: float = 100.0, mb: float = 1000.0, size: int = 1) -> PairTime:
    return PairTime(
        source=source, destination=destination, latency_s=2e-6 * us, least_latency_s=1e-6 * us, bytes_per_s=1e6 * mb,
        probe_bytes=size,
    )  # fmt: skip


def test_larger_probes_last_a_tenth_of_a_second_at_the_slower_direction() -> None:
    rounds = [(Probe(first=0, second=1), Probe(first=2, second=3)), (Probe(first=0, second=2),)]
    times = [_time(0, 1, mb=3), _time(1, 0, mb=2), _time(2, 3, mb=1000), _time(3, 2, mb=2000), _time(0, 2, mb=1)]
    assert FIRST_PROBE_BYTES == 65536  # at 1 MB/s a probe of 100 kB would tell nothing new
    assert with_sizes(rounds, times) == [
        (Probe(first=0, second=1, num_bytes=200_000), Probe(first=2, second=3, num_bytes=4 * 65536))
    ]


def test_probes_grow_step_by_step_to_their_limit() -> None:
    """A link that lets 64 kB through at once looks fast at first: it must not be given megabytes then."""
    rounds, sizes = [(Probe(first=0, second=1),)], []
    while rounds:
        sizes.append(rounds[0][0].num_bytes)
        rounds = with_sizes(rounds, [_time(0, 1, mb=1e6), _time(1, 0, mb=1e6)])
    assert sizes == [2**16, 2**18, 2**20, 2**22]
    assert sizes[-1] == MAX_PROBE_BYTES


def test_of_two_measurements_the_larger_probe_and_the_lower_latency_count() -> None:
    found = merged([_time(1, 0, us=50, mb=100, size=10), _time(0, 1, us=9), _time(1, 0, us=70, mb=300, size=20)])
    assert found == [_time(0, 1, us=9), _time(1, 0, us=50, mb=300, size=20)]


def test_of_equally_large_probes_the_faster_counts() -> None:
    assert merged([_time(0, 1, mb=300, size=20), _time(0, 1, mb=200, size=20)]) == [_time(0, 1, mb=300, size=20)]


def test_a_second_look_at_some_pairs_takes_probes_as_large_as_before() -> None:
    rounds = schedule(["a", "a", "b"])
    times = [_time(0, 1, size=100), _time(1, 0, size=100), _time(1, 2, size=700), _time(2, 1, size=700)]
    assert rounds_again(rounds, times, {(1, 2)}) == [(Probe(first=1, second=2, num_bytes=700),)]
    assert rounds_again(rounds, times, set()) == []


RANKS = [rank(0, "a"), rank(1, "a"), rank(2, "b"), rank(3, "b")]
TIMES = [_time(s, d, us=100 if (s < 2) != (d < 2) else 20) for s in range(4) for d in range(4) if s != d]


def test_fast_pairs_are_no_finding() -> None:
    assert check_times(TIMES, RANKS, LIMITS) == []
    assert suspects(TIMES, RANKS, LIMITS) == set()
    assert check_measured(TIMES, 4) == []


def test_a_slow_pair_is_named_with_the_median_of_its_kind() -> None:
    times = [replace(t, bytes_per_s=150e6) if (t.source, t.destination) == (2, 1) else t for t in TIMES]
    assert suspects(times, RANKS, LIMITS) == {(1, 2)}
    (finding,) = check_times(times, RANKS, LIMITS)  # above what is expected of all, but far from the others
    assert (finding.id, finding.severity, finding.slots) == ("pair-slow", Severity.WARNING, (2, 1))
    assert finding.hosts == ("b", "a")
    assert "rank 2 to rank 1: 150 MB/s" in finding.found
    assert "1000 MB/s" in finding.expected
    assert "other hosts" in finding.expected


def test_a_late_pair_is_compared_with_its_own_kind() -> None:
    """600 µs between hosts is 6 times their median of 100; 100 µs on one host would be 5 times the 20 there."""
    times = [replace(t, least_latency_s=6e-4) if {t.source, t.destination} == {1, 2} else t for t in TIMES]
    (finding,) = check_times(times, RANKS, LIMITS)  # both directions, between the same hosts
    assert (finding.id, finding.slots) == ("pair-slow", (1, 2))
    assert "600 µs one way at best (the worst of 2 such directions between these hosts)" in finding.found
    assert "about 100 µs" in finding.expected


def test_small_differences_of_small_latencies_are_no_finding() -> None:
    times = [replace(t, least_latency_s=2.5e-4) if {t.source, t.destination} == {0, 1} else t for t in TIMES]
    assert check_times(times, RANKS, LIMITS) == []


def test_a_kind_that_is_slow_as_a_whole_is_one_finding_with_the_worst() -> None:
    times = [
        replace(t, bytes_per_s=60e6 if t.source != 3 else 50e6) if (t.source < 2) != (t.destination < 2) else t
        for t in TIMES
    ]  # fmt: skip
    (finding,) = check_times(times, RANKS, LIMITS)
    assert (finding.id, finding.slots) == ("bandwidth-low", (3, 0))
    assert "50 MB/s (other hosts; 8 of 8 directions are beyond it)" in finding.found
    assert finding.expected == "at least 100 MB/s"
    times = [replace(t, least_latency_s=2e-3) for t in TIMES]
    assert [finding.id for finding in check_times(times, RANKS, LIMITS)] == ["latency-high"] * 2  # one for each kind


def test_one_slow_direction_of_two_is_found() -> None:
    ranks = [rank(0, "a"), rank(1, "b")]
    found = check_times([_time(0, 1, mb=1000), _time(1, 0, mb=12)], ranks, LIMITS)
    assert [(finding.id, finding.slots) for finding in found] == [("bandwidth-low", (1, 0)), ("pair-slow", (1, 0))]


def test_exchanges_of_a_full_step_against_its_deadline() -> None:
    """512 tokens x 2 experts / 4 ranks x 1024 elements x 2 bytes = 512 KiB per pair and layer, there and back over 10
    layers: 10.5 MB, at 10 MB/s 1.05 s."""
    slow = [replace(t, bytes_per_s=10e6) if t.source == 3 else t for t in TIMES]
    quarter_s = 4 * 1.05
    assert check_step_time(slow, RANKS, replace(SETTING, step_timeout_s=quarter_s + 0.1)) == []
    (finding,) = check_step_time(slow, RANKS, replace(SETTING, step_timeout_s=quarter_s - 0.1))
    assert finding.id == "exchange-slow"
    assert "take about 1.05 s at 10 MB/s" in finding.found
    assert check_step_time([], [rank(0)], SETTING) == []


def test_pairs_left_out_for_want_of_time_are_told() -> None:
    (finding,) = check_measured(TIMES[:6], 64)
    assert finding.severity is Severity.INFO
    assert "of 2016 pairs" in finding.found
