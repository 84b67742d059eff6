"""LayerTrace: an exact hash of every row's hidden state after every decoder layer, to find where two runs part.

batch -> input of the first layer, output of each layer -> hash of a row's bits -> kept until `trace` takes them

Only made where the `load` message asks for it; a rank that serves has none of these hooks.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from epruntime.models import adapter
from epruntime.worker.input_batch import StepBatch

_SEED = 20_260_101
_BITS = {2: torch.int16, 4: torch.int32}


class LayerTrace:
    """Hooks the decoder layers of a loaded model.

    The hash of a row is the dot product of its bits, read as integers, with fixed random 64-bit integers, modulo 2^64:
    rows that differ have different hashes, but for one in about 2^64.

    Args:
        module: the loaded model.

    Attributes:
        layers: names of the columns of a trace, in order: "input", then the index of each layer.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        found = adapter.decoder_layers(module)
        self.layers = ("input", *(str(index) for index in found))
        self._factors_H = torch.empty(0, dtype=torch.int64)
        self._hashes_TL = np.zeros((0, len(self.layers)), np.int64)
        self._steps: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        for column, layer in enumerate(found.values(), start=1):
            if column == 1:
                layer.register_forward_pre_hook(self._before, with_kwargs=True)
            layer.register_forward_hook(self._after(column))

    def on_batch(self, batch: StepBatch) -> None:
        """A step is about to be computed: whose rows are which."""
        num_tokens, starts = batch.forward.num_tokens, batch.forward.query_starts_S1.numpy()
        counts_S = np.diff(starts)
        rids = np.repeat(np.array([request.rid for request in batch.scheduled], np.int64), counts_S)
        self._hashes_TL = np.zeros((num_tokens, len(self.layers)), np.int64)
        if num_tokens:
            # by their place in the history, and not by the positions that the model is told, which may be what is wrong
            ahead_S = batch.forward.seq_lens_S.numpy().astype(np.int64) - starts[1:]
            self._steps.append((rids, np.arange(num_tokens) + np.repeat(ahead_S, counts_S), self._hashes_TL))

    def take(self) -> dict[str, Any]:
        """All rows since the last call, forgotten here.

        Returns:
            {"layers": [names], "rids", "positions": bytes of int64 [N], "hashes": bytes of int64 [N, L]}
        """
        steps, self._steps = self._steps, []
        names = ("rids", "positions", "hashes")
        columns = zip(*steps, strict=True) if steps else ((), (), ())
        packed = {name: b"".join(map(np.ndarray.tobytes, parts)) for name, parts in zip(names, columns, strict=True)}
        return {"layers": list(self.layers), **packed}

    def _before(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._note(0, args[0] if args else kwargs["hidden_states"])

    def _after(self, column: int) -> Any:
        def hook(_: Any, args: Any, output: Any) -> None:
            self._note(column, hidden_of(output))

        return hook

    def _note(self, column: int, hidden_1TH: torch.Tensor) -> None:
        num_tokens = len(self._hashes_TL)
        rows_TH = hidden_1TH[0].flatten(1)[:num_tokens].contiguous()  # some families keep several streams per token
        if len(self._factors_H) != rows_TH.shape[1]:
            generator = torch.Generator().manual_seed(_SEED)
            size = (rows_TH.shape[1],)
            self._factors_H = torch.randint(-(2**63), 2**63 - 1, size, generator=generator, dtype=torch.int64)
        bits_TH = rows_TH.view(_BITS[rows_TH.element_size()]).long()
        self._hashes_TL[:, column] = (bits_TH * self._factors_H).sum(-1).numpy()


def hidden_of(output: Any) -> torch.Tensor:
    """Hidden states [1, T, H] (or [1, T, streams, H]) of what a decoder layer returned: they alone, or the first."""
    hidden: torch.Tensor = output if isinstance(output, torch.Tensor) else output[0]
    return hidden
