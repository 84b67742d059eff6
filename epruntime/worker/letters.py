"""Bodies of the control messages that a rank reads."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, TypeVar

from epruntime.errors import ProtocolError

Letter = TypeVar("Letter", "Configure", "Load")


@dataclass(frozen=True, kw_only=True)
class Configure:
    """This rank's place in a new generation, and how it exchanges rows.

    Attributes:
        store_host, store_port: where the ranks meet.
        hosts: host name of each rank, by ep_rank; slots: its slot, for errors.
        transport, experts_backend: "auto" or a name.
        invariance: "strict" or "fast".
        exchange_budget_tokens: most rows received in one exchange round.
        step_timeout_s: bound of every wait for the other ranks.
        threads: compute threads; None keeps what the rank was started with.
    """

    generation: int
    ep_rank: int
    world_size: int
    store_host: str
    store_port: int
    hosts: tuple[str, ...]
    transport: str
    experts_backend: str
    invariance: str
    exchange_budget_tokens: int
    step_timeout_s: float
    threads: int | None = None
    slots: tuple[int, ...] = ()

    @property
    def strict(self) -> bool:
        return self.invariance == "strict"


@dataclass(frozen=True, kw_only=True)
class Load:
    """A model for this generation.

    Attributes:
        model: directory of the checkpoint; dtype: "auto", "float32" or "bfloat16".
        max_model_len, num_kv_blocks, kv_cache_memory_bytes: None for the default.
        ranks_on_host: ranks that share this host's memory.
        expert_placement, num_redundant_experts: as in ParallelConfig; the same for all ranks.
        trace_layers: keep a hash of every row's hidden state after every layer, for `trace` messages.
        batch_dependent: make one layer depend on the batch on purpose: the negative control of `epruntime verify`.
    """

    model: str
    dtype: str
    max_model_len: int | None
    block_size: int
    num_kv_blocks: int | None
    kv_cache_memory_bytes: int | None
    max_num_seqs: int
    max_num_batched_tokens: int
    ranks_on_host: int = 1
    expert_placement: str = "linear"
    num_redundant_experts: int = 0
    trace_layers: bool = False
    batch_dependent: bool = False


def parse(kind: type[Letter], message: dict[str, Any]) -> Letter:
    """Reads the body of a control message.

    Raises:
        ProtocolError: a field is missing or unknown.
    """
    envelope = {"type", "id", "generation"} - {f.name for f in fields(kind)}
    body: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in message.items() if key not in envelope
    }
    try:
        return kind(**body)
    except TypeError as error:
        raise ProtocolError(f"message {message['type']!r}: {error}; coordinator and rank differ in version") from error
