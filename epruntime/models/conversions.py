"""All contact with transformers' checkpoint loader, which is not public API and moves between releases.

It tells, for a checkpoint tensor, which parameter it belongs to and through which conversion (renaming, stacking of
per-expert tensors, concatenation of gate and up, transposition, ...), in which dtype a parameter is kept, which names
may be ignored, and it computes what no checkpoint stores (rotary frequencies). Bytes are read elsewhere.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    Transpose,
    WeightConverter,
    WeightRenaming,
    build_glob_alternation,
    dot_natural_key,
    rename_source_key,
)
from transformers.initialization import guard_torch_init_functions

from epruntime.errors import CheckpointError, UnsupportedModelError
from epruntime.models import text_part
from epruntime.models.families import layout_of


@dataclass(frozen=True, kw_only=True)
class Destination:
    """Where a checkpoint tensor goes.

    Attributes:
        target: name in the model's state dict (the first one, if a conversion makes several).
        pattern: source pattern of the conversion, None if the tensor is only renamed.
        outputs: all names that the conversion makes.
    """

    target: str
    pattern: str | None
    outputs: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Stacking:
    """A conversion that stacks per-expert tensors: out[e] = concat(tensors of expert e, in pattern order, dim 0)."""

    patterns: tuple[str, ...]


class _Whole:
    """The multimodal model of which a language model is served."""

    def __init__(self, model: PreTrainedModel, left_out: tuple[str, ...]) -> None:
        mapping = get_model_conversion_mapping(model)
        self._renamings = [m for m in mapping if isinstance(m, WeightRenaming)]
        self._converters = [m for m in mapping if isinstance(m, WeightConverter)]
        self._prefix, self._state, self._left_out = model.base_model_prefix, model.state_dict(), left_out

    def lacks(self, key: str) -> bool:
        """Does this checkpoint tensor belong to a part that was left out?"""
        target, _ = rename_source_key(key, self._renamings, self._converters, self._prefix, self._state)
        return target.startswith(self._left_out)


class Conversions:
    """The loader rules of one model that is on the meta device."""

    def __init__(self, model: PreTrainedModel, dtype: torch.dtype) -> None:
        self._model, self._dtype = model, dtype
        mapping = get_model_conversion_mapping(model)
        self._renamings = [m for m in mapping if isinstance(m, WeightRenaming)]
        self._converters = [m for m in mapping if isinstance(m, WeightConverter)]
        self._layout = layout_of(model)
        # an adapter's own way to make a parameter takes the place of transformers'
        self._converters = [c for c in self._converters if self._layout.stacked.keys().isdisjoint(c.target_patterns)]
        for parameter, sources in self._layout.stacked.items():
            operations = [MergeModulelist(dim=0), *([Concatenate(dim=1)] if len(sources) > 1 else [])]
            self._converters.append(
                WeightConverter(source_patterns=list(sources), target_patterns=parameter, operations=operations)
            )
        self._by_pattern = {pattern: c for c in self._converters for pattern in c.source_patterns}
        self._state = model.state_dict()
        plan = model._get_dtype_plan(dtype)
        self._plan_search: re.Pattern[str] | None = None
        self._plan_groups: dict[str, str] = {}
        if plan:
            self._plan_search, self._plan_groups, _ = build_glob_alternation(list(plan))
        self._plan = plan
        self._whole = _Whole(*parts) if (parts := text_part.left_out(model)) else None

    @property
    def expected(self) -> dict[str, torch.Tensor]:
        """The model's state dict: meta tensors by name, of all experts."""
        return self._state

    def destination(self, key: str) -> Destination | None:
        """Where checkpoint tensor `key` goes; None if the model has no such parameter."""
        if self._layout.unused(key):
            return None
        prefix = self._model.base_model_prefix
        target, pattern = rename_source_key(key, self._renamings, self._converters, prefix, self._state)
        if target not in self._state and key in self._state:
            target, pattern = key, None
        if target not in self._state:
            return None
        outputs: tuple[str, ...] = (target,)
        if pattern is not None:
            patterns = self._by_pattern[pattern].target_patterns
            outputs = tuple(target.replace(patterns[0], other) for other in patterns)
        return Destination(target=target, pattern=pattern, outputs=outputs)

    def sources(self, pattern: str) -> tuple[str, ...]:
        """All source patterns of the conversion that `pattern` is one of."""
        return tuple(self._by_pattern[pattern].source_patterns)

    def stacks(self, pattern: str) -> bool:
        """Does the conversion start by stacking a list of tensors, one per expert?"""
        first = self._by_pattern[pattern].operations[0]
        return type(first) is MergeModulelist and first.dim == 0

    def stacking(self, pattern: str) -> Stacking | None:
        """The conversion as a plain stacking that can be read in place, or None if it is another one."""
        converter = self._by_pattern[pattern]
        kinds = [(type(op), getattr(op, "dim", None)) for op in converter.operations]
        alone = kinds == [(MergeModulelist, 0)] and len(converter.source_patterns) == 1
        if alone or kinds == [(MergeModulelist, 0), (Concatenate, 1)]:
            return Stacking(patterns=tuple(converter.source_patterns))
        return None

    def convert(
        self,
        target: str,
        pattern: str,
        sources: dict[str, list[tuple[str, Callable[[], torch.Tensor]]]],
        *,
        shape: tuple[int, ...],
    ) -> dict[str, torch.Tensor]:
        """Runs one conversion.

        Args:
            sources: source pattern -> (checkpoint name, function that reads the tensor), in order.
            shape: of the first of these tensors in the checkpoint, of which the function may read a part.

        Returns:
            parameter name -> tensor.
        """
        converter = deepcopy(self._by_pattern[pattern])
        first = converter.operations[0]
        if isinstance(first, Transpose) and first.check_dims and len(converter.operations) == 1:
            # it would compare a part of the experts with all of them, and take them for transposed
            if shape == tuple(self._state[target].shape):
                return {target: sources[pattern][0][1]()}
            first.check_dims = False
        for source_pattern, tensors in sources.items():
            for key, read in tensors:
                converter.add_tensor(target, key, source_pattern, read)  # it takes both
        try:
            made = converter.convert(target, model=self._model, config=self._model.config)
        except (ValueError, RuntimeError, KeyError, IndexError, TypeError) as error:
            raise CheckpointError(f"{target} cannot be made from the checkpoint's tensors: {error}") from error
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}

    def dtype_of(self, target: str) -> torch.dtype:
        """Dtype that a parameter or buffer is kept in: some families keep routers in fp32 whatever was asked."""
        if self._plan_search is not None:
            match = self._plan_search.search(target)
            if match is not None and match.lastgroup is not None:
                found: torch.dtype = self._plan[self._plan_groups[match.lastgroup]]
                return found
        return self._state[target].dtype

    def may_be_ignored(self, key: str) -> bool:
        """Does the family say that this checkpoint tensor is not part of the model (for example a draft layer)?"""
        patterns = set(self._model._keys_to_ignore_on_load_unexpected or ())
        if any(name.endswith("rotary_emb.inv_freq") for name, _ in self._model.named_buffers()):
            patterns.add(r"rotary_emb\.inv_freq")
        if self._layout.unused(key) or any(re.search(pattern, key) for pattern in patterns):
            return True
        return self._whole is not None and self._whole.lacks(key)

    def without_tied(self, missing: set[str]) -> set[str]:
        """Of the missing parameters, those that are not tied to one that is there."""
        tied: dict[str, str] = self._model.all_tied_weights_keys
        groups: dict[str, set[str]] = {}
        for target, source in tied.items():
            groups.setdefault(source, {source}).add(target)
        covered = {name for group in groups.values() if group - missing for name in group}
        return missing - covered

    def tie(self, missing: set[str]) -> None:
        """Ties parameters that the checkpoint holds once. Held twice, with different values, they stay apart."""
        self._model.tie_weights(missing_keys=set(missing), recompute_mapping=False)

    def compute_buffers(self) -> None:
        """Gives values to buffers that no checkpoint stores, as transformers itself does after loading.

        Raises:
            UnsupportedModelError: one is still without a value afterwards.
        """
        model = self._model
        for tensor in (*model.parameters(), *model.buffers()):
            tensor._is_hf_initialized = True  # transformers' mark: do not touch
        made: dict[str, tuple[torch.nn.Module, str]] = {}
        owner: PreTrainedModel = model
        with torch.no_grad(), guard_torch_init_functions():
            for name, module in model.named_modules():
                if isinstance(module, PreTrainedModel):
                    owner = module
                fresh = [b for b, value in module.named_buffers(recurse=False) if value.device.type == "meta"]
                for buffer in fresh:
                    old = getattr(module, buffer)
                    setattr(module, buffer, torch.full(old.shape, _unset(old.dtype), dtype=old.dtype))
                    made[f"{name}.{buffer}"] = (module, buffer)
                if fresh:
                    owner._init_weights(module)
        for name, (module, buffer) in made.items():
            value = getattr(module, buffer)
            if value.is_floating_point():
                unset = value.isfinite().logical_not() if name.endswith("inv_freq") else value.isnan()
            else:
                unset = value == _unset(value.dtype)
            if value.device.type == "meta" or (value.dtype != torch.bool and bool(unset.any())):
                raise UnsupportedModelError(
                    f"{type(model).__name__}: buffer {name} is in no checkpoint, and transformers does not compute it "
                    "after loading, or computes what is no number (look at rope_parameters in config.json if it is a "
                    "rotary embedding's)"
                )


def _unset(dtype: torch.dtype) -> float | int | bool:
    if dtype.is_floating_point:
        return float("nan")
    return False if dtype == torch.bool else torch.iinfo(dtype).min


def natural_order(key: str) -> Any:
    """Sort key in which transformers collects tensors: numbers in a name compare as numbers."""
    return dot_natural_key(key)
