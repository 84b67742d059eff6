"""From a checkpoint directory to a model that serves: inspect (nothing read but headers), then load.

config.json -> refusals -> module tree on the meta device -> probe -> refusals -> headers -> WeightPlan
            -> read this rank's bytes -> bind attention and experts -> LoadedModel
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from epruntime.errors import UnsupportedModelError
from epruntime.models import adapter, eos, families, refusal, rope, text_part
from epruntime.models.attention import LatentLayer, PagedLayer, StepState, kv_layer_of, make_layer
from epruntime.models.checkpoint import Checkpoint, first_rows, open_checkpoint, read_raw_config, split_rows
from epruntime.models.conversions import Conversions
from epruntime.models.generation_config import read_generation_config
from epruntime.models.info import KVLayerInfo, ModelInfo, RopeLengths
from epruntime.models.loaded import LoadedModel, LoadReport
from epruntime.models.probe import Probe, features_of, run_probe
from epruntime.models.safetensors import RangeReader
from epruntime.models.unread import check_all_read
from epruntime.models.weights import ExpertShard, WeightPlan
from epruntime.moe.types import ExpertWeights, StepContext

logger = logging.getLogger("epruntime.models")

_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


class MoEBuilder(Protocol):
    """What loading needs of the MoE runtime."""

    context: StepContext

    def local_experts(self, num_experts: int) -> tuple[int, ...]: ...

    def make_layer(self, layer_index: int, num_experts: int, weights: ExpertWeights) -> adapter.ExpertsLayer: ...


@dataclass(frozen=True, kw_only=True)
class _Structure:
    """What a module tree is, told by the tree and the probe."""

    experts: dict[str, torch.nn.Module]
    probe: Probe
    kv_layers: tuple[KVLayerInfo, ...]
    moe_layers: tuple[int, ...]
    rotary: tuple[rope.RotaryByLength, ...]
    rope: RopeLengths

    @property
    def features(self) -> frozenset[str]:
        """Features that a conformance test must cover, by name."""
        found = set(features_of(self.probe))
        if any(kv.latent for kv in self.kv_layers):
            found.add("latent")
        if len(self.moe_layers) < len({adapter.layer_index(call.module_name) for call in self.probe.attention}):
            found.add("dense")
        return frozenset(found)


@dataclass(frozen=True, kw_only=True)
class _Blueprint:
    """A model that passed every check that needs no weights."""

    checkpoint: Checkpoint
    model: Any
    dtype: torch.dtype
    structure: _Structure
    conversions: Conversions
    info: ModelInfo


def _pick_dtype(path: Path, wanted: str, config: Any, checkpoint: Checkpoint) -> torch.dtype:
    if wanted != "auto":
        found = getattr(torch, wanted, None)
        source = "the setting dtype"
    else:
        found = getattr(config, "dtype", None) or getattr(text_part.language_config(config), "dtype", None)
        source = "config.json"
        if not isinstance(found, torch.dtype):
            found, source = checkpoint.main_dtype(), "the checkpoint"
    if found not in _DTYPES:
        raise UnsupportedModelError(
            f"{path}: {source} says {found}; weights are kept in float32 or bfloat16: set dtype to one of them"
        )
    return found


def _num_experts(module: Any) -> int:
    return int(module.down_proj.shape[0])


def _memory(model: Any, experts: dict[str, Any]) -> tuple[int, tuple[tuple[int, int], ...]]:
    """ModelInfo.shared_bytes and expert_bytes. A parameter of an experts module that has a row per expert is split."""
    split: list[tuple[int, int]] = []
    for module in experts.values():
        count = _num_experts(module)
        rows = [p for p in module.parameters() if p.dim() and p.shape[0] == count]
        split.append((count, sum(p.nbytes for p in rows) // count))
    total = sum(p.nbytes for p in model.parameters())  # tied ones come once
    return total - sum(count * size for count, size in split), tuple(split)


def _examine(model: Any, config: Any, *, where: str) -> _Structure:
    kind = type(model).__name__
    experts = adapter.experts_modules(model)
    refusal.check_has_experts(model, config, experts)
    adapter.check_forward_arguments(model)
    refusal.check_rope(model)
    rotary = rope.wrap(model)
    rope_lengths = rope.lengths_of(rotary, where=where)
    try:
        probe = run_probe(model)
        num_layers = int(text_part.language_config(config).num_hidden_layers)
        if len(probe.attention) != num_layers:
            raise UnsupportedModelError(
                f"{where}: {len(probe.attention)} of {num_layers} layers have softmax attention "
                "through the attention interface; the others cannot be served"
            )
    except UnsupportedModelError as error:
        if (explained := refusal.explained(config.model_type, error)) is None:
            raise
        raise explained from error
    unused = sorted(set(experts) - set(probe.top_k))
    if unused:
        raise UnsupportedModelError(f"{where}: {', '.join(unused)} are not reached through the experts interface")
    indices = [adapter.layer_index(name) for name in experts]
    if len(set(indices)) < len(indices):
        raise UnsupportedModelError(f"{where}: {kind} has layers with several groups of routed experts")
    modules = dict(model.named_modules())
    kv_layers = tuple(kv_layer_of(call, modules[call.module_name]) for call in probe.attention)
    return _Structure(
        experts=experts,
        probe=probe,
        kv_layers=kv_layers,
        moe_layers=tuple(sorted(indices)),
        rotary=tuple(rotary),
        rope=rope_lengths,
    )


def features_of_model(model: Any, config: Any) -> frozenset[str]:
    """Features of a model on the meta device, as `inspect_model` compares them with what tests cover.

    Raises:
        UnsupportedModelError: the model cannot be served at all.
    """
    return _examine(model, config, where=str(config.model_type)).features


def _draw(path: Path, dtype: str) -> _Blueprint:
    raw = read_raw_config(path)
    refusal.check_raw_config(path, raw)
    config = adapter.read_config(path)
    language = text_part.language_config(config)
    architecture = refusal.check_architecture(path, config, raw)
    checkpoint = open_checkpoint(path, raw)
    refusal.check_sizes(path, language, len(checkpoint.tensors))
    refusal.check_shared_keys(path, language)
    check_all_read(path, config, raw)
    torch_dtype = _pick_dtype(path, dtype, config, checkpoint)
    model = adapter.build_meta_model(config, torch_dtype)
    structure = _examine(model, config, where=str(path))
    refusal.check_covered(config, structure.features)
    refusal.check_windows(path, language, structure.probe)
    refusal.check_embeddings(path, model, language)
    experts, probe = structure.experts, structure.probe
    num_experts = max(_num_experts(module) for module in experts.values())
    refusal.check_num_experts(path, num_experts, checkpoint.num_parameters)
    layout = families.layout_of(model)
    checkpoint = split_rows(checkpoint, layout.cuts())
    checkpoint = first_rows(checkpoint, layout.padded)
    generation = read_generation_config(path)
    ends = eos.end_ids(config, raw, generation.eos_token_ids)
    shared_bytes, expert_bytes = _memory(model, experts)
    info = ModelInfo(
        architecture=architecture,
        model_type=config.model_type,
        dtype=_DTYPES[torch_dtype],
        vocab_size=int(language.vocab_size),
        hidden_size=int(language.hidden_size),
        num_layers=len(structure.kv_layers),
        max_position_embeddings=rope.longest_sequence(language),
        num_experts=num_experts,
        top_k=max(probe.top_k.values()),
        moe_layers=structure.moe_layers,
        eos_token_ids=ends.ids,
        eos_warning=ends.warning,
        kv_layers=structure.kv_layers,
        num_parameters=checkpoint.num_parameters,
        checkpoint_bytes=checkpoint.num_bytes,
        default_sampling=dict(generation.sampling),
        ignored_sampling=dict(generation.ignored),
        shared_bytes=shared_bytes,
        expert_bytes=expert_bytes,
        rope=structure.rope,
        index_heads=int(language.index_n_heads) if "sparse" in structure.features else 0,
    )
    return _Blueprint(
        checkpoint=checkpoint,
        model=model,
        dtype=torch_dtype,
        structure=structure,
        conversions=Conversions(model, torch_dtype),
        info=info,
    )


def _plan(drawn: _Blueprint, local: Callable[[int], tuple[int, ...]]) -> WeightPlan:
    shards = {}
    for name, module in drawn.structure.experts.items():
        num_experts = _num_experts(module)
        shards[name] = ExpertShard(num_experts=num_experts, local=tuple(local(num_experts)))
    return WeightPlan(drawn.checkpoint, drawn.conversions, shards)


def inspect_model(path: str | Path, *, dtype: str = "auto") -> ModelInfo:
    """Facts about a checkpoint, and whether it can be served. Reads config files and safetensors headers only.

    Raises:
        UnsupportedModelError: refused, by name and reason.
        CheckpointError: damaged, or tensors missing, left over or misshapen.
    """
    drawn = _draw(Path(path), dtype)
    _plan(drawn, lambda num_experts: tuple(range(num_experts)))
    return drawn.info


def load_model(
    path: str | Path,
    *,
    dtype: str,
    moe: MoEBuilder,
    progress: Callable[[str, int, int], None] | None = None,
    reading: Callable[[str], None] | None = None,
) -> LoadedModel:
    """Loads this rank's part of a model: its own experts, and all the rest.

    Args:
        dtype: "auto" (the checkpoint's own), "float32" or "bfloat16".
        moe: decides which experts are local and computes them.
        progress: called as progress("weights", bytes done, bytes in all).
        reading: called with each parameter's name before it is read.

    Raises:
        UnsupportedModelError, CheckpointError: as `inspect_model`.
    """
    start = time.perf_counter()
    drawn = _draw(Path(path), dtype)
    plan = _plan(drawn, moe.local_experts)
    total = plan.num_bytes
    model = drawn.model

    def put(name: str, tensor: torch.Tensor) -> None:
        module_name, _, short = name.rpartition(".")
        module = model.get_submodule(module_name)
        if short in module._buffers:
            module._buffers[short] = tensor
        else:
            module._parameters[short] = torch.nn.Parameter(tensor, requires_grad=False)

    def tell(name: str, done: int) -> None:
        if progress is not None:
            progress("weights", done, total)
        if reading is not None and name:
            reading(name)

    with RangeReader() as reader:
        plan.load(reader, put, tell)
        read_bytes = reader.bytes_read
    drawn.conversions.tie(plan.missing)
    drawn.conversions.compute_buffers()
    _check_all_real(model)
    refusal.check_expert_table(Path(path), model, drawn.info.num_experts)

    state = StepState(stamps=moe.context.stamps)
    modules = dict(model.named_modules())
    layers: list[PagedLayer] = []
    latent: dict[int, LatentLayer] = {}
    for call, kv in zip(drawn.structure.probe.attention, drawn.structure.kv_layers, strict=True):
        module: Any = modules[call.module_name]
        layer = make_layer(call, kv, state, module)
        layer.index = len(layers)
        object.__setattr__(module, adapter.ATTENTION_ATTRIBUTE, layer)
        layers.append(layer)
        if isinstance(layer, LatentLayer):
            latent[int(module.layer_idx)] = layer
    for name, module in drawn.structure.experts.items():
        num_experts = drawn.conversions.expected[f"{name}.down_proj"].shape[0]
        weights = _take_weights(module)
        object.__setattr__(
            module, adapter.EXPERTS_ATTRIBUTE, moe.make_layer(adapter.layer_index(name), num_experts, weights)
        )
    for rotary in drawn.structure.rotary:
        rotary.serve(state)
    adapter.use_hooks(model, adapter.SERVE)
    report = LoadReport(
        needed_bytes=total,
        read_bytes=read_bytes,
        header_bytes=drawn.checkpoint.header_bytes,
        checkpoint_bytes=drawn.checkpoint.num_bytes,
        seconds=time.perf_counter() - start,
        local_experts=len(moe.local_experts(drawn.info.num_experts)),
        ignored=tuple(plan.ignored),
    )
    if plan.ignored:
        logger.info("%s: %d tensors are no part of the model and were not read", path, len(plan.ignored))
    return LoadedModel(
        model=model, info=drawn.info, layers=layers, latent=latent, state=state, context=moe.context, report=report
    )


def _take_weights(module: Any) -> ExpertWeights:
    """The module's expert weights, taken out of it: whoever computes the experts owns them from here on."""

    def take(name: str) -> torch.Tensor:
        parameter: torch.nn.Parameter = module._parameters[name]
        module._parameters[name] = None
        return parameter.data

    up = "gate_up_proj" if module.has_gate else "up_proj"
    down = take("down_proj")
    return ExpertWeights(
        up_SIH=take(up),
        down_SHI=down.transpose(1, 2) if getattr(module, "down_transposed", False) else down,
        up_bias_SI=take(f"{up}_bias") if module.has_bias else None,
        down_bias_SH=take("down_proj_bias") if module.has_bias else None,
        transposed=bool(module.is_transposed),
        activation=module._apply_gate if module.has_gate else module.act_fn,
        post=module.post_expert_norm if getattr(module, "has_post_expert_norm", False) else None,
    )


def _check_all_real(model: torch.nn.Module) -> None:
    registered = (*model.named_parameters(), *model.named_buffers())
    plain = (
        (f"{name}.{attribute}", value)
        for name, module in model.named_modules()
        for attribute, value in vars(module).items()
        if isinstance(value, torch.Tensor)
    )
    left = [name for name, tensor in (*registered, *plain) if tensor.device.type == "meta"]
    if left:
        raise UnsupportedModelError(f"{type(model).__name__}: {', '.join(left[:8])} have no value after loading")
