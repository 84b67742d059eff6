"""Placement: which rank holds which expert, and in which slot. Pure data, no torch, no process group.

logical expert -> physical experts (one, or several replicas) -> (rank, local slot)
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property, lru_cache

from epruntime.errors import ConfigError

#: More physical experts per rank than this many times all logical ones are refused.
_MAX_COPIES_PER_RANK = 4


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Every physical expert's logical id and rank; its slot is its place among that rank's physical experts.

    Attributes:
        version: named by each plan; a placement never changes, a new one has a new version.
        num_logical: experts the router chooses from.
        physical_to_logical: logical id of each physical expert; a logical id that occurs more than once is replicated.
        physical_to_rank: rank of each physical expert.

    Raises:
        ValueError: lengths differ, an id or rank is out of range, or a logical expert is nowhere.
    """

    version: int
    num_logical: int
    world_size: int
    physical_to_logical: tuple[int, ...]
    physical_to_rank: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.physical_to_logical) != len(self.physical_to_rank):
            raise ValueError(
                f"placement {self.version}: {len(self.physical_to_logical)} logical ids for "
                f"{len(self.physical_to_rank)} ranks; each physical expert needs one of both"
            )
        for physical, (logical, rank) in enumerate(zip(self.physical_to_logical, self.physical_to_rank, strict=True)):
            if not 0 <= logical < self.num_logical:
                raise ValueError(
                    f"placement {self.version}: physical expert {physical} holds logical {logical}, must "
                    f"be in 0..{self.num_logical - 1}"
                )
            if not 0 <= rank < self.world_size:
                raise ValueError(
                    f"placement {self.version}: physical expert {physical} is on rank {rank}, must be in "
                    f"0..{self.world_size - 1}"
                )
        missing = sorted(set(range(self.num_logical)) - set(self.physical_to_logical))
        if missing:
            raise ValueError(f"placement {self.version}: logical experts {missing} are on no rank")

    @cached_property
    def physical_to_slot(self) -> tuple[int, ...]:
        """Local slot of each physical expert on its rank."""
        filled = [0] * self.world_size
        slots = []
        for rank in self.physical_to_rank:
            slots.append(filled[rank])
            filled[rank] += 1
        return tuple(slots)

    @cached_property
    def replicas(self) -> tuple[tuple[int, ...], ...]:
        """Physical ids of each logical expert, ascending; the first one is its first copy."""
        found: list[list[int]] = [[] for _ in range(self.num_logical)]
        for physical, logical in enumerate(self.physical_to_logical):
            found[logical].append(physical)
        return tuple(tuple(ids) for ids in found)

    def local_logical(self, rank: int) -> tuple[int, ...]:
        """Logical ids of a rank's slots, in slot order; empty for a rank without experts."""
        return tuple(
            logical
            for logical, owner in zip(self.physical_to_logical, self.physical_to_rank, strict=True)
            if owner == rank
        )

    def replica_slots(self, rank: int) -> tuple[bool, ...]:
        """For each slot of a rank: does it hold another copy of its logical expert than the first one?"""
        first = {ids[0] for ids in self.replicas}
        return tuple(physical not in first for physical, owner in enumerate(self.physical_to_rank) if owner == rank)

    @cached_property
    def fingerprint(self) -> str:
        """Equal where two placements send every row to the same place."""
        facts = (self.version, self.num_logical, self.world_size, self.physical_to_logical, self.physical_to_rank)
        return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]


def contiguous(num_experts: int, world_size: int, version: int = 0) -> Placement:
    """Experts in order, in blocks as equal as can be: the first `num_experts % world_size` ranks hold one more.

    With more ranks than experts the last ranks hold none.
    """
    if num_experts < 1 or world_size < 1:
        raise ValueError(f"num_experts={num_experts}, world_size={world_size}: both must be at least 1")
    share, extra = divmod(num_experts, world_size)
    ranks = tuple(rank for rank in range(world_size) for _ in range(share + (rank < extra)))
    return Placement(
        version=version,
        num_logical=num_experts,
        world_size=world_size,
        physical_to_logical=tuple(range(num_experts)),
        physical_to_rank=ranks,
    )


@lru_cache(maxsize=64)
def placement_for(num_experts: int, world_size: int, strategy: str = "linear", num_redundant: int = 0) -> Placement:
    """Where the experts of a layer lie. A pure function: every rank, and the coordinator, gets the same placement.

    First copies are spread as `strategy` says: "linear" in contiguous blocks (`contiguous`), "round_robin" expert e on
    rank e % world_size. Then come the redundant ones, one after the other: each goes to the rank that has the fewest
    physical experts, and is a copy of the logical expert of which that rank has the fewest, then of which there are
    the fewest in all; the lowest number first on ties. So first copies never move, ranks hold equally many to within
    one, and a rank holds an expert twice only if it holds every expert.

    Args:
        num_redundant: physical experts beyond one per logical expert.

    Raises:
        ConfigError: more physical experts than make sense.
    """
    most = num_experts * (_MAX_COPIES_PER_RANK * world_size - 1)
    if not 0 <= num_redundant <= most:
        raise ConfigError(
            f"num_redundant_experts={num_redundant} for {num_experts} experts per layer on {world_size} ranks: must be "
            f"in 0..{most}, and {num_experts * (world_size - 1)} put every expert on every rank; what is beyond takes "
            "memory and spreads no load"
        )
    if strategy == "linear":
        owners = list(contiguous(num_experts, world_size).physical_to_rank)
    elif strategy == "round_robin":
        owners = [expert % world_size for expert in range(num_experts)]
    else:
        raise ConfigError(f"expert_placement={strategy!r}: must be linear or round_robin")
    logical = list(range(num_experts))
    on_rank = [owners.count(rank) for rank in range(world_size)]
    held = [[int(owner == rank) for owner in owners] for rank in range(world_size)]
    copies = [1] * num_experts
    for _ in range(num_redundant):
        rank = min(range(world_size), key=on_rank.__getitem__)
        here = held[rank]
        expert = min(range(num_experts), key=lambda e, here=here: (here[e], copies[e]))  # type: ignore[misc]
        logical.append(expert)
        owners.append(rank)
        on_rank[rank] += 1
        here[expert] += 1
        copies[expert] += 1
    return Placement(
        version=0,
        num_logical=num_experts,
        world_size=world_size,
        physical_to_logical=tuple(logical),
        physical_to_rank=tuple(owners),
    )
