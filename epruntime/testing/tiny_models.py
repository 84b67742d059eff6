"""Tiny random models of every Mixture-of-Experts architecture that transformers has, for tests and benchmarks.

A fresh model of the library would hide mistakes: its weights are so small that logits are flat, and its biases, sinks
and correction biases are zero. Here weights are drawn wide and everything else is random too.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import transformers

from epruntime.models import adapter, text_part
from epruntime.models.conformance import COVERED, SINCE
from epruntime.models.small_config import small_config

#: Attribute of a language model: the multimodal model that it is a part of.
_WHOLE = "_epruntime_whole"


def available(model_types: Iterable[str]) -> list[str]:
    """Of covered model types, those that the installed transformers has in the tested form, sorted."""
    return sorted(t for t in model_types if adapter.version() >= SINCE.get(t, (0, 0)))


def distinct(model_types: Iterable[str]) -> list[str]:
    """Of covered types, those of which the installed transformers has the tested form, without multimodal ones in which
    what writes, or the language model, is of a covered type of its own: their layers are the same."""
    return [t for t in available(model_types) if COVERED.keys().isdisjoint(_types_within(t) - {t})]


def _types_within(model_type: str) -> set[str]:
    config = small_config(model_type)
    return {text_part.writing_config(config).model_type, text_part.language_config(config).model_type}


def build(
    model_type: str, seed: int = 0, *, dtype: torch.dtype = torch.float32, **overrides: Any
) -> tuple[Any, transformers.PreTrainedModel]:
    """A tiny random model in evaluation mode.

    Args:
        overrides: configuration fields, for example `sliding_window=6`; `initializer_range` is 0.3 by default.

    Returns:
        (configuration, model); of a multimodal type, what answers text: `save` writes all of it.
    """
    config = small_config(model_type, **overrides)
    generator_state = torch.random.get_rng_state()
    try:
        torch.manual_seed(seed)
        whole = text_part.whole_class(config)._from_config(config, dtype=dtype).eval()
        with torch.no_grad():
            for name, tensor in (*whole.named_parameters(), *whole.named_buffers()):
                std = _spread(name)
                if "softmax_scaling" in name:  # of queries, by the logarithm of the position: 1 in a fresh model
                    tensor.copy_(torch.randn_like(tensor) * 0.2 + tensor)
                    continue
                if name.endswith("tid2eid"):  # [V, K] expert ids by token, where a hash of the token routes
                    num_experts = len(whole.get_submodule(name.rpartition(".")[0]).weight)
                    tensor.copy_(torch.rand(len(tensor), num_experts).argsort(1)[:, : tensor.shape[1]])
                elif std is not None and tensor.is_floating_point():
                    tensor.normal_(std=std)
                elif tensor.dim() > 1 and tensor.is_floating_point() and not tensor.any():
                    tensor.normal_(std=0.3)  # a router that transformers forgets to initialise
                elif "norm" in name and name.endswith("weight"):
                    tensor.add_(torch.randn_like(tensor) * 0.1)
    finally:
        torch.random.set_rng_state(generator_state)
    return config, _language_model(whole, config)


def _spread(name: str) -> float | None:
    short = name.rpartition(".")[2]
    if "correction" in name or "expert_bias" in name:
        return 0.1
    if "sink" in short:
        return 1.0
    if name.endswith("rotary_emb.alpha"):  # of rotary frequencies, whose logarithm it is added to
        return 0.3
    return 0.1 if "bias" in short else None


def _language_model(whole: Any, config: Any) -> Any:
    """What answers text in a whole model: itself, or a causal LM of the same modules, where transformers has one."""
    kind, made_of = text_part.class_for(config)
    if isinstance(whole, kind):
        return whole
    model = next((module for module in whole.modules() if isinstance(module, kind)), None)
    if model is None:
        model = kind._from_config(made_of).eval()
        model.model, model.lm_head = whole.get_decoder(), whole.get_output_embeddings()
    object.__setattr__(model, _WHOLE, whole)
    return model


def save(model: transformers.PreTrainedModel, path: str | Path, *, max_shard_size: str = "5GB") -> Path:
    """Writes config.json and safetensors in the layout of published checkpoints. Returns the directory.

    Of a model that `build` made, towers included.
    """
    getattr(model, _WHOLE, model).save_pretrained(str(path), max_shard_size=max_shard_size)
    return Path(path)
