"""Checks of addresses, and of who reaches whom. Pure functions: facts in, findings out."""

from __future__ import annotations

import ipaddress
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from epruntime.preflight.expectations import VIRTUAL_INTERFACES
from epruntime.preflight.facts import RankFacts, by_host, hosts_of, slots_of
from epruntime.preflight.findings import Finding, finding
from epruntime.words import counted


@dataclass(frozen=True, kw_only=True)
class Call:
    """A TCP connection that one rank tried to another's address, or to the coordinator's store.

    Attributes:
        source: slot of the caller. target: slot that was called; -1: the store. address: host:port that was called.
        answered_by: slot that answered; -1: nobody, or the store, which says nothing. error: why there was no answer.
    """

    source: int
    target: int
    address: str
    answered_by: int = -1
    error: str = ""


def check_addresses(ranks: Sequence[RankFacts]) -> list[Finding]:
    """Each host has an address of its own that can lead to it, and its ranks agree on it."""
    if len(ranks) < 2:
        return []
    found = [
        finding(
            "address-none",
            slots=slots_of(members),
            hosts=(host,),
            found=f"no address for the other ranks: {members[0].machine.address_by}",
            expected="an address of this host that the others reach",
        )
        for host, members in by_host(rank for rank in ranks if not rank.machine.address).items()
    ]
    hosts = by_host(rank for rank in ranks if rank.machine.address)
    if len(hosts) > 1:
        found += _loopback(hosts)
        found += _shared(hosts)
    for host, members in hosts.items():
        addresses = sorted({rank.machine.address for rank in members})
        if len(addresses) > 1:
            found.append(
                finding(
                    "address-uneven",
                    slots=slots_of(members),
                    hosts=(host,),
                    found=f"ranks of one host use {', '.join(addresses)}",
                    expected="one address per host",
                )
            )
    return found


def check_interfaces(ranks: Sequence[RankFacts]) -> list[Finding]:
    """Between hosts: a physical interface, and one MTU for all."""
    hosts = by_host(ranks)
    if len(hosts) < 2:
        return []
    found = []
    for host, members in hosts.items():
        names = sorted({r.machine.interface for r in members if r.machine.interface.startswith(VIRTUAL_INTERFACES)})
        if names:
            found.append(
                finding(
                    "interface-virtual",
                    slots=slots_of(members),
                    hosts=(host,),
                    found=f"{', '.join(names)} ({members[0].machine.address}, {members[0].machine.address_by}) leads "
                    "to containers or through a tunnel",
                    expected="an interface of the network between the hosts",
                )
            )
    by_mtu: defaultdict[int, list[RankFacts]] = defaultdict(list)
    for rank in ranks:
        if rank.machine.mtu:
            by_mtu[rank.machine.mtu].append(rank)
    if len(by_mtu) > 1:
        usual = max(by_mtu, key=lambda mtu: len(by_mtu[mtu]))
        found += [
            finding(
                "mtu-differs",
                slots=slots_of(members),
                hosts=hosts_of(members),
                found=f"MTU {mtu} on {members[0].machine.interface}: large packets may vanish where small ones pass",
                expected=f"MTU {usual}, as on {', '.join(hosts_of(by_mtu[usual]))}",
            )
            for mtu, members in by_mtu.items()
            if mtu != usual
        ]
    return found


def check_calls(calls: Sequence[Call], ranks: Sequence[RankFacts]) -> list[Finding]:
    """Every rank was reached by every other one at its address, and the store by all. One finding per pair of hosts."""
    host_of = {rank.slot: rank.host for rank in ranks}
    lost: defaultdict[tuple[str, str], list[Call]] = defaultdict(list)
    strange: defaultdict[tuple[str, str], list[Call]] = defaultdict(list)
    found = []
    for call in calls:
        if call.error:
            lost[host_of[call.source], host_of.get(call.target, "")].append(call)
        elif call.target >= 0 and call.answered_by != call.target:
            strange[host_of[call.source], host_of[call.target]].append(call)
    for (source, target), answered in strange.items():
        first = answered[0]
        other = f"rank {first.answered_by}" if first.answered_by >= 0 else "a stranger"
        found.append(
            finding(
                "wrong-peer",
                slots=_slots(answered),
                hosts=_unique(source, target),
                found=f"rank {first.source} called rank {first.target} at {first.address}, and {other} answered"
                f"{_more(answered)}",
                expected=f"rank {first.target} on host {target}",
            )
        )
    for (source, target), failed in lost.items():
        first = failed[0]
        whom = f"rank {first.target} on host {target}" if first.target >= 0 else "the coordinator's store"
        found.append(
            finding(
                "unreachable",
                slots=_slots(failed),
                hosts=_unique(*(host for host in (source, target) if host)),
                found=f"rank {first.source} on host {source} cannot reach {whom} at {first.address}: "
                f"{first.error}{_more(failed)}",
                expected="a TCP connection",
            )
        )
    return found


def _slots(calls: Sequence[Call]) -> tuple[int, ...]:
    return tuple(sorted({slot for call in calls for slot in (call.source, call.target) if slot >= 0}))


def _more(calls: Sequence[Call]) -> str:
    others = len(calls) - 1
    return f" (and {counted(others, 'more such call')})" if others else ""


def _loopback(hosts: dict[str, list[RankFacts]]) -> list[Finding]:
    found = []
    for host, members in hosts.items():
        alone = [rank for rank in members if _is_loopback(rank.machine.address)]
        if alone:
            machine = alone[0].machine
            found.append(
                finding(
                    "address-loopback",
                    slots=slots_of(alone),
                    hosts=(host,),
                    found=f"{machine.address} ({machine.address_by}) is reached by its own host alone",
                    expected=f"an address that the other {counted(len(hosts) - 1, 'host')} reach",
                )
            )
    return found


def _shared(hosts: dict[str, list[RankFacts]]) -> list[Finding]:
    users: defaultdict[str, list[RankFacts]] = defaultdict(list)
    for members in hosts.values():
        for rank in members:
            if not _is_loopback(rank.machine.address):  # told by itself
                users[rank.machine.address].append(rank)
    return [
        finding(
            "address-shared",
            slots=slots_of(members),
            hosts=hosts_of(members),
            found=f"{len(hosts_of(members))} hosts give {address} ({members[0].machine.interface}) as their own",
            expected="an address for each host",
        )
        for address, members in users.items()
        if len(hosts_of(members)) > 1
    ]


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return address == "localhost"


def _unique(*names: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(names))
