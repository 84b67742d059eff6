"""One MoE layer's experts, wherever they are.

x, topk_ids, topk_weights -> dispatch -> per round: local experts -> return -> combine -> y
"""

from __future__ import annotations

import torch

from epruntime.moe.dispatch import Dispatcher
from epruntime.moe.experts.base import ExpertsBackend
from epruntime.moe.stats import LayerStats
from epruntime.moe.store import ExpertStore
from epruntime.moe.types import StepContext


class MoELayer:
    """The routed experts of one layer. Router and shared experts are the model's own.

    Made by `MoERuntime.make_layer`. Its calls are collective: every rank runs every layer in every step.
    """

    def __init__(
        self,
        *,
        layer_index: int,
        dispatcher: Dispatcher,
        backend: ExpertsBackend,
        store: ExpertStore,
        context: StepContext,
        stats: LayerStats,
    ) -> None:
        self.layer_index = layer_index
        self.backend = backend
        self._dispatcher, self._store, self._context, self._stats = dispatcher, store, context, stats

    def forward(self, x_TH: torch.Tensor, topk_ids_TK: torch.Tensor, topk_weights_TK: torch.Tensor) -> torch.Tensor:
        """Sum over k of weight x expert(x), in k order, in fp32, cast once.

        Args:
            x_TH: hidden states in the model dtype. Rows from `context.num_tokens` on are padding.
            topk_ids_TK: integer logical expert ids, -1 for "not routed". An id may occur twice in a row.
            topk_weights_TK: floating point; used in fp32.

        Returns:
            [T, H] in x's dtype; zeros for padding rows and where nothing is routed. During the load-time probe
            (`context.probe`) all zeros, without an exchange.

        Raises:
            RankLostError, EngineDeadError: a peer is gone; the generation has ended.
        """
        if self._context.probe:
            return torch.zeros_like(x_TH)
        self._context.stamps.at_layer(self.layer_index)
        dispatcher, weights = self._dispatcher, self._store.acquire(self.layer_index)
        handle = dispatcher.prepare(x_TH, topk_ids_TK, self._context.num_tokens, self._stats)
        for _ in range(handle.num_rounds):
            rows = dispatcher.receive(handle)
            dispatcher.send_back(handle, self.backend.forward(rows, weights))
        return dispatcher.finalize(handle, topk_weights_TK)

    __call__ = forward
