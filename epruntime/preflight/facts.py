"""What preflight knows of each rank before the checks: facts, and what its share of the model will need."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from epruntime.errors import ProtocolError


@dataclass(frozen=True, kw_only=True)
class MachineFacts:
    """What a rank says of itself and its host; the body of the answer to `preflight`, part "facts".

    Attributes:
        host_name: as the host calls itself; boot_id: random number of its kernel's start; "" where there is none.
        pid: in the rank's own pid namespace.
        versions: of "epruntime", "torch", "transformers" and "python".
        signature: see epruntime.ops.extension.kernel_signature.
        address, interface: at which the other ranks reach it, "" for the only rank; address_by: why this one, or
            why none.
        mtu, link_mbit: of that interface; 0 where unknown. port: where it waits for the other ranks' calls.
        open_files, locked_memory: soft limits (RLIMIT_NOFILE; RLIMIT_MEMLOCK in bytes), -1: none.
        free_memory: bytes that it can still take, control groups considered. free_shm: bytes of /dev/shm.
        cores: it may use; threads: it will compute with.
        checkpoint: digest of the checkpoint's configuration and of names and sizes of its weight files; "" if there
            is none, checkpoint_error: why; checkpoint_files: number of weight files.
    """

    host_name: str
    boot_id: str
    pid: int
    versions: Mapping[str, str]
    signature: Mapping[str, str]
    address: str
    interface: str
    address_by: str
    mtu: int
    link_mbit: int
    port: int
    open_files: int
    locked_memory: int
    free_memory: int
    free_shm: int
    cores: int
    threads: int
    checkpoint: str
    checkpoint_error: str
    checkpoint_files: int

    @classmethod
    def from_wire(cls, message: Mapping[str, Any]) -> MachineFacts:
        """Raises ProtocolError: a field is missing."""
        try:
            return cls(**{f.name: message[f.name] for f in fields(cls)})
        except KeyError as error:
            raise ProtocolError(f"facts of a rank lack {error}; coordinator and rank differ in version") from error


@dataclass(frozen=True, kw_only=True)
class MemoryNeed:
    """Bytes that one rank will take.

    Attributes:
        weights: of its share of the model, exact. kv: of its KV cache, as configured or by the default rule.
        exchange: of rows on their way and their experts' results, estimated; libraries: of modules, kernels' scratch
            space and logits, estimated.
    """

    weights: int = 0
    kv: int = 0
    exchange: int = 0
    libraries: int = 0

    @property
    def sure(self) -> int:
        """What is taken for certain."""
        return self.weights + self.kv

    @property
    def total(self) -> int:
        return self.weights + self.kv + self.exchange + self.libraries


@dataclass(frozen=True, kw_only=True)
class RankFacts:
    """A rank as the checks see it.

    Attributes:
        slot; host: host name by which its launcher knows it. machine: what it said.
        need: see MemoryNeed. clock_offset_s: its wall clock minus the coordinator's; clock_error_s: most that this
            measurement can be wrong by.
    """

    slot: int
    host: str
    machine: MachineFacts
    need: MemoryNeed = MemoryNeed()
    clock_offset_s: float = 0.0
    clock_error_s: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        machine = {f.name: getattr(self.machine, f.name) for f in fields(self.machine) if f.name != "port"}
        machine |= {"versions": dict(self.machine.versions), "signature": dict(self.machine.signature)}
        return {
            "slot": self.slot,
            "host": self.host,
            **machine,
            "clock_offset_s": self.clock_offset_s,
            "clock_error_s": self.clock_error_s,
            "memory_needed": {f.name: getattr(self.need, f.name) for f in fields(self.need)},
        }


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What the checks must know of the run beside its ranks.

    Attributes:
        versions: of the coordinator. launcher, device: as configured. model: path of the checkpoint.
        hidden_size, top_k, num_moe_layers, dtype_bytes: of the model. num_physical_experts: its experts per layer and
            their copies; 0: not known. step_tokens: most tokens that a rank computes in
            a step. step_timeout_s: as configured.
    """

    versions: Mapping[str, str] = field(default_factory=dict)
    launcher: str = "local"
    device: str = "cpu"
    model: str = ""
    hidden_size: int = 0
    top_k: int = 0
    num_moe_layers: int = 0
    num_physical_experts: int = 0
    dtype_bytes: int = 4
    step_tokens: int = 0
    step_timeout_s: float = 120.0


def by_host(ranks: Iterable[RankFacts]) -> dict[str, list[RankFacts]]:
    """Ranks of each host, hosts in the order of their first rank."""
    found: defaultdict[str, list[RankFacts]] = defaultdict(list)
    for rank in ranks:
        found[rank.host].append(rank)
    return dict(found)


def slots_of(ranks: Sequence[RankFacts]) -> tuple[int, ...]:
    return tuple(rank.slot for rank in ranks)


def hosts_of(ranks: Sequence[RankFacts]) -> tuple[str, ...]:
    """Their hosts, each once."""
    return tuple(by_host(ranks))
