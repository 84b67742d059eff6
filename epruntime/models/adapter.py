"""The public extension points of transformers that epruntime plugs into: configuration, module tree, hooks.

config.json -> read_config -> build_meta_model -> probe (probe.py) -> weights (weights.py) -> serving hooks

The loader functions of transformers, which are not public, are met in `conversions.py` alone. Objects that
compute (an `ExpertsLayer`, an `AttentionLayer`) are bound to the modules at load, and the registered functions
find them there: a keyword sent through transformers' forward may be swallowed by a `**kwargs`, a missing
attribute cannot.
"""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
import transformers
from transformers import AttentionInterface, AttentionMaskInterface, AutoConfig
from transformers.initialization import no_init_weights
from transformers.integrations.moe import ExpertsInterface

from epruntime.errors import ConfigError, UnsupportedModelError
from epruntime.models import families, sparse, text_part
from epruntime.models.families.experts import InterfaceExperts

logger = logging.getLogger("epruntime.models")

#: First supported and first unsupported version of transformers; both ends are tested.
VERSION_RANGE = ((5, 16), (5, 25))

#: Names that epruntime registers. A mask function exists for the probe only: the serving name has none,
#: so that transformers builds no mask.
SERVE, PROBE = "epruntime", "epruntime_probe"
EXPERTS_ATTRIBUTE = "_epruntime_experts"
ATTENTION_ATTRIBUTE = "_epruntime_attention"


class ExpertsLayer(Protocol):
    """Computes routed experts: x [T, H], ids int [T, K], weights [T, K] -> [T, H]."""

    def forward(self, x_TH: torch.Tensor, topk_ids_TK: torch.Tensor, topk_weights_TK: torch.Tensor) -> torch.Tensor: ...


class AttentionLayer(Protocol):
    """Attends over the paged cache: query [1, H, T, D], key and value [1, K, T, D] -> [1, T, H, V].

    `selected_TW`: the only key positions that each row sees, -1 for none; None: those that the mask allows.
    """

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scaling: float | None,
        sinks_H: torch.Tensor | None,
        selected_TW: torch.Tensor | None,
    ) -> torch.Tensor: ...


def version() -> tuple[int, int]:
    """Major and minor version of the installed transformers."""
    match = re.match(r"(\d+)\.(\d+)", transformers.__version__)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def check_version() -> None:
    """Raises ConfigError if the installed transformers is outside the tested range."""
    low, high = VERSION_RANGE
    if not low <= version() < high:
        raise ConfigError(
            f"transformers {transformers.__version__} is installed; epruntime is tested with "
            f">={low[0]}.{low[1]},<{high[0]}.{high[1]}: install a version of that range"
        )


def read_config(path: Path) -> transformers.PretrainedConfig:
    """Configuration of a checkpoint directory. Never runs code that comes with the checkpoint, never downloads."""
    check_version()
    try:
        return AutoConfig.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # a class of the library raises what it likes
        raise UnsupportedModelError(
            f"{path}: transformers {transformers.__version__} does not read config.json: {error}"
        ) from error


def as_ids(value: int | list[int] | None) -> list[int]:
    """Token ids from a field that transformers keeps as None, an int or a list."""
    if value is None:
        return []
    return list(value) if isinstance(value, list) else [value]


def is_native(model_type: str) -> bool:
    """Does transformers itself define this model type? Then code that comes with a checkpoint is not needed."""
    return model_type in transformers.CONFIG_MAPPING


def build_meta_model(config: transformers.PretrainedConfig, dtype: torch.dtype) -> transformers.PreTrainedModel:
    """The module tree on the meta device: every name and shape, no memory. In evaluation mode.

    Of a multimodal model, the language model and its head alone (`text_part`).

    Settings that would only cost time (router logits kept for a training loss) are switched off. Experts that go
    around transformers' experts interface are put on it where there is an adapter (`families`).
    """
    language = text_part.language_config(config)
    for part in (config, text_part.writing_config(config), language):
        if getattr(part, "output_router_logits", False):
            part.output_router_logits = False
        part.use_cache = False
    try:
        with torch.device("meta"), no_init_weights():
            model = text_part.build(config, dtype)
            families.adapt(model, language)
        sparse.adapt(model)
    except Exception as error:  # a class of the library raises what it likes
        raise UnsupportedModelError(
            f"{config.model_type}: transformers {transformers.__version__} cannot build this "
            f"model from its config.json: {type(error).__name__}: {error}"
        ) from error
    return model.eval()


def experts_modules(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Modules whose forward goes through transformers' experts interface, by name, in module order."""
    return {
        name: module
        for name, module in model.named_modules()
        if all(hasattr(module, attribute) for attribute in ("has_gate", "has_bias", "is_transposed", "_apply_gate"))
        and isinstance(getattr(module, "down_proj", None), torch.nn.Parameter)
    }


def rope_types(model: torch.nn.Module) -> set[str]:
    """Types of the model's rotary embeddings (a module keeps one, or one per kind of layer)."""
    kinds: set[str] = set()
    for module in model.modules():
        kind = getattr(module, "rope_type", None)
        if isinstance(kind, str):
            kinds.add(kind)
        elif isinstance(kind, dict):
            kinds.update(str(k) for k in kind.values())
    return kinds


def layer_index(name: str) -> int:
    """Index of the decoder layer that a module belongs to: the first number in its dotted name."""
    for part in name.split("."):
        if part.isdigit():
            return int(part)
    raise UnsupportedModelError(f"module {name} has experts but is in no numbered layer")


def decoder_layers(model: torch.nn.Module) -> dict[int, torch.nn.Module]:
    """Decoder layers of a loaded model by index, ascending: what holds an attention layer that is served."""
    modules = dict(model.named_modules())
    found: dict[int, torch.nn.Module] = {}
    for name, module in modules.items():
        if hasattr(module, ATTENTION_ATTRIBUTE):
            parts = name.split(".")
            end = next(i for i, part in enumerate(parts) if part.isdigit())
            found[int(parts[end])] = modules[".".join(parts[: end + 1])]
    return dict(sorted(found.items()))


def cache_keyword(model: torch.nn.Module) -> str:
    """Name of forward's cache argument, read from its signature: transformers renamed it."""
    names = inspect.signature(inspect.unwrap(type(model).forward)).parameters
    for keyword in ("cache", "past_key_values"):
        if keyword in names:
            return keyword
    raise UnsupportedModelError(f"{type(model).__name__}.forward takes no cache argument")


def check_forward_arguments(model: torch.nn.Module) -> None:
    """Refuses a model whose forward lacks an argument that serving relies on by name."""
    names = inspect.signature(inspect.unwrap(type(model).forward)).parameters
    absent = [n for n in ("input_ids", "position_ids") if n not in names]
    if absent:
        raise UnsupportedModelError(
            f"{type(model).__name__}.forward takes no {', '.join(absent)}: a flat ragged batch cannot be passed to it"
        )


def takes_rows(model: torch.nn.Module) -> bool:
    """Has forward an argument that says of which rows logits are wanted?"""
    return "logits_to_keep" in inspect.signature(inspect.unwrap(type(model).forward)).parameters


def use_hooks(model: Any, name: str) -> None:
    """Points attention and experts of every submodule to the functions registered as `name`."""
    # the configuration of a part that was left out is not touched
    model.set_attn_implementation({"": name, "text_config": name} if text_part.is_multimodal(model.config) else name)
    own = [module for module in model.modules() if isinstance(module, InterfaceExperts)]
    for module in own:
        module.implementation = name
    if not own:
        model.set_experts_implementation(name)


def register(
    name: str, *, attention: Callable[..., Any], experts: Callable[..., Any], mask: Callable[..., Any] | None = None
) -> None:
    AttentionInterface.register(name, attention)
    ExpertsInterface.register(name, experts)
    if mask is not None:
        AttentionMaskInterface.register(name, mask)


def _serve_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    s_aux: torch.Tensor | None = None,
    indices: torch.Tensor | None = None,
    **_seen_by_the_probe: Any,
) -> tuple[torch.Tensor, None]:
    layer: AttentionLayer = getattr(module, ATTENTION_ATTRIBUTE)
    return layer.attend(query, key, value, scaling=scaling, sinks_H=s_aux, selected_TW=indices), None


def _serve_experts(
    module: torch.nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    layer: ExpertsLayer = getattr(module, EXPERTS_ATTRIBUTE)
    return layer.forward(hidden_states, top_k_index, top_k_weights)


register(SERVE, attention=_serve_attention, experts=_serve_experts)
