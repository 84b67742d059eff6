"""The language model of a multimodal checkpoint: prompts are text, so towers for images and sound are left out.

config.json -> language_config | class_for: transformers' class and the configuration that it is made of
            -> module tree on the meta device -> keep_language_model

transformers has a causal LM class for some multimodal types, which reads its part of such a checkpoint; for the others
there is the class of the whole model, whose forward, given token ids alone, calls nothing but the language model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MULTIMODAL_LM_MAPPING

#: Attributes of a language model: the multimodal one, without its towers, and what they were.
_WHOLE, _LEFT_OUT = "_epruntime_whole", "_epruntime_left_out"
_TEXT = "text_config"


def has_language_part(kind: Any) -> bool:
    """Are configurations of this class made of several models', of which one is a language model?"""
    return _TEXT in (kind.sub_configs or {})


def is_multimodal(config: Any) -> bool:
    """Is this configuration one of those?"""
    return has_language_part(type(config)) and getattr(config, _TEXT, None) is not None


def language_config(config: Any) -> Any:
    """The configuration of the language model: a part of a multimodal one's, or `config` itself."""
    return getattr(config, _TEXT) if is_multimodal(config) else config


def class_for(config: Any) -> tuple[Any, Any]:
    """What generates text: transformers' class for this configuration, and what it is made of.

    The latter is the language model's configuration where the class is a language model's.

    Raises:
        LookupError: transformers has no such class.
    """
    for mapping in (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MULTIMODAL_LM_MAPPING):
        found: Any = mapping.get(type(config), None)
        if found is not None:
            language = language_config(config)
            return found, language if found.config_class is type(language) else config
    raise LookupError(f"there is no model that generates text for {type(config).__name__}")


def whole_class(config: Any) -> Any:
    """The class of which `save_pretrained` makes checkpoints with this configuration. Raises as `class_for`."""
    whole = MODEL_FOR_MULTIMODAL_LM_MAPPING.get(type(config), None) if is_multimodal(config) else None
    return whole or class_for(config)[0]


def architectures(config: Any) -> list[str]:
    """Names of the classes whose checkpoints can be read: the served one, and the whole model's. May be none."""
    try:
        return list(dict.fromkeys((class_for(config)[0].__name__, whole_class(config).__name__)))
    except LookupError:
        return []


def build(config: Any, dtype: torch.dtype) -> Any:
    """The model that generates text, on the current device. Of a multimodal one the language model alone is kept.

    Raises:
        LookupError: transformers has no class for this configuration.
    """
    kind, made_of = class_for(config)
    model = kind._from_config(made_of, dtype=dtype)
    if is_multimodal(config):
        whole = model
        if made_of is not config:
            whole = whole_class(config)._from_config(config, dtype=dtype)
        object.__setattr__(model, _LEFT_OUT, keep_language_model(whole))
        object.__setattr__(model, _WHOLE, whole)
    return model


def from_pretrained(path: str | Path, config: Any, dtype: torch.dtype | str) -> Any:
    """transformers' own model of a checkpoint that is served, to compare with: the same class, in evaluation mode."""
    kind, made_of = class_for(config)
    return kind.from_pretrained(path, config=made_of, dtype=dtype).eval()


def keep_language_model(model: Any) -> tuple[str, ...]:
    """Takes out of a multimodal model, in place, every module that is no part of the language model or its head.

    Returns:
        prefixes of the names of the parameters that are gone.
    """
    kept = {id(module) for part in (model.get_decoder(), model.get_output_embeddings()) for module in part.modules()}
    gone: list[str] = []

    def prune(module: torch.nn.Module, path: str) -> None:
        for name, child in list(module.named_children()):
            inside = {id(part) for part in child.modules()}
            empty = next(child.parameters(), None) is None and next(child.buffers(), None) is None
            if inside <= kept or empty:
                continue
            if inside & kept:
                prune(child, f"{path}{name}.")
                continue
            delattr(module, name)
            gone.append(f"{path}{name}.")

    prune(model, "")
    return tuple(gone)


def left_out(model: Any) -> tuple[Any, tuple[str, ...]] | None:
    """Of a language model that `build` made of a part of another: that one, and prefixes of what it lacks."""
    gone: tuple[str, ...] = getattr(model, _LEFT_OUT, ())
    return (getattr(model, _WHOLE), gone) if gone else None
