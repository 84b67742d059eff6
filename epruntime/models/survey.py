"""Survey: every Mixture-of-Experts architecture of the installed transformers, and whether it is served.

types that generate text -> those whose configuration counts experts -> small configuration -> meta device -> probe

Nothing here is a list of names: types come from transformers' own tables, and each verdict from building the type and
asking it. The gate is the same as for a checkpoint: what no conformance test covers is not served (`conformance.py`).
"""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
)

from epruntime.errors import UnsupportedModelError
from epruntime.models import adapter, families, refusal, text_part
from epruntime.models.conformance import COVERED, LANGUAGES, PARTLY, SINCE
from epruntime.models.loader import features_of_model
from epruntime.models.small_config import small_config

#: Types that generate text -> their class. Of two classes the first one is named.
_CLASSES = {
    **MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    **MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    **MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
}
#: Fields of a configuration that counts experts, in whatever family; `_experts_implementation` is everybody's.
_COUNTS = re.compile(r"^(?!_).*(experts|moe)")


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """One architecture.

    Attributes:
        architecture: class name in transformers.
        served: a checkpoint of this type is served, unless it has a feature that is not covered.
        how: "hooked" (its experts go through transformers' experts interface), "adapted" (an adapter puts them there),
            "" if not served.
        features: what attention and layers of the small model have, of those that the tests cover.
        reason: why it is not served, or served in part; "" otherwise.
        newly: not in the table of covered types, but the probe finds nothing against it.
        since: the first transformers with which it is served, as "5.24"; "": all that are supported.
    """

    model_type: str
    architecture: str
    served: bool
    how: str = ""
    features: tuple[str, ...] = ()
    reason: str = ""
    newly: bool = False
    since: str = ""

    def to_dict(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "features": list(self.features)}


def survey(only: Collection[str] = ()) -> list[Verdict]:
    """Verdicts on every Mixture-of-Experts type that generates text, by name.

    Args:
        only: types that are looked at, if not all.
    """
    adapter.check_version()
    with _quiet():
        found = (_verdict(model_type) for model_type in candidates() if not only or model_type in only)
        return [verdict for verdict in found if verdict is not None]


def candidates() -> list[str]:
    """Types that generate text whose configuration, or a part of it, has a field that counts experts, sorted."""
    return sorted(t for t in _CLASSES if t in CONFIG_MAPPING and _counts_experts(_kind(t)))


def classes_of(model_type: str) -> tuple[str, ...]:
    """Names of transformers' classes that generate text for a type; empty: there is none."""
    names = _CLASSES.get(model_type, ())
    return (names,) if isinstance(names, str) else tuple(names)


def _kind(model_type: str) -> Any:
    return CONFIG_MAPPING[model_type]


def _counts_experts(kind: Any) -> bool:
    names = {name for base in kind.__mro__ for name in (*vars(base), *vars(base).get("__annotations__", ()))}
    parts = {*(getattr(kind, "sub_configs", None) or {}).values(), *map(_kind, _language_types(kind))}
    parts -= {kind, transformers.AutoConfig}  # 5.16 has a configuration that is a part of itself
    return any(_COUNTS.search(name) for name in names) or any(_counts_experts(part) for part in parts)


def _verdict(model_type: str) -> Verdict | None:
    """None: the configuration has room for experts, the model has none."""
    architecture = classes_of(model_type)[0]
    since = ".".join(map(str, SINCE.get(model_type, ())))

    def refused(reason: str, **more: Any) -> Verdict:
        return Verdict(
            model_type=model_type, architecture=architecture, served=False, reason=reason, since=since, **more
        )

    if model_type in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES:
        return refused("an encoder-decoder model")
    reasons = (refusal.reason_against(t) for t in (model_type, *_language_types(_kind(model_type))))
    known = next((reason for reason in reasons if reason is not None), None)
    if known is not None:
        return refused(known)
    try:
        config = small_config(model_type)
        model = adapter.build_meta_model(config, torch.float32)
    except Exception as error:  # noqa: BLE001  a configuration class of the library raises what it likes
        return refused(f"no small model of it can be built: {_first_line(error)}")
    if not _has_experts(model):
        return None
    try:
        features = tuple(sorted(features_of_model(model, config)))
    except UnsupportedModelError as error:
        return refused(_first_line(error))
    if model_type not in COVERED:
        return refused("no conformance test covers it; nothing else is known against it", features=features, newly=True)
    unknown = sorted(set(features) - COVERED[model_type])
    if unknown:
        return refused(f"no conformance test covers it with {', '.join(unknown)}", features=features)
    limits = ["text alone"] if text_part.is_multimodal(config) else []
    if model_type in PARTLY:
        limits.append(f"only with {PARTLY[model_type]}")
    return Verdict(
        model_type=model_type,
        architecture=architecture,
        served=True,
        how="adapted" if families.is_adapted(text_part.language_config(config).model_type) else "hooked",
        features=tuple(sorted(COVERED[model_type])),
        reason="; ".join(limits),
        since=since,
    )


def _language_types(kind: Any) -> list[str]:
    """Type of the language model that a multimodal configuration is made of; by default, if it may be any."""
    field = text_part.language_field(kind)
    if not field:
        return []
    part = kind.sub_configs[field]
    if part is not transformers.AutoConfig:
        return [str(part.model_type)]
    if kind.model_type in LANGUAGES:
        return [LANGUAGES[kind.model_type]]
    try:
        return [str(getattr(kind(), field).model_type)]
    except Exception:  # noqa: BLE001  a configuration class of the library raises what it likes
        return []


def _has_experts(model: torch.nn.Module) -> bool:
    """Has some layer a module of experts, of whatever form? Their classes are named so, all through transformers."""
    return any(
        re.search(r"Expert|Moe|MoE", type(module).__name__.removesuffix("ForCausalLM")) for module in _inner(model)
    )


def _inner(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Modules inside numbered layers: a family's own name may say Moe, and that of its base model."""
    return (module for name, module in model.named_modules() if re.search(r"\.\d+\.", name))


def _first_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


@contextmanager
def _quiet() -> Iterator[None]:
    """Configurations that are built only to be looked at have nothing to say."""
    loggers = [logging.getLogger("transformers"), logging.getLogger("huggingface_hub")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
