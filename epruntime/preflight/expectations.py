"""What is expected of hosts and network, below which a finding is made. Each number with its reason."""

from __future__ import annotations

from dataclasses import dataclass

_MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class Expectations:
    """Limits of the checks.

    Attributes:
        latency_s: of a small row between ranks, one way, in the best of several tries. A MoE layer waits for three
            exchanges, so a model of 30 layers waits 90 times: 1 ms each makes a token take 0.1 s more.
        bytes_per_s: between two ranks, one way. Gigabit Ethernet moves at most 118 MB/s, a network of 10 Gbit/s
            several hundred MB/s through one TCP connection, and loopback more: 150 lies between.
        slower_latency: times the median of its kind (same host, or other hosts) from which a pair is named slow, if it
            is also above slower_latency_s. slower_rate: part of the median rate below which it is.
        exchange_part: part of step_timeout_s that the exchanges of a full step may take.
        clock_s: between a host's wall clock and the coordinator's. Nothing is computed from it, but log lines of
            several hosts cannot be put in order, and certificates may count as not yet valid.
        memory_part: part of the free memory that may be taken before the rest counts as tight.
        shm_bytes: free in /dev/shm, for Ray's object store; containers get 64 MiB unless told otherwise.
        spare_files: open files beside those that a rank needs for sure. A rank that has so few left works, and is
            warned of.
        locked_bytes: RLIMIT_MEMLOCK, for buffers that a GPU or a network adapter reads by itself.
    """

    latency_s: float = 1e-3
    bytes_per_s: float = 150e6
    slower_latency: float = 5.0
    slower_latency_s: float = 3e-4
    slower_rate: float = 0.3
    exchange_part: float = 0.25
    clock_s: float = 1.0
    memory_part: float = 0.95
    shm_bytes: int = 128 * _MIB
    spare_files: int = 256
    locked_bytes: int = 64 * _MIB


EXPECTED = Expectations()

#: open files of a rank with nothing to do: libraries, pipes, control channel.
BASE_FILES = 64
#: sockets that a rank may need for each other rank: gloo's two ends, and one that is being opened.
FILES_PER_PEER = 4

#: beginnings of the names of interfaces that lead to containers or tunnels, rarely between hosts at full speed.
VIRTUAL_INTERFACES = ("docker", "br-", "virbr", "cni", "podman", "flannel", "cali", "tun", "tap", "wg", "tailscale")
