"""How clear-cut a model's decisions are: a reference run whose margins are thin proves nothing about equality.

Every selection inside a forward (top-k or argmax over experts or groups) is watched, whatever the family's formula.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

#: A selected entry at or below it is one that a mask has taken out: there were too few to choose from.
_MASKED = -1e30
_TOPK = {torch.topk, torch.Tensor.topk}
_MAX = {torch.max, torch.Tensor.max, torch.argmax, torch.Tensor.argmax}


@dataclass
class Margin:
    """Least gap seen between a selected entry and the best entry not selected."""

    least: float = math.inf


class _Watch(TorchFunctionMode):
    def __init__(self, note: Callable[[torch.Tensor], None]) -> None:
        super().__init__()
        self._gaps = note

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _TOPK and args[0].is_floating_point():
            self._note(args[0], args[1] if len(args) > 1 else kwargs["k"])
        elif (
            func in _MAX
            and args[0].is_floating_point()
            and args[0].dim() < 4  # attention scores have four dimensions; their largest is no decision
            and (kwargs.get("dim") in (-1, 1) or -1 in args[1:])
        ):
            self._note(args[0], 1)
        return func(*args, **kwargs)

    def _note(self, scores: torch.Tensor, k: int) -> None:
        with torch._C.DisableTorchFunction():
            if k >= scores.shape[-1] or scores.numel() == 0:
                return
            values = scores.double().topk(k + 1, dim=-1).values
            gap = values[..., k - 1] - values[..., k]
            self._gaps(torch.where(torch.isfinite(gap) & (values[..., k - 1] > _MASKED), gap, math.inf))


@contextmanager
def watch_selections() -> Iterator[Margin]:
    """Records the least gap of every top-k and argmax over the last dimension in the block."""
    margin = Margin()

    def note(gaps: torch.Tensor) -> None:
        margin.least = min(margin.least, float(gaps.min()))

    with _Watch(note):
        yield margin


@contextmanager
def watch_rows(num_rows: int) -> Iterator[torch.Tensor]:
    """As `watch_selections`, of each row of the only sequence in a forward of the block: fp64 [num_rows].

    A selection whose scores do not come by rows is left out, and makes no row's margin smaller.
    """
    least_T = torch.full((num_rows,), math.inf, dtype=torch.float64)

    def note(gaps: torch.Tensor) -> None:
        if gaps.numel() % num_rows == 0:
            torch.minimum(least_T, gaps.reshape(num_rows, -1).amin(1), out=least_T)

    with _Watch(note):
        yield least_T


def top1_margin(logits_TV: torch.Tensor) -> float:
    """Least gap between the best and the second-best logit over all rows."""
    best = logits_TV.double().topk(2, dim=-1).values
    return float((best[:, 0] - best[:, 1]).min())
