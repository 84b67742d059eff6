"""Experts modules of the experts interface's form, for families whose own are of another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS


class InterfaceExperts(torch.nn.Module):
    """Gated experts whose forward is a function registered with transformers' experts interface.

    Shape letters: E experts, H hidden, I intermediate, T tokens, K choices of a token.

    Args:
        gate_up, down: parameters that are kept under transformers' names: [E, 2I, H] and [E, H, I], or both with
            their last two dimensions exchanged if `transposed`. `down_transposed`: the second one alone.
    """

    has_gate, has_bias, has_post_expert_norm = True, False, False

    def __init__(
        self,
        gate_up: torch.nn.Parameter,
        down: torch.nn.Parameter,
        act_fn: Callable[[torch.Tensor], torch.Tensor],
        *,
        transposed: bool = False,
        down_transposed: bool = False,
    ) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj, self.act_fn = gate_up, down, act_fn
        self.num_experts = int(down.shape[0])
        self.is_transposed, self.down_transposed = transposed, down_transposed
        #: calls of one forward of the model, each with other choices of the same tokens
        self.calls_per_forward = 1
        #: name of the registered function, set by `adapter.use_hooks`
        self.implementation = ""

    def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return self.act_fn(gate) * up

    def forward(self, x: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
        """x [..., H] of T tokens in all -> the weighted sum of each token's experts, in the same shape."""
        compute: Callable[..., torch.Tensor] = ALL_EXPERTS_FUNCTIONS[self.implementation]
        return compute(self, x.reshape(-1, x.shape[-1]), ids_TK, weights_TK).view(x.shape)


def parameter(like: torch.Tensor, *shape: int) -> torch.nn.Parameter:
    """An empty parameter of another one's dtype and device."""
    return torch.nn.Parameter(torch.empty(shape, dtype=like.dtype, device=like.device), requires_grad=False)


def modules_of(model: Any, class_name: str) -> list[tuple[str, Any]]:
    """Modules of a class of transformers, by name.

    Raises:
        LookupError: there is none: this transformers defines the family in another way.
    """
    found = [(name, module) for name, module in model.named_modules() if type(module).__name__ == class_name]
    if not found:
        raise LookupError(f"{type(model).__name__} has no {class_name}, which its adapter is for")
    return found
