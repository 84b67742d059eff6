"""ExpertStore: where a layer finds its experts' weights, and whether they are there.

Layers never hold weights themselves. Today all slots of a layer arrive together and stay; slots that are moved to
another rank or kept in host memory change their state here, and nothing else does.
"""

from __future__ import annotations

import enum
import threading

from epruntime.moe.types import ExpertWeights


class Residency(enum.Enum):
    """State of one (layer, slot)."""

    ABSENT = "absent"
    LOADING = "loading"
    RESIDENT = "resident"


class ExpertStore:
    """The local experts' weights of one rank, per layer. Safe to change from a loading thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._weights: dict[int, ExpertWeights] = {}
        self._states: dict[int, list[Residency]] = {}
        self._ready: set[int] = set()

    def put(self, layer: int, weights: ExpertWeights, *, state: Residency = Residency.RESIDENT) -> None:
        """Registers a layer's weights, all its slots in `state`. Replaces earlier ones."""
        with self._lock:
            self._weights[layer] = weights
            self._states[layer] = [state] * weights.num_slots
            self._refresh(layer)

    def mark(self, layer: int, slot: int, state: Residency) -> None:
        """Sets the state of one slot.

        Raises:
            KeyError: the layer was never put. IndexError: it has no such slot.
        """
        with self._lock:
            if not 0 <= slot < len(self._states[layer]):
                raise IndexError(f"layer {layer}: slot {slot} of {len(self._states[layer])}")
            self._states[layer][slot] = state
            self._refresh(layer)

    def state(self, layer: int, slot: int) -> Residency:
        return self._states[layer][slot]

    def acquire(self, layer: int) -> ExpertWeights:
        """Weights of a layer whose slots are all resident.

        Raises:
            LookupError: some are not; the message names them.
        """
        if layer in self._ready:
            return self._weights[layer]
        with self._lock:
            if layer not in self._weights:
                raise LookupError(
                    f"layer {layer}: no expert weights were registered, layers {sorted(self._weights)} "
                    "have some; load the layer before it runs"
                )
            missing = {
                slot: state.value for slot, state in enumerate(self._states[layer]) if state is not Residency.RESIDENT
            }
            raise LookupError(f"layer {layer}: slots {missing} are not resident; wait until they are loaded")

    def clear(self) -> None:
        """Lets go of all weights."""
        with self._lock:
            self._weights.clear()
            self._states.clear()
            self._ready.clear()

    def _refresh(self, layer: int) -> None:
        if all(state is Residency.RESIDENT for state in self._states[layer]):
            self._ready.add(layer)
        else:
            self._ready.discard(layer)
