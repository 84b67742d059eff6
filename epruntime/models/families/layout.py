"""Layout: where a checkpoint's tensors differ from the parameters of modules that an adapter has put in place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field


def _never(name: str) -> bool:
    return False


@dataclass(frozen=True, kw_only=True)
class Layout:
    """What the weight plan must know.

    Attributes:
        stacked: parameter's name in its module -> names in the checkpoint of the tensors that are stacked for it,
            with "*" where the expert's number stands; those of one expert are concatenated in this order.
        split: ending of a checkpoint name -> the ending it is given per expert ("*" for its number): the tensor holds
            all experts' rows one after another in its first dimension.
        num_experts: parts that such a tensor is split into.
        parts: ending of a checkpoint name -> endings that the equal parts of its first dimension are given, in order.
        padded: ending of a checkpoint name -> (rows, rows that are used, the first ones) of its first dimension.
        unused: is this checkpoint tensor no part of the model?
    """

    stacked: dict[str, tuple[str, ...]] = field(default_factory=dict)
    split: dict[str, str] = field(default_factory=dict)
    num_experts: int = 0
    parts: dict[str, tuple[str, ...]] = field(default_factory=dict)
    padded: dict[str, tuple[int, int]] = field(default_factory=dict)
    unused: Callable[[str], bool] = _never

    def cuts(self) -> dict[str, tuple[str, ...]]:
        """`split` and `parts` in one form. Made where it is needed: only then is the number of experts known to fit."""
        numbers = range(self.num_experts)
        by_expert = {old: tuple(new.replace("*", str(n)) for n in numbers) for old, new in self.split.items()}
        return by_expert | self.parts
