"""Every check of facts: silent on healthy ranks, and with its finding, place and values on each fault."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from preflight_facts import GIB, SETTING, SIGNATURE, VERSIONS, rank, two_hosts

from epruntime.preflight import checks_hosts, checks_network, checks_software
from epruntime.preflight.checks_network import Call
from epruntime.preflight.facts import MemoryNeed, RankFacts
from epruntime.preflight.findings import Finding, Severity

CHECKS: dict[str, Callable[[Sequence[RankFacts]], list[Finding]]] = {
    "versions": lambda ranks: checks_software.check_versions(ranks, SETTING),
    "kernels": checks_software.check_kernels,
    "checkpoint": lambda ranks: checks_software.check_checkpoint(ranks, SETTING),
    "host names": checks_hosts.check_host_names,
    "addresses": checks_network.check_addresses,
    "interfaces": checks_network.check_interfaces,
    "memory": checks_hosts.check_memory,
    "shared memory": lambda ranks: checks_hosts.check_shared_memory(ranks, replace(SETTING, launcher="ray")),
    "open files": checks_hosts.check_open_files,
    "locked memory": lambda ranks: checks_hosts.check_locked_memory(ranks, replace(SETTING, device="cuda")),
    "cores": checks_hosts.check_cores,
    "clocks": checks_hosts.check_clocks,
}


def _all(ranks: Sequence[RankFacts]) -> list[Finding]:
    return [finding for check in CHECKS.values() for finding in check(ranks)]


def test_nothing_is_found_on_healthy_ranks() -> None:
    assert _all(two_hosts()) == []
    assert _all([rank(0)]) == []
    only = {"address": "", "interface": "", "address_by": "the only rank", "port": 0}
    assert _all([rank(0, **only)]) == []  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("facts", "id", "severity", "words"),
    [
        ({"versions": {**VERSIONS, "transformers": "5.16.0"}}, "versions-differ", "error", "transformers 5.16.0"),
        ({"versions": {**VERSIONS, "torch": "2.12.0"}}, "versions-differ", "error", "torch 2.12.0"),
        ({"versions": {**VERSIONS, "epruntime": "0.0.9"}}, "versions-differ", "error", "epruntime 0.0.9"),
        ({"versions": {**VERSIONS, "python": "3.12.1"}}, "python-differs", "warning", "python 3.12.1"),
        ({"signature": {**SIGNATURE, "isa": "avx512"}}, "kernels-differ", "error", "isa 'avx512'"),
        ({"checkpoint": "", "checkpoint_error": "config.json: no such file"}, "checkpoint-missing", "error", "no such"),
        ({"checkpoint": "badbadbadbad77"}, "checkpoint-differs", "error", "badbadbadbad"),
        ({"address": "", "address_by": "no route"}, "address-none", "error", "no route"),
        ({"address": "10.0.9.9"}, "address-uneven", "warning", "10.0.0.2, 10.0.9.9"),
        ({"interface": "docker0"}, "interface-virtual", "warning", "docker0"),
        ({"mtu": 9000}, "mtu-differs", "warning", "MTU 9000"),
        ({"open_files": 70}, "open-files-low", "error", "70 open files"),
        ({"open_files": 200}, "open-files-low", "warning", "200 open files"),
        ({"free_shm": 64 << 20}, "shm-low", "warning", "64 MiB"),
        ({"locked_memory": 8 << 20}, "locked-memory-low", "warning", "8 MiB"),
        ({"threads": 7}, "cpus-oversubscribed", "warning", "9 compute threads of 2 ranks share 8 cores"),
        ({"boot_id": "another"}, "host-names-equal", "warning", "2 machines are named 'b'"),
        ({"free_memory": 3 * GIB}, "memory-short", "error", "3 GiB free"),
    ],
)  # fmt: skip
def test_one_fault_is_one_finding_with_its_place(facts: dict, id: str, severity: str, words: str) -> None:
    (finding,) = _all(two_hosts(**facts))
    assert (finding.id, finding.severity, finding.hosts) == (id, severity, ("b",))
    assert 3 in finding.slots
    assert 0 not in finding.slots
    assert words in finding.found
    assert finding.remedy
    assert finding.expected


def test_plain_kernels_are_worth_a_warning() -> None:
    plain = {**SIGNATURE, "extension": "plain"}
    (finding,) = checks_software.check_kernels([rank(0, signature=plain), rank(1, signature=plain)])
    assert (finding.id, finding.severity, finding.slots) == ("kernels-plain", Severity.WARNING, (0, 1))


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.1.1", "::1", "localhost"])
def test_loopback_between_hosts(address: str) -> None:
    ranks = [rank(0, "a"), *(rank(slot, "b", address=address, interface="lo") for slot in (1, 2))]
    (finding,) = checks_network.check_addresses(ranks)
    assert (finding.id, finding.severity, finding.slots) == ("address-loopback", Severity.ERROR, (1, 2))
    assert address in finding.found


def test_one_address_on_two_hosts() -> None:
    ranks = [rank(slot, host, address="172.17.0.1", interface="eth0") for slot, host in ((0, "a"), (1, "b"))]
    (finding,) = checks_network.check_addresses(ranks)
    assert (finding.id, finding.hosts, finding.severity) == ("address-shared", ("a", "b"), Severity.ERROR)
    assert "172.17.0.1" in finding.found


def test_loopback_is_right_where_all_ranks_share_a_host() -> None:
    assert checks_network.check_addresses([rank(slot, address="127.0.0.1", interface="lo") for slot in (0, 1)]) == []


def test_memory_of_ranks_on_one_host_adds_up() -> None:
    need = MemoryNeed(weights=4 * GIB, kv=GIB)
    assert checks_hosts.check_memory([rank(0, need=need), rank(1, "b", need=need)]) == []
    (finding,) = checks_hosts.check_memory([rank(0, need=need), rank(1, need=need, free_memory=9 * GIB)])
    assert (finding.id, finding.slots) == ("memory-short", (0, 1))
    assert "10 GiB needed by 2 ranks (weights 8 GiB, KV cache 2 GiB" in finding.found
    assert "9 GiB free" in finding.found  # the rank that sees less, as in a control group of its own


def test_what_is_estimated_may_only_make_memory_tight() -> None:
    (finding,) = checks_hosts.check_memory([rank(0, need=MemoryNeed(weights=9 * GIB, exchange=GIB, libraries=GIB))])
    assert (finding.id, finding.severity) == ("memory-tight", Severity.WARNING)


def test_no_limit_of_open_files_is_enough_for_many_ranks() -> None:
    assert checks_hosts.check_open_files([rank(slot, open_files=-1) for slot in range(100)]) == []
    found = checks_hosts.check_open_files([rank(slot, open_files=400) for slot in range(100)])
    assert [finding.severity for finding in found] == [Severity.ERROR]  # 64 + 4 * 99 + 3 = 463 needed


@pytest.mark.parametrize(
    ("offset_s", "error_s", "found"),
    [(0.5, 0.0, False), (-0.9, 0.0, False), (2.0, 0.01, True), (-2.0, 0.01, True), (2.0, 1.5, False)],
)
def test_clock_skew_beyond_what_the_measurement_may_be_wrong_by(offset_s: float, error_s: float, found: bool) -> None:
    ranks = [rank(0), replace(rank(1, "b"), clock_offset_s=offset_s, clock_error_s=error_s)]
    findings = checks_hosts.check_clocks(ranks)
    assert [(finding.id, finding.hosts) for finding in findings] == ([("clock-skew", ("b",))] if found else [])
    if found:
        assert ("ahead of" if offset_s > 0 else "behind") in findings[0].found


def test_calls_that_came_through_are_no_finding() -> None:
    calls = [Call(source=0, target=1, address="10.0.0.2:4000", answered_by=1), Call(source=1, target=-1, address="s:1")]
    assert checks_network.check_calls(calls, [rank(0), rank(1, "b")]) == []


def test_calls_in_vain_are_one_finding_per_pair_of_hosts() -> None:
    ranks = two_hosts()
    calls = [
        Call(source=source, target=target, address=f"10.0.0.2:{4000 + target}", error="no answer within 3 s")
        for source in (0, 1) for target in (2, 3)
    ]  # fmt: skip
    calls += [Call(source=2, target=-1, address="10.0.0.1:29500", error="Connection refused")]
    first, store = checks_network.check_calls(calls, ranks)
    assert (first.id, first.slots, first.hosts) == ("unreachable", (0, 1, 2, 3), ("a", "b"))
    assert "rank 0 on host a cannot reach rank 2 on host b at 10.0.0.2:4002: no answer within 3 s" in first.found
    assert "3 more" in first.found
    assert (store.slots, store.hosts) == ((2,), ("b",))
    assert "the coordinator's store at 10.0.0.1:29500: Connection refused" in store.found


@pytest.mark.parametrize(("answered_by", "words"), [(0, "rank 0 answered"), (-1, "a stranger answered")])
def test_an_address_that_leads_to_another(answered_by: int, words: str) -> None:
    call = Call(source=0, target=1, address="172.17.0.1:4000", answered_by=answered_by)
    (finding,) = checks_network.check_calls([call], [rank(0), rank(1, "b")])
    assert (finding.id, finding.severity, finding.slots) == ("wrong-peer", Severity.ERROR, (0, 1))
    assert words in finding.found
