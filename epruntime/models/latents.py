"""Latents of another layer: some layers of multi-head latent attention attend to those that an earlier one has cached.

probe: cache.update returns latents (given) -> a layer's expand_kv takes them -> of_another: were they another layer's?
serve: such a layer keeps a copy of them in its own pages (`attention.LatentLayer`), so that nothing else is different
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, kw_only=True)
class Source:
    """The latents that a layer without any of its own attends to: the layer that caches them, and (heads, dim) each."""

    layer_idx: int
    latent: tuple[int, int]
    rotary: tuple[int, int]


class Latents:
    """Which latents the layers of one probe forward make their keys and values of."""

    def __init__(self) -> None:
        self._given: list[tuple[int, torch.Tensor, torch.Tensor]] = []
        self._expanded: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def given(self, layer_idx: int, latent: torch.Tensor, rotary: torch.Tensor) -> None:
        """A layer has cached these."""
        self._given.append((layer_idx, latent, rotary))

    @contextmanager
    def watch(self, model: torch.nn.Module) -> Iterator[None]:
        """While it lasts, what modules expand is seen."""
        modules: list[Any] = [module for module in model.modules() if hasattr(module, "expand_kv")]
        for module in modules:
            module.expand_kv = self._watched(module)
        try:
            yield
        finally:
            for module in modules:
                del module.expand_kv  # what hides the method of the class

    def _watched(self, module: Any) -> Any:
        expand = module.expand_kv

        def watched(latent: torch.Tensor, rotary: torch.Tensor) -> Any:
            self._expanded[id(module)] = (latent, rotary)
            return expand(latent, rotary)

        return watched

    def of_another(self, module: torch.nn.Module) -> Source | None:
        """Whose latents a module that caches nothing attends to; None if they are nobody's."""
        pair = self._expanded.get(id(module))
        for layer_idx, latent, rotary in self._given:
            if pair is not None and pair[0] is latent and pair[1] is rotary:
                shapes = {"latent": latent.shape, "rotary": rotary.shape}
                return Source(layer_idx=layer_idx, **{n: (shape[1], shape[3]) for n, shape in shapes.items()})
        return None
