"""Pure arithmetic of placing ranks on a Ray cluster: how many threads fit, which bundle becomes which slot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from epruntime.launchers.base import Seat


@dataclass(frozen=True, kw_only=True)
class Node:
    """An alive node: id, host name, address, and resources by name (total, and free where known)."""

    node_id: str
    host: str
    address: str
    total: Mapping[str, float]
    free: Mapping[str, float] | None = None


@dataclass(frozen=True, kw_only=True)
class PlacedSeat:
    """A seat, and the bundle and node that it stands for."""

    seat: Seat
    bundle: int
    node_id: str


def threads_that_fit(free_cpus: Sequence[float], num_ranks: int) -> int:
    """The most CPUs per rank with which `num_ranks` ranks fit on nodes with so many free CPUs each; at least 1."""
    best = 1
    for threads in range(2, int(max(free_cpus, default=0)) + 1):
        if sum(int(cpus // threads) for cpus in free_cpus) >= num_ranks:
            best = threads
    return best


def seats_in_node_order(
    bundle_nodes: Mapping[int, str], nodes: Sequence[Node], *, first_node: str, threads: int
) -> list[PlacedSeat]:
    """Gives slots to bundles so that ranks of one node are neighbours.

    Args:
        bundle_nodes: bundle index -> node id.
        first_node: id of the node whose ranks come first (the coordinator's).
        threads: compute threads of each seat.

    Returns:
        one entry per bundle, in slot order: the first node's, then by address, then by bundle index.
    """
    by_id = {node.node_id: node for node in nodes}

    def key(item: tuple[int, str]) -> tuple[bool, list[object], str, int]:
        bundle, node_id = item
        return node_id != first_node, _address_key(by_id[node_id].address), node_id, bundle

    placed: list[PlacedSeat] = []
    seated: dict[str, int] = {}
    for slot, (bundle, node_id) in enumerate(sorted(bundle_nodes.items(), key=key)):
        local_rank = seated.get(node_id, 0)
        seated[node_id] = local_rank + 1
        seat = Seat(slot=slot, host=by_id[node_id].host, local_rank=local_rank, threads=threads)
        placed.append(PlacedSeat(seat=seat, bundle=bundle, node_id=node_id))
    return placed


def no_room_text(num_ranks: int, bundle: Mapping[str, float], nodes: Sequence[Node], timeout_s: float) -> str:
    """What was asked and what there is, for the error of a placement that did not come about."""
    names = list(bundle)
    lines = [
        f"  node {node.host} ({node.address}): "
        + ", ".join(
            f"{name} {_number((node.free or {}).get(name, 0.0)) if node.free is not None else '?'} free of "
            f"{_number(node.total.get(name, 0.0))}"
            for name in names
        )
        for node in nodes
    ]
    asked = " and ".join(f"{_number(amount)} {name}" for name, amount in bundle.items())
    return (
        f"Ray found no room for {num_ranks} ranks of {asked} each within {timeout_s:g} s. The cluster has:\n"
        + ("\n".join(lines) or "  no alive node")
        + "\nFree some, add nodes, ask for fewer ranks (expert_parallel_size) or threads (threads_per_rank), or wait "
        "longer (start_timeout_s)."
    )


def _address_key(address: str) -> list[object]:
    # 10.0.0.9 before 10.0.0.10; anything that is no dotted number sorts after, as text
    parts = address.split(".")
    return [0, *map(int, parts)] if all(part.isdigit() for part in parts) else [1, address]


def _number(value: float) -> str:
    return f"{value:g}"
