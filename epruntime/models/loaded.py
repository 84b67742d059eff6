"""LoadedModel: one rank's model, ready to compute flat ragged batches over a paged KV cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from epruntime.errors import ConfigError
from epruntime.models import adapter
from epruntime.models.attention import LatentCache, LatentLayer, PagedLayer, StepState
from epruntime.models.batch import ForwardBatch
from epruntime.models.info import ModelInfo
from epruntime.models.replay import LastHidden
from epruntime.moe.types import StepContext


@dataclass(frozen=True, kw_only=True)
class LoadReport:
    """What loading took on this rank.

    Attributes:
        needed_bytes: tensor bytes of this rank's experts, those it holds twice once, and of everything replicated.
        read_bytes: tensor bytes read. header_bytes: bytes of safetensors headers and index.
        checkpoint_bytes: tensor bytes of the whole checkpoint.
        local_experts: physical experts per MoE layer on this rank.
        ignored: checkpoint tensors that the family says are no part of the model.
    """

    needed_bytes: int
    read_bytes: int
    header_bytes: int
    checkpoint_bytes: int
    seconds: float
    local_experts: int
    ignored: tuple[str, ...] = ()


class LoadedModel:
    """A transformers module tree whose attention and experts are epruntime's.

    Args:
        layers: attention layers, in layer order.
        latent: layer_idx of the modules that keep latents -> their layer.
        context: shared with the MoE layers; its token count is set before each forward.
    """

    def __init__(
        self,
        *,
        model: torch.nn.Module,
        info: ModelInfo,
        layers: list[PagedLayer],
        latent: dict[int, LatentLayer],
        state: StepState,
        context: StepContext,
        report: LoadReport,
    ) -> None:
        self.info, self.load_report = info, report
        self.layers = layers
        self._model, self._state, self._context = model, state, context
        self._hidden = LastHidden(model)
        self._arguments: dict[str, Any] = {}
        if latent:
            self._arguments[adapter.cache_keyword(model)] = LatentCache(latent)
        self._has_kv = False
        self._num_rows = 0  # of the last batch, padding included

    @property
    def module(self) -> torch.nn.Module:
        return self._model

    def kv_bytes_per_block(self, block_size: int) -> int:
        """Bytes of all layers' keys and values in one block of `block_size` tokens."""
        return self.info.kv_bytes_per_block(block_size)

    def allocate_kv(self, num_blocks: int, block_size: int) -> None:
        """Makes the paged cache; replaces an earlier one."""
        if num_blocks < 1 or block_size < 1:
            raise ConfigError(f"num_kv_blocks={num_blocks}, block_size={block_size}: both must be at least 1")
        dtype = getattr(torch, self.info.dtype)
        for layer in self.layers:
            layer.allocate(num_blocks, block_size, dtype=dtype, device="cpu")
        self._has_kv = True

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Runs one step's batch.

        Returns:
            logits [N, V] float32 of the rows `batch.logits_rows_N`, in order.
        """
        assert self._has_kv, "allocate_kv comes before forward"
        self._state.batch, self._num_rows = batch, len(batch.input_ids_T)
        self._context.num_tokens = batch.num_tokens
        try:
            with torch.inference_mode():
                return self._logits(batch.input_ids_T, batch.positions_T, batch.logits_rows_N)
        finally:
            self._state.batch = None

    def logits(self, rows_N: torch.Tensor) -> torch.Tensor:
        """Runs the head on more rows of the last `forward`'s batch; no layer runs, so other ranks take no part.

        Args:
            rows_N: int64 [N]; the caller bounds N: a row of logits takes 4 bytes per token of the vocabulary.

        Returns:
            logits [N, V] float32.
        """
        with torch.inference_mode(), self._hidden.passed_over():
            # nobody reads the ids, but a family may compare their number with that of the rows
            unread_T = torch.zeros(self._num_rows, dtype=torch.int64)
            return self._logits(unread_T, unread_T, rows_N)

    def _logits(self, input_ids_T: torch.Tensor, positions_T: torch.Tensor, rows_N: torch.Tensor) -> torch.Tensor:
        logits_1NV = self._hidden.run(
            rows_N, input_ids=input_ids_T[None], position_ids=positions_T[None], **self._arguments
        )
        return logits_1NV[0].float()

    def close(self) -> None:
        """Frees weights and cache; the object is of no use afterwards."""
        self.layers.clear()
        self._arguments.clear()
        self._hidden.forget()
        self._has_kv = False
        self._model = torch.nn.Module()
