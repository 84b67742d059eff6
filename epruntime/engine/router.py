"""Router: which group of ranks holds a new request's KV. A pure class; knows no process."""

from __future__ import annotations


class Router:
    """Sends each request to the group with the fewest outstanding tokens; on a tie to the lowest index.

    A request weighs what it may cost (prompt plus expected output tokens) from `assign` to `release`.
    It never moves: its KV lives where it was sent.
    """

    def __init__(self, num_groups: int) -> None:
        if num_groups < 1:
            raise ValueError(f"num_groups={num_groups}: must be at least 1")
        self._loads = [0] * num_groups
        self._assigned: dict[int, tuple[int, int]] = {}

    @property
    def loads(self) -> tuple[int, ...]:
        """Outstanding tokens per group."""
        return tuple(self._loads)

    def assign(self, rid: int, num_tokens: int) -> int:
        """Picks a group for request `rid`, which weighs `num_tokens` (> 0) until it is released."""
        if num_tokens < 1:
            raise ValueError(f"num_tokens={num_tokens} of request {rid}: must be positive")
        if rid in self._assigned:
            raise ValueError(f"request {rid} is already assigned to group {self._assigned[rid][0]}")
        group = self._loads.index(min(self._loads))
        self._assigned[rid] = (group, num_tokens)
        self._loads[group] += num_tokens
        return group

    def release(self, rid: int) -> int | None:
        """Request `rid` has ended. Returns the group that held it, None if it is not assigned (it ended before)."""
        group, num_tokens = self._assigned.pop(rid, (None, 0))
        if group is not None:
            self._loads[group] -= num_tokens
        return group
