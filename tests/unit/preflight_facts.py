"""Facts of healthy ranks, to be changed by a test."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from epruntime.preflight.facts import MachineFacts, MemoryNeed, RankFacts, Setting

GIB = 2**30
VERSIONS = {"epruntime": "0.1.0", "torch": "2.13.0", "transformers": "5.24.0", "python": "3.11.7"}
SIGNATURE = {"epruntime": "0.1.0", "torch": "2.13.0", "extension": "native:abc", "isa": "avx2, torch AVX2"}
SETTING = Setting(
    versions=VERSIONS, model="/models/m", hidden_size=1024, top_k=2, num_moe_layers=10, dtype_bytes=2, step_tokens=512
)


def rank(slot: int, host: str = "a", *, need: MemoryNeed | None = None, **machine: Any) -> RankFacts:
    """A rank in whose facts nothing is wrong but what `machine` says."""
    number = ord(host[0]) - ord("a") + 1
    healthy = MachineFacts(
        host_name=host, boot_id=f"boot-{host}", pid=100 + slot, versions=VERSIONS, signature=SIGNATURE,
        address=f"10.0.0.{number}", interface="eth0", address_by="the route", mtu=1500, link_mbit=10000, port=4000,
        open_files=65536, locked_memory=-1, free_memory=10 * GIB, free_shm=GIB, cores=8, threads=2, checkpoint="c0ffee",
        checkpoint_error="", checkpoint_files=3,
    )  # fmt: skip
    return RankFacts(
        slot=slot, host=host, machine=replace(healthy, **machine),
        need=need or MemoryNeed(weights=GIB, kv=GIB, exchange=1000, libraries=1000),
    )  # fmt: skip


def two_hosts(**of_the_last: Any) -> list[RankFacts]:
    """Ranks 0 and 1 on host a, 2 and 3 on host b."""
    return [rank(0, "a"), rank(1, "a"), rank(2, "b"), rank(3, "b", **of_the_last)]
