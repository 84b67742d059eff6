"""LastHidden: the layers' output of the last forward, kept so that more of its rows can be given logits.

forward: base model runs -> kept -> head on the rows that sample
logits:  base model is passed over, its kept output stands in -> head on other rows

What a family does between the last layer and its logits (slicing, scaling, soft caps) is in the forward of its causal
LM class. Running that forward again over a kept output takes all of it along, where a copy here would have to know it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import PreTrainedModel

from epruntime.errors import UnsupportedModelError


class LastHidden:
    """Wraps the forward of a causal LM's base model.

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
        self._run = base.forward
        self._kept: Any = None
        self._passing_over = False
        base.forward = self._forward

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

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        if not self._passing_over:
            self._kept = None  # before the next one is made
            self._kept = self._run(*args, **kwargs)
        return self._kept
