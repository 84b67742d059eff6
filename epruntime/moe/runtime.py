"""MoERuntime: what all MoE layers of one rank share in one generation. Models get their layers here."""

from __future__ import annotations

import logging
from collections.abc import Callable

from epruntime.comm.transport import Transport
from epruntime.moe.dispatch import Dispatcher
from epruntime.moe.experts import select_backend
from epruntime.moe.layer import MoELayer
from epruntime.moe.placement import Placement
from epruntime.moe.stats import MoEStats
from epruntime.moe.store import ExpertStore
from epruntime.moe.types import ExpertWeights, StepContext

logger = logging.getLogger("epruntime.moe.runtime")


class MoERuntime:
    """Makes MoE layers that share a transport, a step context, a store and statistics.

    Args:
        placement_for: number of logical experts -> placement; the same function on every rank. Layers with equal
            numbers of experts share a placement.
        backend: experts backend's name, or "auto".
        strict: a row's bits must not depend on its batch-mates: experts backends that cannot promise it are not chosen.
        budget_rows: most rows this rank receives in one exchange round, at least 1.
        context: set by the model runner before each forward.
    """

    def __init__(
        self,
        *,
        transport: Transport,
        placement_for: Callable[[int], Placement],
        backend: str,
        strict: bool,
        budget_rows: int,
        context: StepContext,
        stats: MoEStats,
    ) -> None:
        self.transport, self.context, self.stats = transport, context, stats
        self.store = ExpertStore()
        self._placement_for, self._backend, self._strict = placement_for, backend, strict
        self._budget_rows = budget_rows
        self._placements: dict[int, Placement] = {}
        self._dispatchers: dict[int, Dispatcher] = {}
        self._backend_names: set[str] = set()

    @property
    def rank(self) -> int:
        return self.transport.rank

    @property
    def world_size(self) -> int:
        return self.transport.world_size

    @property
    def experts_backend(self) -> str:
        """Names of the backends in use, joined by "+"; "" before the first layer."""
        return "+".join(sorted(self._backend_names))

    @property
    def placement_fingerprints(self) -> dict[str, str]:
        """Number of experts of a layer, as text -> Placement.fingerprint, of the layers made so far."""
        return {str(num): placement.fingerprint for num, placement in sorted(self._placements.items())}

    def placement(self, num_experts: int) -> Placement:
        if num_experts not in self._placements:
            self._placements[num_experts] = self._placement_for(num_experts)
        return self._placements[num_experts]

    def local_experts(self, num_experts: int) -> tuple[int, ...]:
        """Logical ids of this rank's slots, in slot order: the experts whose weights it must load."""
        return self.placement(num_experts).local_logical(self.rank)

    def make_layer(self, layer_index: int, num_experts: int, weights: ExpertWeights) -> MoELayer:
        """Puts the weights of `local_experts(num_experts)` in the store and returns the layer that uses them.

        Raises:
            ConfigError: the configured backend does not support the weights.
            ValueError: the weights are not as many as this rank's slots.
        """
        local = self.local_experts(num_experts)
        if weights.num_slots != len(local):
            raise ValueError(
                f"layer {layer_index}: weights of {weights.num_slots} experts on rank {self.rank}, which "
                f"has {len(local)} slots of {num_experts} experts"
            )
        if num_experts not in self._dispatchers:
            self._dispatchers[num_experts] = Dispatcher(
                self.transport, self.placement(num_experts), budget_rows=self._budget_rows, stamps=self.context.stamps
            )
        backend = select_backend(self._backend, weights, strict=self._strict)
        if backend.name not in self._backend_names:
            self._backend_names.add(backend.name)
            logger.info("layer %d: experts backend %s", layer_index, backend.name)
        self.store.put(layer_index, weights)
        return MoELayer(
            layer_index=layer_index,
            dispatcher=self._dispatchers[num_experts],
            backend=backend,
            store=self.store,
            context=self.context,
            stats=self.stats.layer(layer_index, num_experts, local),
        )
