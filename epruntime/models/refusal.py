"""What is refused by name, and why. Everything that no conformance test covers is refused too (`conformance.py`)."""

from __future__ import annotations

from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import DynamicCache, GenerationMixin

from epruntime.errors import CheckpointError, UnsupportedModelError
from epruntime.models import adapter, text_part
from epruntime.models.conformance import COVERED, COVERED_ROPE_TYPES, LANGUAGES, PARTLY, SINCE
from epruntime.models.probe import OR, Probe
from epruntime.models.visibility import Visibility

LISTED = "`epruntime models` lists what is served"
_LINEAR = "some of its layers are linear attention, a state space or a convolution, whose state is not kept per request"
_OWN_EXPERTS = "its experts do not go through transformers' experts interface"

#: model_type -> reason. Types that are in neither table are refused for want of a conformance test.
REFUSED: dict[str, str] = {
    **dict.fromkeys(
        (
            "qwen4_exp_text",
            "kimi_linear",
            "bailing_hybrid",
            "nemotron_h",
            "zaya",
            "inkling_text",
            "inkling2_text",
            "inkling2_loop_text",
            "bamba",
            "mamba",
            "mamba2",
            "falcon_h1",
            "zamba",
            "zamba2",
            "recurrent_gemma",
            "rwkv",
        ),
        _LINEAR,
    ),
    **dict.fromkeys(("jetmoe", "doge"), _OWN_EXPERTS),
}

#: model_type -> why a model of a type that is served in part (`conformance.PARTLY`) is not.
REFUSED_PART: dict[str, str] = {
    **dict.fromkeys(PARTLY, _LINEAR),
    "deepseek_v4": "its attention compresses keys over several tokens",
    "unlimited_ocr": "its attention sees all of the prompt, and a window of what was generated after it",
}

#: Fields of config.json by which transformers reads other files than the usual ones.
_ELSEWHERE = ("transformers_weights", "configuration_files")
_QUANTIZATION = ("quantization_config", "compression_config")
#: Every covered language model's configuration has these.
_SIZES = ("max_position_embeddings", "num_hidden_layers", "vocab_size", "hidden_size")
_SUB_CONFIGS = ("text_config", "vision_config", "audio_config", "thinker_config", "vision_tower_config")


def check_raw_config(path: Path, raw: dict[str, Any]) -> None:
    """Refusals that config.json alone decides, before transformers sees it."""
    model_type = raw.get("model_type")
    if not isinstance(model_type, str):
        raise UnsupportedModelError(f"{path}: config.json names no model_type")
    if not adapter.is_native(model_type):
        near = get_close_matches(model_type, COVERED, n=1, cutoff=0.8)
        code = ", and modelling code that the checkpoint brings (auto_map) is never run" if raw.get("auto_map") else ""
        raise UnsupportedModelError(
            f"{path}: transformers {transformers.__version__} knows no model_type {model_type}"
            f"{f' (did you mean {near[0]}?)' if near else ''}{code}; {LISTED}"
        )
    elsewhere = [name for name in _ELSEWHERE if raw.get(name)]
    if elsewhere:
        raise UnsupportedModelError(
            f"{path}: config.json says by {elsewhere[0]} that other files of this directory count: give them the usual "
            "names, and take the field out"
        )
    parts = [name for name in _SUB_CONFIGS if raw.get(name)]
    quantization = next(filter(None, (part.get(name) for part in _nested(raw) for name in _QUANTIZATION)), None)
    if quantization:
        method = quantization.get("quant_method", "unnamed") if isinstance(quantization, dict) else "unnamed"
        raise UnsupportedModelError(
            f"{path}: the weights are quantised (method {method}), which is not supported yet; "
            "use a float32 or bfloat16 checkpoint"
        )
    if parts and (
        model_type not in COVERED or not text_part.has_language_part(transformers.CONFIG_MAPPING[model_type])
    ):
        _check_type(path, model_type)
        raise UnsupportedModelError(
            f"{path}: {model_type} is a multimodal checkpoint ({', '.join(parts)}), and no conformance test covers the "
            f"language model in it; {LISTED}"
        )


def _nested(raw: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A configuration as it is written, and those of the models in it."""
    yield raw
    for name in _SUB_CONFIGS:
        if isinstance(raw.get(name), dict):
            yield from _nested(raw[name])


def check_architecture(path: Path, config: Any, raw: dict[str, Any]) -> str:
    """Name of the class that generates text; refuses types of the table, other task heads and dense models' heads."""
    model_type = config.model_type
    _check_type(path, model_type)
    readable = text_part.architectures(config)
    if not readable:
        raise UnsupportedModelError(
            f"{path}: transformers has no model that generates text for model_type {model_type}; {LISTED}"
        )
    named = raw.get("architectures")
    # transformers may serve a type by the class of another one: SarvamMoEForCausalLM by Glm4MoeForCausalLM
    known = {_letters(name) for name in (*readable, f"{model_type}ForCausalLM")}
    if isinstance(named, list) and named and known.isdisjoint(_letters(str(name)) for name in named):
        raise UnsupportedModelError(
            f"{path}: the checkpoint is a {', '.join(map(str, named))}; {model_type} is served as "
            f"{' or '.join(readable)} only"
        )
    return readable[0]


def _letters(name: str) -> str:
    """What is the same where published names of a class and transformers' differ.

    PhiMoEForCausalLM, PhimoeForCausalLM; KimiK25ForConditionalGeneration, Kimi_K25ForConditionalGeneration.
    """
    return name.lower().replace("_", "")


def _check_type(path: Path, model_type: str) -> None:
    reason = reason_against(model_type)
    if reason is not None:
        raise UnsupportedModelError(f"{path}: {model_type} is not supported: {reason}; {LISTED}")


def reason_against(model_type: str) -> str | None:
    """Why a type is refused whatever its configuration says; None if it is not."""
    if model_type in REFUSED:
        return REFUSED[model_type]
    since = SINCE.get(model_type)
    if since is not None and adapter.version() < since:
        return f"it needs transformers {since[0]}.{since[1]} or newer"
    known = adapter.is_native(model_type)
    return _not_autoregressive(text_part.class_of(transformers.CONFIG_MAPPING[model_type])) if known else None


def _not_autoregressive(kind: Any) -> str | None:
    """Told by `generate`: it is transformers' own in every class that writes one token after another."""
    if kind is None or issubclass(kind, GenerationMixin):
        return None
    blocks = any("denois" in name for name in dir(kind))
    how = "it refines a block of tokens in several steps (block diffusion)" if blocks else "it has a way of its own"
    return f"it is no autoregressive model, which appends one token after another: {how}"


def check_sizes(path: Path, config: Any, num_tensors: int) -> None:
    """Refuses sizes that nothing later would catch, or only after hours of building module after module.

    Raises:
        CheckpointError: config.json is damaged, or belongs to other files.
        UnsupportedModelError: the configuration is of another kind, and has no such sizes.
    """
    lacking = [name for name in _SIZES if type(getattr(config, name, None)) is not int]
    if lacking:
        raise UnsupportedModelError(
            f"{path}: the configuration of a {config.model_type} says no {', '.join(lacking)}: it is of another kind "
            f"than those that conformance tests cover; {LISTED}"
        )
    if config.max_position_embeddings < 1:
        raise CheckpointError(
            f"{path}: config.json says max_position_embeddings={config.max_position_embeddings}; a "
            "sequence has at least one token"
        )
    if getattr(config, "final_logit_softcapping", None) == 0:
        raise CheckpointError(
            f"{path}: config.json says final_logit_softcapping=0, and logits are divided by it: no logit would be a "
            "number"
        )
    if config.num_hidden_layers > num_tensors:
        raise CheckpointError(
            f"{path}: config.json says num_hidden_layers={config.num_hidden_layers}, but the "
            f"checkpoint holds {num_tensors} tensors in all"
        )


def check_shared_keys(path: Path, config: Any) -> None:
    """Refuses layers that attend to the keys and values of another one."""
    count = getattr(config, "num_kv_shared_layers", None)
    if count:
        raise UnsupportedModelError(
            f"{path}: config.json says num_kv_shared_layers={count}: layers that attend to the keys and values of "
            "another one are not served"
        )


def check_num_experts(path: Path, num_experts: int, num_elements: int) -> None:
    """Refuses more experts than there are numbers in the files, before anything is made for each expert.

    Raises:
        CheckpointError: config.json is damaged, or belongs to other files.
    """
    if num_experts > num_elements:
        raise CheckpointError(
            f"{path}: config.json says that a layer has {num_experts} experts, but the checkpoint holds {num_elements} "
            "numbers in all"
        )


def check_embeddings(path: Path, model: torch.nn.Module, config: Any) -> None:
    """Refuses a table with fewer rows than there are token ids: a covered model looks up all its tables by them.

    Raises:
        CheckpointError: a token id would end the engine.
    """
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Embedding) and module.num_embeddings < config.vocab_size:
            rows = module.num_embeddings
            fields = sorted(f for f, value in config.to_dict().items() if "vocab_size" in f and value == rows)
            raise CheckpointError(
                f"{path}: config.json says vocab_size={config.vocab_size}, but {name} has rows for {rows} token ids"
                f"{''.join(f' ({field}={rows})' for field in fields)}: other ids would have no embedding; config.json "
                "is damaged, or belongs to other files"
            )


def check_expert_table(path: Path, model: torch.nn.Module, num_experts: int) -> None:
    """Refuses a table of experts by token id (`tid2eid`) that names experts which no layer has. Weights are loaded.

    Raises:
        CheckpointError: the file is damaged.
    """
    for name, table_VK in model.named_buffers():
        if not name.endswith("tid2eid"):
            continue
        wrong = ((table_VK < 0) | (table_VK >= num_experts)).nonzero()
        if len(wrong):
            token, choice = wrong[0].tolist()
            raise CheckpointError(
                f"{path}: {name} sends token id {token} to expert {int(table_VK[token, choice])}; a layer has experts "
                f"0 to {num_experts - 1}. The file is damaged: fetch it anew"
            )


def check_has_experts(model: torch.nn.Module, config: Any, experts: dict[str, torch.nn.Module]) -> None:
    """Refuses dense models, and models with experts of their own kind."""
    if experts:
        return
    name = type(model).__name__
    counts = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    language = text_part.language_config(config)
    if any((getattr(language, count, None) or 0) > 1 for count in counts):
        if config.model_type in COVERED:  # whose experts are known to go through the interface
            raise UnsupportedModelError(
                f"{name}: config.json puts experts in no layer, and Mixture-of-Experts models are served; look at its "
                "fields that say which layers have experts"
            )
        raise UnsupportedModelError(f"{name}: {_OWN_EXPERTS}, or its configuration puts experts in no layer")
    raise UnsupportedModelError(
        f"{name} has no routed experts: it is a dense model, and Mixture-of-Experts models are "
        "served (`epruntime upcycle` makes one of a dense model)"
    )


def explained(model_type: str, error: UnsupportedModelError) -> UnsupportedModelError | None:
    """What the probe refused, with what is known of a type that is served in part; None of other types."""
    if model_type not in PARTLY:
        return None
    return UnsupportedModelError(
        f"{model_type} is served with {PARTLY[model_type]}; of this model that is not true: {REFUSED_PART[model_type]} "
        f"({error})"
    )


def check_windows(path: Path, config: Any, probe: Probe) -> None:
    """Refuses a window that transformers' cache has and its masks have not: its tokens depend on which one rules."""
    try:
        layers = DynamicCache(config=config).layers
    except Exception as error:  # it reads fields that a configuration of this kind need not have
        raise UnsupportedModelError(
            f"{path}: transformers makes no cache for layers of the types that config.json says (layer_types), so that "
            f"it does not generate either; a field that they need is missing or null: {type(error).__name__}: {error}"
        ) from error
    for number, (cached, call) in enumerate(zip(layers, probe.attention, strict=False)):
        if getattr(cached, "is_sliding", False) and call.visibility == Visibility():
            raise UnsupportedModelError(
                f"{path}: config.json says sliding_window={getattr(config, 'sliding_window', None)}, and in layer "
                f"{number} all keys are attended to; transformers' cache drops those before the window, so that it "
                "generates other tokens than its forward: take the field out if the model was made without a window"
            )


def check_rope(model: torch.nn.Module) -> None:
    """Refuses rotary embeddings of types that no test covers."""
    unknown = sorted(adapter.rope_types(model) - COVERED_ROPE_TYPES)
    if unknown:
        raise UnsupportedModelError(
            f"{type(model).__name__}: no conformance test covers rotary embeddings of type {', '.join(unknown)}"
        )


def check_covered(config: Any, features: frozenset[str]) -> None:
    """Refuses model types, and features of attention and experts, that no conformance test covers."""
    # by the class: a field of this name may say how its files are published (kimi_k2 for deepseek_v3)
    model_type, language = config.model_type, type(text_part.language_config(config)).model_type
    if model_type not in COVERED:
        raise UnsupportedModelError(
            f"{model_type}: no conformance test covers this model type, and its tokens could not be vouched for; "
            f"{LISTED}"
        )
    if model_type in LANGUAGES and language != LANGUAGES[model_type]:
        raise UnsupportedModelError(
            f"{model_type}: the language model in it is a {language}, and no conformance test covers another than "
            f"{LANGUAGES[model_type]}"
        )
    unknown = sorted(f for f in features if COVERED[model_type].isdisjoint(f.split(OR)))
    if unknown:
        raise UnsupportedModelError(f"{model_type}: no conformance test covers it with {', '.join(unknown)}")
