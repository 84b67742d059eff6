"""What the MoE layers of one rank did: expert loads, rows, bytes, seconds of waiting. Cheap enough to keep on."""

from __future__ import annotations

from typing import Any

import torch

from epruntime.moe.counters import LAYER_COUNTERS


class LayerStats:
    """Counters of one layer, from the rank's start on.

    Args:
        local_experts: logical ids of the rank's slots in this layer, in slot order, as its placement says.

    Attributes:
        rows_sent, rows_received: rows (token, destination rank) of this rank, to itself included.
        pairs_received: (token, expert) pairs that this rank's experts computed, whoever sent them: the rank's load.
        replica_pairs: those of them that a slot computed which is not the first copy of its logical expert.
        rounds: exchange rounds.
        dispatch_s, combine_s: seconds in which this rank waited for counts and rows, or for results; that is the time
            on the wire plus the time by which a peer came later.
        dispatch_bytes, combine_bytes: bytes handed to the transport, to itself included.
    """

    def __init__(self, num_experts: int, local_experts: tuple[int, ...] = ()) -> None:
        self.num_experts, self.local_experts = num_experts, local_experts
        # The last entry counts the choices that are not routed (id -1).
        self._choices_E1 = torch.zeros(num_experts + 1, dtype=torch.int64)
        self._one = torch.ones((), dtype=torch.int64)
        self.steps = 0
        self.rows_sent = self.rows_received = self.pairs_received = self.replica_pairs = self.rounds = 0
        self.dispatch_bytes = self.combine_bytes = 0
        self.dispatch_s = self.combine_s = 0.0

    def count_experts(self, ids_TK: torch.Tensor) -> None:
        """Adds one step's routing. int64 [T, K] logical ids of valid tokens, -1 for "not routed"."""
        self.steps += 1
        self._choices_E1.index_put_((ids_TK,), self._one, accumulate=True)

    @property
    def expert_tokens_E(self) -> torch.Tensor:
        """int64 [E]: tokens of this rank that chose each logical expert."""
        return self._choices_E1[:-1]

    def snapshot(self) -> dict[str, Any]:
        return {
            "expert_tokens": self.expert_tokens_E.tolist(),
            "local_experts": list(self.local_experts),
            "not_routed": int(self._choices_E1[-1]),
            "steps": self.steps,
            "rounds": self.rounds,
            "rows_sent": self.rows_sent,
            "rows_received": self.rows_received,
            "pairs_received": self.pairs_received,
            "replica_pairs": self.replica_pairs,
            "dispatch_bytes": self.dispatch_bytes,
            "combine_bytes": self.combine_bytes,
            "dispatch_s": self.dispatch_s,
            "combine_s": self.combine_s,
        }


class MoEStats:
    """Counters of all MoE layers of one rank."""

    def __init__(self) -> None:
        self._layers: dict[int, LayerStats] = {}

    def layer(self, layer_index: int, num_experts: int, local_experts: tuple[int, ...] = ()) -> LayerStats:
        """The layer's counters; made at the first call."""
        stats = self._layers.setdefault(layer_index, LayerStats(num_experts, local_experts))
        assert stats.num_experts == num_experts, f"layer {layer_index}: {stats.num_experts} experts, then {num_experts}"
        return stats

    def packed(self) -> dict[str, Any]:
        """All counters since the start in a form that is quick to make, send and read.

        Returns:
            {"layers": [L layer indices], "num_experts": [L ints], "counters": bytes of float64 [L, LAYER_COUNTERS],
            "expert_tokens": bytes of int64 [sum of num_experts]}, layers in ascending order.
        """
        layers = sorted(self._layers.items())
        counters_LC = [[getattr(stats, name) for name in LAYER_COUNTERS] for _, stats in layers]
        return {
            "layers": [index for index, _ in layers],
            "num_experts": [stats.num_experts for _, stats in layers],
            "counters": torch.tensor(counters_LC, dtype=torch.float64).numpy().tobytes(),
            "expert_tokens": b"".join(stats.expert_tokens_E.numpy().tobytes() for _, stats in layers),
        }

    def snapshot(self) -> dict[str, Any]:
        """All counters since the start; plain ints, floats, lists and string keys (ready for msgpack).

        Returns:
            {"layers": {"<layer index>": {"expert_tokens": [E ints], "rows_sent": int, ...}}}
        """
        return {"layers": {str(index): stats.snapshot() for index, stats in sorted(self._layers.items())}}
