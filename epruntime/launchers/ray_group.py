"""RayGroup: the placement group that ranks run in; made for them, or the caller's, which stays as it was."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group

from epruntime.errors import ConfigError, LaunchError
from epruntime.launchers.caller_thread import CallerThread
from epruntime.launchers.ray_cluster import alive_nodes
from epruntime.launchers.ray_seats import (
    Bundle,
    bundles_for_ranks,
    no_room_in_group_text,
    no_room_text,
    threads_that_fit,
)

logger = logging.getLogger("epruntime.launchers.ray_group")

#: seconds without room, from when it was asked for, before a warning says what is waited for: Ray starts its workers in
#: that time on a busy machine. And seconds between two looks.
_WARN_AFTER_S, _LOOK_S = 15.0, 0.3


def current_group() -> PlacementGroup | None:
    """The placement group that this thread's task or actor gives to what it starts; None if there is none.

    As Ray does for tasks: only with `placement_group_capture_child_tasks=True`. To be called on the thread of the task
    itself: Ray does not know it on others.
    """
    if not ray.is_initialized():
        return None
    group = ray.util.get_current_placement_group()
    if group is not None and not ray._private.worker.global_worker.should_capture_child_tasks_in_placement_group:
        logger.info("placement group %s does not capture child tasks: ranks get one of their own", group.id.hex())
        return None
    return group


class RayGroup:
    """Room for ranks. Blocking calls run on `thread`.

    Args:
        given: the caller's group; None: one is made.

    Attributes:
        threads: compute threads of each rank; need: resources of each rank; taken: bundle index and node id of each.
            All valid after `reserve`.
    """

    def __init__(self, thread: CallerThread, *, device: str, given: Any = None) -> None:
        if given is not None and not isinstance(given, PlacementGroup):
            raise ConfigError(f"placement_group={given!r}: must be a ray.util.placement_group.PlacementGroup")
        self._thread, self._device = thread, device
        self._given: Any = given
        self.group: Any = given
        self.threads, self.need, self.taken = 1, dict[str, float](), list[tuple[int, str]]()

    async def reserve(self, num_ranks: int, *, threads_per_rank: int | None, timeout_s: float, began: float) -> None:
        """Gets room for all ranks.

        Args:
            timeout_s: seconds for it, counted from the monotonic time `began`.

        Raises:
            LaunchError: there is none in time; says what was asked and what is free.
        """
        warned = False
        asked = time.monotonic()
        step = self._fit_in_given if self._given is not None else self._make
        while text := await self._thread.run(lambda: step(num_ranks, threads_per_rank)):
            now = time.monotonic()
            if now - began >= timeout_s:
                raise LaunchError(f"no room within {timeout_s:g} s: {text}")
            if not warned and now - asked > _WARN_AFTER_S:
                logger.warning("no room yet after %.0f s of %g s: %s", now - began, timeout_s, text)
                warned = True

    def node_of(self, bundle: int) -> str:
        """Node id where a bundle is now. Blocking."""
        return str(placement_group_table(self.group)["bundles_to_node_id"].get(bundle, ""))

    def release(self) -> None:
        """Removes the group if it was made here. Blocking."""
        if self._given is None and self.group is not None:
            remove_placement_group(self.group)
        self.group = None

    # one step of waiting each: "" when there is room, else what is waited for

    def _make(self, num_ranks: int, threads_per_rank: int | None) -> str:
        if self.group is None:
            self._choose([(node.free or node.total).get("CPU", 0.0) for node in alive_nodes()], num_ranks,
                         threads_per_rank)  # fmt: skip
            self.group = placement_group([dict(self.need)] * num_ranks, strategy="PACK")
        if not self.group.wait(_LOOK_S):
            return no_room_text(num_ranks, self.need, alive_nodes())
        self.taken = list(placement_group_table(self.group)["bundles_to_node_id"].items())
        return ""

    def _fit_in_given(self, num_ranks: int, threads_per_rank: int | None) -> str:
        name = self._given.id.hex()
        table = placement_group_table(self._given)
        state = table.get("state", "REMOVED")
        if state == "REMOVED":
            raise LaunchError(f"the given placement group {name} was removed, or is of another cluster")
        if state != "CREATED":
            time.sleep(_LOOK_S)
            return (
                f"the given placement group {name} is not ready: its state is {state}, and it asks for "
                f"{list(table['bundles'].values())}. The cluster has:\n"
                + "\n".join(f"  node {node.host}: {dict(node.free or {})} free" for node in alive_nodes())
            )
        nodes = table["bundles_to_node_id"]
        free = ray._private.state.available_resources_per_node()
        if not all(f"bundle_group_{index}_{name}" in free.get(node, {}) for index, node in nodes.items()):
            time.sleep(_LOOK_S)  # what nodes report is a moment behind
            return f"Ray does not say what of the given placement group {name} is free"
        bundles = [
            Bundle(index=index, total=total, free=_free_in(free[nodes[index]], name, index, total))
            for index, total in sorted(table["bundles"].items())
        ]
        self._choose([bundle.free.get("CPU", 0.0) for bundle in bundles], num_ranks, threads_per_rank)
        places = bundles_for_ranks([bundle.free for bundle in bundles], num_ranks, self.need)
        if not places:
            text = no_room_in_group_text(num_ranks, self.need, bundles, name)
            if not bundles_for_ranks([bundle.total for bundle in bundles], num_ranks, self.need):
                raise LaunchError(text)  # not even when it is empty
            time.sleep(_LOOK_S)
            return text
        self.taken = [(bundles[place].index, nodes[bundles[place].index]) for place in places]
        return ""

    def _choose(self, free_cpus: list[float], num_ranks: int, threads_per_rank: int | None) -> None:
        if self._device == "cuda":
            self.threads, self.need = threads_per_rank or 1, {"GPU": 1.0}
        else:
            self.threads = threads_per_rank or threads_that_fit(free_cpus, num_ranks)
            self.need = {"CPU": float(self.threads)}


def _free_in(node: Mapping[str, float], group: str, index: int, total: Mapping[str, float]) -> dict[str, float]:
    """What of a bundle nobody has taken yet. Ray keeps it as resources of the bundle's node, of this name."""
    return {name: node.get(f"{name}_group_{index}_{group}", 0.0) for name in total}
