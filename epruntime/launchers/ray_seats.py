"""Pure arithmetic of placing ranks on a Ray cluster: how many threads fit, which bundle becomes which slot, and which
GPU is whose."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from epruntime.launchers.base import Seat
from epruntime.words import counted


@dataclass(frozen=True, kw_only=True)
class Node:
    """An alive node: id, host name, address, and resources by name (total, and free where known)."""

    node_id: str
    host: str
    address: str
    total: Mapping[str, float]
    free: Mapping[str, float] | None = None


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """A bundle of a placement group: its index, its resources by name, and what of them is free."""

    index: int
    total: Mapping[str, float]
    free: Mapping[str, float]


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


def bundles_for_ranks(free: Sequence[Mapping[str, float]], num_ranks: int, need: Mapping[str, float]) -> list[int]:
    """Which bundle each rank takes: one rank for each that has room, then a second one, and so on.

    Args:
        free: resources by name of each bundle. need: of one rank.

    Returns:
        num_ranks indices into `free`, ascending; [] if they do not fit.
    """
    rooms = [min((int(bundle.get(name, 0.0) // amount) for name, amount in need.items()), default=0) for bundle in free]
    if sum(rooms) < num_ranks:
        return []
    places = sorted((nth, index) for index, room in enumerate(rooms) for nth in range(room))
    return sorted(index for _, index in places[:num_ranks])


def local_device_index(gpu_id: str, visible: str | None) -> int:
    """The torch device index of the GPU that Ray gave to an actor which sees all GPUs of its node.

    Args:
        gpu_id: as Ray names it: an entry of the node's CUDA_VISIBLE_DEVICES where that is set, else a number.
        visible: CUDA_VISIBLE_DEVICES of the actor's process, which is its node's.

    Raises:
        ValueError: the process does not see that GPU.
    """
    entries = [entry.strip() for entry in (visible or "").split(",") if entry.strip()]
    if entries:
        if gpu_id not in entries:
            raise ValueError(f"Ray gave GPU {gpu_id}, but CUDA_VISIBLE_DEVICES={visible} does not have it")
        return entries.index(gpu_id)
    if not gpu_id.isdigit():
        raise ValueError(f"Ray gave GPU {gpu_id!r}, which is no number, and CUDA_VISIBLE_DEVICES is not set")
    return int(gpu_id)


def seats_in_node_order(
    taken: Sequence[tuple[int, str]], nodes: Sequence[Node], *, first_node: str, threads: int
) -> list[PlacedSeat]:
    """Gives slots to ranks so that those of one node are neighbours.

    Args:
        taken: bundle index and node id of each rank.
        first_node: id of the node whose ranks come first (the coordinator's).
        threads: compute threads of each seat.

    Returns:
        one entry per rank, in slot order: the first node's, then by address, then by bundle index.
    """
    by_id = {node.node_id: node for node in nodes}

    def key(item: tuple[int, str]) -> tuple[bool, list[object], str, int]:
        bundle, node_id = item
        return node_id != first_node, _address_key(by_id[node_id].address), node_id, bundle

    placed: list[PlacedSeat] = []
    seated: dict[str, int] = {}
    for slot, (bundle, node_id) in enumerate(sorted(taken, key=key)):
        local_rank = seated.get(node_id, 0)
        seated[node_id] = local_rank + 1
        seat = Seat(slot=slot, host=by_id[node_id].host, local_rank=local_rank, threads=threads)
        placed.append(PlacedSeat(seat=seat, bundle=bundle, node_id=node_id))
    return placed


def no_room_text(num_ranks: int, need: Mapping[str, float], nodes: Sequence[Node]) -> str:
    """What is asked and what there is, where Ray has not placed the ranks."""
    lines = [f"  node {node.host} ({node.address}): {_free_of(need, node.free, node.total)}" for node in nodes]
    return (
        f"asked for {_asked(num_ranks, need)}. The cluster has:\n"
        + ("\n".join(lines) or "  no alive node")
        + "\nFree some, add nodes, ask for fewer ranks (expert_parallel_size) or threads (threads_per_rank), or wait "
        "longer (start_timeout_s)."
    )


def no_room_in_group_text(num_ranks: int, need: Mapping[str, float], bundles: Sequence[Bundle], group: str) -> str:
    """The same where the caller gave the placement group."""
    lines = [f"  bundle {bundle.index}: {_free_of(need, bundle.free, bundle.total)}" for bundle in bundles]
    return (
        f"the given placement group {group} has no room for {_asked(num_ranks, need)}. It has:\n"
        + "\n".join(lines)
        + "\nMake it with a bundle of that size for each rank (beside what this program itself takes of it), or ask "
        "for fewer ranks (expert_parallel_size) or threads (threads_per_rank)."
    )


def _asked(num_ranks: int, need: Mapping[str, float]) -> str:
    each = " and ".join(f"{_number(amount)} {name}" for name, amount in need.items())
    return f"{counted(num_ranks, 'rank')} of {each} each"


def _free_of(need: Mapping[str, float], free: Mapping[str, float] | None, total: Mapping[str, float]) -> str:
    return ", ".join(
        f"{name} {'?' if free is None else _number(free.get(name, 0.0))} free of {_number(total.get(name, 0.0))}"
        for name in need
    )


def _address_key(address: str) -> list[object]:
    # 10.0.0.9 before 10.0.0.10; anything that is no dotted number sorts after, as text
    parts = address.split(".")
    return [0, *map(int, parts)] if all(part.isdigit() for part in parts) else [1, address]


def _number(value: float) -> str:
    return f"{value:g}"
