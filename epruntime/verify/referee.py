"""A model computed in a wider dtype than its weights have, with room for one layer more instead of a second model.

model in bfloat16 -> before a block: its weights as float32 -> the block's forward -> its own weights again

To widen a number is exact, so the weights are those of the checkpoint; what differs from the model in its own dtype is
the rounding of what it computes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def widened(model: Any, dtype: torch.dtype) -> Iterator[None]:
    """In the block of the statement, `model` computes in `dtype`; then its decoder layers are as they were.

    What lies outside of the layers (embeddings, the last norm, the head) is widened for good.
    """
    blocks = _blocks(model)
    kept: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}

    # by the module that is called, not by one seen here: a copy of the model has layers of its own
    def before(block: torch.nn.Module, _: Any) -> None:
        kept[id(block)] = [(tensor, tensor.data) for tensor in _narrower(block, dtype)]
        for tensor, narrow in kept[id(block)]:
            tensor.data = narrow.to(dtype)

    def after(block: torch.nn.Module, *_: Any) -> None:
        for tensor, narrow in kept.pop(id(block)):
            tensor.data = narrow

    inside = {id(tensor) for block in blocks for tensor in _narrower(block, dtype)}
    for tensor in _narrower(model, dtype):
        if id(tensor) not in inside:
            tensor.data = tensor.data.to(dtype)
    hooks = []
    for block in blocks:
        hooks += [block.register_forward_pre_hook(before), block.register_forward_hook(after)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def extra_bytes(model: Any, dtype: torch.dtype) -> int:
    """Most that `widened` needs at a time beside the model itself: what is outside of the layers, and one of them."""
    blocks = [sum(tensor.numel() for tensor in _narrower(block, dtype)) for block in _blocks(model)]
    outside = sum(tensor.numel() for tensor in _narrower(model, dtype)) - sum(blocks)
    return (outside + max(blocks, default=0)) * dtype.itemsize


def _blocks(module: torch.nn.Module) -> list[torch.nn.Module]:
    """The elements of the outermost lists of modules: of a language model, its decoder layers."""
    found: list[torch.nn.Module] = []
    for child in module.children():
        found += list(child) if isinstance(child, torch.nn.ModuleList) else _blocks(child)
    return found


def _narrower(module: torch.nn.Module, dtype: torch.dtype) -> list[torch.Tensor]:
    """Parameters and buffers that `dtype` is wider than, each once."""
    return [
        tensor
        for tensor in (*module.parameters(), *module.buffers())
        if tensor.is_floating_point() and tensor.itemsize < dtype.itemsize
    ]
