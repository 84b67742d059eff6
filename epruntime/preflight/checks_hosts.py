"""Checks of each host: names, memory, limits, cores, clock. Pure functions: facts in, findings out."""

from __future__ import annotations

from collections.abc import Sequence

from epruntime.preflight.expectations import BASE_FILES, EXPECTED, FILES_PER_PEER, Expectations
from epruntime.preflight.facts import RankFacts, Setting, by_host, hosts_of, slots_of
from epruntime.preflight.findings import Finding, Severity, finding
from epruntime.words import counted

_GIB = 2**30


def check_host_names(ranks: Sequence[RankFacts]) -> list[Finding]:
    """One host name is one machine: what ranks of a host share is told by its name."""
    found = []
    for host, members in by_host(ranks).items():
        boots = {rank.machine.boot_id for rank in members if rank.machine.boot_id}
        if len(boots) > 1:
            found.append(
                finding(
                    "host-names-equal",
                    slots=slots_of(members),
                    hosts=(host,),
                    found=f"{len(boots)} machines are named {host!r}: memory and cores are counted as one machine's",
                    expected="a name for each machine",
                )
            )
    return found


def check_memory(ranks: Sequence[RankFacts], expected: Expectations = EXPECTED) -> list[Finding]:
    """What all ranks of a host will take, against what is free there."""
    found = []
    for host, members in by_host(ranks).items():
        free = min(rank.machine.free_memory for rank in members)
        sure, total = sum(rank.need.sure for rank in members), sum(rank.need.total for rank in members)
        weights, kv = sum(rank.need.weights for rank in members), sum(rank.need.kv for rank in members)
        words = (
            f"{gib(total)} needed by {len(members)} rank{'s' * (len(members) > 1)} (weights {gib(weights)}, KV cache "
            f"{gib(kv)}, exchange and libraries about {gib(total - sure)}), {gib(free)} free"
        )
        if sure > free:
            kind, most = "memory-short", free
        elif total > expected.memory_part * free:
            kind, most = "memory-tight", int(expected.memory_part * free)
        else:
            continue
        found.append(
            finding(kind, slots=slots_of(members), hosts=(host,), found=words, expected=f"at most {gib(most)} needed")
        )
    return found


def check_shared_memory(
    ranks: Sequence[RankFacts], setting: Setting, expected: Expectations = EXPECTED
) -> list[Finding]:
    """/dev/shm has room for Ray's object store; no transport of today keeps rows there."""
    if setting.launcher != "ray":
        return []
    found = []
    for host, members in by_host(ranks).items():
        free = min(rank.machine.free_shm for rank in members)
        if free < expected.shm_bytes:
            found.append(
                finding(
                    "shm-low",
                    slots=slots_of(members),
                    hosts=(host,),
                    found=f"{mib(free)} free in /dev/shm",
                    expected=f"at least {mib(expected.shm_bytes)} for Ray's object store",
                )
            )
    return found


def check_open_files(ranks: Sequence[RankFacts], expected: Expectations = EXPECTED) -> list[Finding]:
    """RLIMIT_NOFILE holds the sockets to all other ranks and the checkpoint's files. One finding per host."""
    found = []
    for host, members in by_host(ranks).items():
        low = []
        for rank in members:
            needed = BASE_FILES + FILES_PER_PEER * (len(ranks) - 1) + rank.machine.checkpoint_files
            if 0 <= rank.machine.open_files < needed + expected.spare_files:
                low.append((rank.machine.open_files, needed, rank))
        if not low:
            continue
        limit, needed, _ = min(low, key=lambda one: one[0] - one[1])
        found.append(
            finding(
                "open-files-low",
                severity=Severity.ERROR if limit < needed else Severity.WARNING,
                slots=slots_of([rank for _, _, rank in low]),
                hosts=(host,),
                found=f"{limit} open files allowed (ulimit -n), about {needed} needed for "
                f"{counted(len(ranks), 'rank')}",
                expected=f"at least {needed + expected.spare_files}",
            )
        )
    return found


def check_locked_memory(
    ranks: Sequence[RankFacts], setting: Setting, expected: Expectations = EXPECTED
) -> list[Finding]:
    """RLIMIT_MEMLOCK, where something other than the CPU reads memory. One finding per host."""
    if setting.device == "cpu":
        return []
    low = [rank for rank in ranks if 0 <= rank.machine.locked_memory < expected.locked_bytes]
    return [
        finding(
            "locked-memory-low",
            slots=slots_of(members),
            hosts=(host,),
            found=f"{mib(min(rank.machine.locked_memory for rank in members))} may be locked (ulimit -l)",
            expected=f"at least {mib(expected.locked_bytes)} for pinned buffers",
        )
        for host, members in by_host(low).items()
    ]


def check_idle_ranks(ranks: Sequence[RankFacts], setting: Setting) -> list[Finding]:
    """There is an expert for every rank."""
    idle = slots_of(ranks)[setting.num_physical_experts :] if setting.num_physical_experts else ()
    if not idle:
        return []
    return [
        finding(
            "ranks-idle",
            slots=idle,
            found=f"{counted(len(ranks), 'rank')} for {counted(setting.num_physical_experts, 'expert')} per layer: "
            f"{counted(len(idle), 'rank has', 'ranks have')} none, and only attention to compute",
            expected=f"at most {counted(setting.num_physical_experts, 'rank')}",
        )
    ]


def check_cores(ranks: Sequence[RankFacts]) -> list[Finding]:
    """Ranks of a host compute with no more threads than it has cores for them."""
    found = []
    for members in by_host(ranks).values():
        threads, cores = sum(rank.machine.threads for rank in members), max(rank.machine.cores for rank in members)
        if threads > cores:
            found.append(
                finding(
                    "cpus-oversubscribed",
                    slots=slots_of(members),
                    hosts=hosts_of(members),
                    found=f"{counted(threads, 'compute thread')} of {counted(len(members), 'rank')} share "
                    f"{counted(cores, 'core')}",
                    expected=f"at most {counted(cores, 'thread')}",
                )
            )
    return found


def check_clocks(ranks: Sequence[RankFacts], expected: Expectations = EXPECTED) -> list[Finding]:
    """Wall clocks agree with the coordinator's; what the measurement may be wrong by counts in the host's favour."""
    found = []
    for host, members in by_host(ranks).items():
        rank = min(members, key=lambda member: member.clock_error_s)
        direction = "ahead of" if rank.clock_offset_s > 0 else "behind"
        if abs(rank.clock_offset_s) - rank.clock_error_s > expected.clock_s:
            found.append(
                finding(
                    "clock-skew",
                    slots=slots_of(members),
                    hosts=(host,),
                    found=f"its clock is {abs(rank.clock_offset_s):.3g} s {direction} the coordinator's "
                    f"(± {rank.clock_error_s:.2g} s)",
                    expected=f"at most {expected.clock_s:g} s",
                )
            )
    return found


def gib(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:.3g} GiB"


def mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.4g} MiB"
