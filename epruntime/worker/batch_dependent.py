"""The negative control of `epruntime verify`: one layer made to depend on the batch, as a library's matrix product may.

Whoever compares results of this rank, alone and in a batch, must find them different; else the comparison sees nothing.
"""

from __future__ import annotations

from typing import Any

import torch

from epruntime.models import adapter
from epruntime.moe.types import StepContext
from epruntime.worker.layer_trace import hidden_of

_BITS = {2: torch.int16, 4: torch.int32}


def make_batch_dependent(module: torch.nn.Module, context: StepContext) -> int:
    """From now on the middle layer turns last bits of its output over: in columns drawn by the step's number of rows.

    Two numbers of rows part in about half of the columns. A step that a sequence shares has more rows than its own
    alone, so every token shows it, also the only one of a prompt of one.

    Args:
        module: a loaded model. context: tells the rows of the running step.

    Returns:
        index of that layer.
    """
    layers = adapter.decoder_layers(module)
    index = list(layers)[len(layers) // 2]

    def hook(_: Any, args: Any, output: Any) -> Any:
        changed = hidden_of(output).clone()
        bits = _BITS[changed.element_size()]
        generator = torch.Generator().manual_seed(context.num_tokens)
        columns_H = torch.randint(2, changed.shape[-1:], generator=generator, dtype=bits)
        changed.view(bits).bitwise_xor_(columns_H)
        return changed if isinstance(output, torch.Tensor) else (changed, *output[1:])

    layers[index].register_forward_hook(hook)
    return index
