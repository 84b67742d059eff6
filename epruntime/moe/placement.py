"""Placement: which rank holds which expert, and in which slot. Pure data, no torch, no process group.

logical expert -> physical experts (one, or several replicas) -> (rank, local slot)
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property


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
        """Physical ids of each logical expert, ascending."""
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
