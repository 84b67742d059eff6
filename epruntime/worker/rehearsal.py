"""Rehearsal: a model's first forward, before there are requests, to see which ops it asks the CPU for.

model, store -> a few tokens without an exchange, every layer's activation -> Census -> what is not known to be steady
"""

from __future__ import annotations

import torch

from epruntime.models.batch import ForwardBatch
from epruntime.models.loaded import LoadedModel
from epruntime.moe.runtime import MoERuntime
from epruntime.ops.census import Census

_TOKENS = 4


def rehearse(model: LoadedModel, moe: MoERuntime, *, block_size: int) -> Census:
    """Runs the model on a few tokens of a sequence in KV block 0, which nobody owns yet.

    Experts return zeros without an exchange (`StepContext.probe`), so that ranks need not be in step; their activations
    are run by themselves.
    """
    count = min(_TOKENS, block_size)
    positions_T = torch.arange(count)
    batch = ForwardBatch(
        input_ids_T=torch.zeros(count, dtype=torch.int64),
        positions_T=positions_T,
        slots_T=positions_T.clone(),
        query_starts_S1=torch.tensor([0, count], dtype=torch.int32),
        seq_lens_S=torch.tensor([count], dtype=torch.int32),
        block_tables_SB=torch.zeros(1, 1, dtype=torch.int32),
        logits_rows_N=positions_T.clone(),
        num_tokens=count,
        rope_lens_S=torch.tensor([count], dtype=torch.int32),
    )
    moe.context.probe = True
    try:
        with Census() as census:
            model.forward(batch)
            with torch.inference_mode():
                for layer in model.info.moe_layers:
                    weights = moe.store.acquire(layer)
                    hidden, columns = weights.up_matrix.shape[1:]
                    weights.activation(weights.up_SIH.new_zeros(count, columns))
                    if weights.post is not None:
                        weights.post(weights.up_SIH.new_zeros(count, hidden))
    finally:
        moe.context.probe = False
    return census
