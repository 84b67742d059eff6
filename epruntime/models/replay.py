"""LastHidden: the layers' output of the last forward, kept so that more of its rows can be given logits.

forward: base model runs -> kept -> head on the rows that sample
logits:  base model is passed over, its kept output stands in -> head on other rows

What a family does between the last layer and its logits (slicing, scaling, soft caps) is in the forward of its causal
LM class. Running that forward again over a kept output takes all of it along, where a copy here would have to know it.
That forward is told by an argument (`logits_to_keep`) which rows logits are wanted of. Where it has none, the base
model's output that it is handed has these rows alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from epruntime.errors import UnsupportedModelError
from epruntime.models import adapter


class LastHidden:
    """Wraps the forward of a causal LM's base model, and runs the LM.

    Raises:
        UnsupportedModelError: the model has no base model of its own.
    """

    def __init__(self, model: Any) -> None:
        base = model.get_decoder()
        if base.get_output_embeddings() is not None:  # Llama 4: a causal LM within the multimodal one
            bases = [child for child in base.children() if isinstance(child, PreTrainedModel)]
            base = bases[0] if len(bases) == 1 else model
        if base is model:
            raise UnsupportedModelError(f"{type(model).__name__} has no base model apart from its head")
        self._model, self._base, self._run = model, base, base.forward
        self._takes_rows = adapter.takes_rows(model)
        self._kept: Any = None
        self._rows_N: torch.Tensor | None = None
        self._passing_over = False
        base.forward = self._forward

    def run(self, rows_N: torch.Tensor, **arguments: Any) -> torch.Tensor:
        """The causal LM's logits [1, N, V] of these rows, int64 [N].

        Raises:
            UnsupportedModelError: they are of other rows.
        """
        try:
            if self._takes_rows:
                arguments["logits_to_keep"] = rows_N
            else:
                self._rows_N = rows_N
            logits: torch.Tensor = self._model(**arguments).logits
        finally:
            self._rows_N = None
        if logits.dim() != 3 or logits.shape[:2] != (1, len(rows_N)):
            raise UnsupportedModelError(
                f"{type(self._model).__name__}: its forward gives logits {tuple(logits.shape)} for {len(rows_N)} rows"
            )
        return logits

    @contextmanager
    def passed_over(self) -> Iterator[None]:
        """While it lasts the base model does not run, and returns what it returned last."""
        assert self._kept is not None, "a forward comes first"
        self._passing_over = True
        try:
            yield
        finally:
            self._passing_over = False

    def forget(self) -> None:
        """Lets go of what is kept."""
        self._kept = None

    def unwrap(self) -> None:
        """Leaves the base model as it was."""
        self.forget()
        del self._base.forward

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        if not self._passing_over:
            self._kept = None  # before the next one is made
            self._kept = self._run(*args, **kwargs)
        return self._kept if self._rows_N is None else _only(self._kept, self._rows_N)


def _only(output: Any, rows_N: torch.Tensor) -> Any:
    """A base model's output with some rows [1, N, H] of the last hidden state, in place of all [1, T, H]."""
    hidden_1TH = output.get("last_hidden_state") if isinstance(output, ModelOutput) else None
    if hidden_1TH is None or hidden_1TH.dim() != 3:
        raise UnsupportedModelError(f"a base model returns a {type(output).__name__} without hidden states [1, T, H]")
    return type(output)(**{**output, "last_hidden_state": hidden_1TH[:, rows_N]})
