"""Finding: one thing that preflight found, and what to do about it. CATALOG names all that it can find."""

from __future__ import annotations

import enum
from dataclasses import asdict, dataclass
from typing import Any


class Severity(enum.StrEnum):
    """ERROR: it will not work, and the start ends here. WARNING: it will work badly, or may fail.
    INFO: good to know."""

    ERROR = "error"
    WARNING = "warning"
    INFO = "info"

    @property
    def order(self) -> int:
        """0 for the worst."""
        return list(Severity).index(self)


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of finding. `remedy`: what to do."""

    severity: Severity
    remedy: str


_E, _W, _I = Severity.ERROR, Severity.WARNING, Severity.INFO

#: id -> what it is worth, and its remedy. `docs/preflight.md` explains each.
CATALOG: dict[str, Kind] = {
    "versions-differ": Kind(
        severity=_E, remedy="install the same epruntime, torch and transformers on every host and for the coordinator"
    ),
    "python-differs": Kind(severity=_W, remedy="run the same Python on every host"),
    "kernels-differ": Kind(
        severity=_E,
        remedy="install the same build everywhere; set EPRUNTIME_CPU_ISA (and ATEN_CPU_CAPABILITY for torch) to what "
        "every host's CPU has",
    ),
    "kernels-plain": Kind(
        severity=_W, remedy="install a wheel with the C++ kernels, or build them: pip install --no-build-isolation -e ."
    ),
    "host-names-equal": Kind(severity=_W, remedy="give each machine a host name of its own"),
    "checkpoint-missing": Kind(
        severity=_E, remedy="put the checkpoint at the same path on every host (copy it, or mount a shared file system)"
    ),
    "checkpoint-differs": Kind(severity=_E, remedy="copy the checkpoint again, so that every host has the same files"),
    "address-loopback": Kind(
        severity=_E, remedy="set EPRUNTIME_HOST_IP on each host to the address that the other hosts reach"
    ),
    "address-shared": Kind(
        severity=_E,
        remedy="the address is not one that leads between hosts (often a container bridge): set EPRUNTIME_HOST_IP on "
        "each host, or GLOO_SOCKET_IFNAME to the interface that connects them",
    ),
    "address-uneven": Kind(
        severity=_W, remedy="set EPRUNTIME_HOST_IP or GLOO_SOCKET_IFNAME alike for all ranks of the host"
    ),
    "address-none": Kind(severity=_E, remedy="set EPRUNTIME_HOST_IP on this host to the address that the others reach"),
    "interface-virtual": Kind(
        severity=_W, remedy="set GLOO_SOCKET_IFNAME to the physical interface, if there is one between the hosts"
    ),
    "mtu-differs": Kind(severity=_W, remedy="set the same MTU on every host, and on the switches between them"),
    "unreachable": Kind(
        severity=_E,
        remedy="open TCP between the hosts on all ports (ranks listen on free ones), or set EPRUNTIME_HOST_IP or "
        "GLOO_SOCKET_IFNAME to a network that connects them",
    ),
    "wrong-peer": Kind(
        severity=_E, remedy="set EPRUNTIME_HOST_IP on each host to an address that no other host has"
    ),
    "memory-short": Kind(
        severity=_E,
        remedy="lower kv_cache_memory_gb, num_kv_blocks or max_model_len, use more hosts, or free memory on this one",
    ),
    "memory-tight": Kind(
        severity=_W, remedy="lower kv_cache_memory_gb, max_num_seqs or exchange_budget_tokens, or free some"
    ),
    "shm-low": Kind(severity=_W, remedy="give the container more shared memory (docker run --shm-size=1g)"),
    "open-files-low": Kind(
        severity=_E, remedy="raise it: ulimit -n 65536, LimitNOFILE= of a service, --ulimit nofile= of a container"
    ),
    "locked-memory-low": Kind(
        severity=_W, remedy="raise it: ulimit -l unlimited, LimitMEMLOCK=infinity, or --ulimit memlock=-1"
    ),
    "cpus-oversubscribed": Kind(
        severity=_W, remedy="lower threads_per_rank, run fewer ranks on this host, or give it more cores"
    ),
    "ranks-idle": Kind(
        severity=_W, remedy="lower expert_parallel_size, or give every rank an expert with num_redundant_experts"
    ),
    "clock-skew": Kind(severity=_W, remedy="run a time service (chrony, systemd-timesyncd) on every host"),
    "exchange-counts": Kind(
        severity=_E, remedy="the transport gives wrong counts: choose another one (--transport), and report this"
    ),
    "exchange-order": Kind(
        severity=_E,
        remedy="the transport mixes ranks up: choose another one (--transport) or another version of its library, and "
        "do not serve with this one",
    ),
    "exchange-bits": Kind(
        severity=_E,
        remedy="bytes change on the way: test memory and network of the hosts named, and do not serve with them",
    ),
    "latency-high": Kind(
        severity=_W, remedy="check that the hosts are close, that cores are free, and that nothing else fills the link"
    ),
    "bandwidth-low": Kind(
        severity=_W, remedy="use a faster network or interface (GLOO_SOCKET_IFNAME), or keep all ranks on one host"
    ),
    "pair-slow": Kind(
        severity=_W, remedy="check cable, port and load of the hosts named: others of the same kind are much faster"
    ),
    "exchange-slow": Kind(
        severity=_W, remedy="lower max_num_batched_tokens, raise step_timeout_s, or use a faster network"
    ),
    "pairs-not-measured": Kind(severity=_I, remedy="none is needed: the pairs that were measured stand for the others"),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Something found.

    Attributes:
        id: key of CATALOG. slots: ranks that it concerns; hosts: theirs, or those that it concerns as a whole.
        found: what was measured, with values. expected: what it should have been. remedy: what to do.
    """

    id: str
    severity: Severity
    slots: tuple[int, ...] = ()
    hosts: tuple[str, ...] = ()
    found: str
    expected: str
    remedy: str

    @property
    def where(self) -> str:
        """In words: "rank 1 on host b", "ranks 0, 1", "host b"."""
        ranks = f"rank{'s' if len(self.slots) > 1 else ''} {', '.join(map(str, self.slots))}" if self.slots else ""
        hosts = f"host{'s' if len(self.hosts) > 1 else ''} {', '.join(self.hosts)}" if self.hosts else ""
        return f"{ranks} on {hosts}" if ranks and hosts else ranks or hosts or "all ranks"

    def __str__(self) -> str:
        return f"{self.id} ({self.where}): {self.found}; expected {self.expected}. Remedy: {self.remedy}"

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return {**asdict(self), "severity": str(self.severity), "slots": list(self.slots), "hosts": list(self.hosts)}


def finding(
    id: str,
    *,
    found: str,
    expected: str,
    slots: tuple[int, ...] = (),
    hosts: tuple[str, ...] = (),
    severity: Severity | None = None,
) -> Finding:
    """A finding of the catalog; `severity` where it differs from the usual one."""
    kind = CATALOG[id]
    return Finding(
        id=id, severity=severity or kind.severity, slots=slots, hosts=hosts, found=found, expected=expected,
        remedy=kind.remedy,
    )  # fmt: skip
