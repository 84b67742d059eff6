"""The language model of a multimodal checkpoint: prompts are text, so towers for images and sound are left out.

config.json -> language_config | class_for: transformers' class and the configuration that it is made of
            -> module tree on the meta device -> keep_language_model

transformers has a causal LM class for some multimodal types, which reads its part of such a checkpoint; for the others
there is the class of the whole model, whose forward, given token ids alone, calls nothing but the language model. A
model that answers by several in turn (text, then speech) has no forward: of its parts the one that writes is served.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MULTIMODAL_LM_MAPPING

#: Attributes of a language model: the multimodal one, without its towers, and what they were.
_WHOLE, _LEFT_OUT = "_epruntime_whole", "_epruntime_left_out"
_TEXT = "text_config"


def language_field(kind: Any) -> str:
    """Field of such a configuration in which the language model's is, or a multimodal one that holds it; "" if none."""
    parts = kind.sub_configs or {}
    if _TEXT in parts:
        return _TEXT
    writes = (
        name
        for name, part in parts.items()
        if MODEL_FOR_MULTIMODAL_LM_MAPPING.get(part, None) is not None and has_language_part(part)
    )
    return next(writes, "")


def has_language_part(kind: Any) -> bool:
    """Are configurations of this class made of several models', of which one is a language model?"""
    return bool(language_field(kind))


def is_multimodal(config: Any) -> bool:
    """Is this configuration one of those?"""
    return has_language_part(type(config)) and getattr(config, language_field(type(config)), None) is not None


def writing_config(config: Any) -> Any:
    """The configuration of what generates text: of a model that answers by several in turn a part, else `config`."""
    if not is_multimodal(config) or (field := language_field(type(config))) == _TEXT:
        return config
    return writing_config(getattr(config, field))


def language_config(config: Any) -> Any:
    """The configuration of the language model: a part of a multimodal one's, or `config` itself."""
    config = writing_config(config)
    return getattr(config, _TEXT) if is_multimodal(config) else config


def class_of(kind: Any) -> Any:
    """transformers' class that generates text for configurations of this class; None: there is none."""
    for mapping in (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MULTIMODAL_LM_MAPPING):
        found: Any = mapping.get(kind, None)
        if found is not None:
            return found
    return None


def class_for(config: Any) -> tuple[Any, Any]:
    """What generates text: transformers' class for this configuration, and what it is made of.

    The latter is the language model's configuration where the class is a language model's.

    Raises:
        LookupError: transformers has no such class.
    """
    config = writing_config(config)
    found = class_of(type(config))
    if found is None:
        raise LookupError(f"there is no model that generates text for {type(config).__name__}")
    language = language_config(config)
    return found, language if found.config_class is type(language) else config


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
    if not is_multimodal(config):
        return kind._from_config(made_of, dtype=dtype)
    whole = whole_class(config)._from_config(config, dtype=dtype)
    model = whole if made_of is config else kind._from_config(_tied_as(whole, made_of), dtype=dtype)
    writes, others = whole, list[str]()
    if made_of is not config and is_multimodal(made_of):  # a part of it has towers of its own
        keep_language_model(model)
        # the other parts may be switched off, and in the files all the same
        field = language_field(type(config))
        others = [f"{name.removesuffix('_config')}." for name in config.sub_configs if name != field]
        writes = next(module for module in whole.modules() if isinstance(module, kind))
    object.__setattr__(model, _LEFT_OUT, (*keep_language_model(whole, writes), *others))
    object.__setattr__(model, _WHOLE, whole)
    return model


def _tied_as(whole: Any, language: Any) -> Any:
    """The language model's configuration, its head tied if it is in the whole model.

    Which part of a configuration says it, the outer one or the language model's own, is the whole class's choice.
    """
    if is_multimodal(language):  # it has a head of its own, and the whole model none
        return language
    names = {module: f"{name}.weight" for name, module in whole.named_modules()}
    table, head = names[whole.get_input_embeddings()], names[whole.get_output_embeddings()]
    tied = whole.all_tied_weights_keys
    language = copy.deepcopy(language)
    language.tie_word_embeddings = tied.get(head) == table or tied.get(table) == head
    return language


def from_pretrained(path: str | Path, config: Any, dtype: torch.dtype | str) -> Any:
    """transformers' own model of a checkpoint that is served, to compare with: the same class, in evaluation mode."""
    kind, made_of = class_for(config)
    if made_of is not config:
        with torch.device("meta"):
            made_of = _tied_as(whole_class(config)._from_config(config), made_of)
    return kind.from_pretrained(path, config=made_of, dtype=dtype).eval()


def keep_language_model(model: Any, writes: Any = None) -> tuple[str, ...]:
    """Takes out of a multimodal model, in place, every module that is no part of the language model or its head.

    Args:
        writes: the model within that has these two; None: `model` itself.

    Returns:
        prefixes of the names of the parameters that are gone.
    """
    writes = model if writes is None else writes
    kept = {id(module) for part in (writes.get_decoder(), writes.get_output_embeddings()) for module in part.modules()}
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
