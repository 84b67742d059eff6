"""What an engine says of itself, as JSON-ready dicts: facts of its model, and the present state of its ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from epruntime.engine.stats import EngineView
from epruntime.version import __version__

#: facts of a ModelInfo that are passed on as they are
_MODEL_FACTS = (
    "architecture", "model_type", "dtype", "vocab_size", "hidden_size", "num_layers", "num_experts", "top_k",
    "num_parameters", "checkpoint_bytes",
)  # fmt: skip


def model_facts(info: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """What serve/engine.py lists under `model_info`: of `info`, a ModelInfo as a dict, and what the caller adds."""
    facts = {key: info[key] for key in _MODEL_FACTS}
    return facts | {"moe_layers": list(info["moe_layers"]), "eos_token_ids": list(info["eos_token_ids"])} | more


async def engine_facts(view: EngineView, *, model: Mapping[str, Any], up: bool, **more: Any) -> dict[str, Any]:
    """What is served, by which ranks, and what they have done. Asks the ranks, if they are up.

    Each rank's `moe` entry holds its routed-token counts per layer and logical expert.

    Args:
        model: what to say of the model beside its ModelInfo. more: what to say of the engine beside the view.
    """
    core, group, parallel = view.core, view.group, view.config.parallel
    ranks = await group.stats() if up else []
    for rank, scheduler in zip(ranks, core.schedulers, strict=False):
        rank["scheduler"] = {
            "num_running": scheduler.num_running,
            "num_waiting": scheduler.num_waiting,
            "kv_usage": scheduler.kv_usage,
            **asdict(scheduler.counters),
        }
    return {
        "version": __version__,
        "model": {**model, **group.info},
        "engine": {
            "expert_parallel_size": parallel.expert_parallel_size,
            "launcher": parallel.launcher,
            "transport": group.transport,
            "experts_backend": group.experts_backend,
            "invariance": parallel.invariance,
            "generation": group.generation,
            "placement_version": 0,
            "expert_placement": parallel.expert_placement,
            "num_redundant_experts": parallel.num_redundant_experts,
            "restarts": view.restarts,
            "steps": core.stats.steps,
            "prefill_tokens": core.stats.prefill_tokens,
            "decode_tokens": core.stats.decode_tokens,
            **more,
        },
        "ranks": ranks,
    }
