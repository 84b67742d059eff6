"""Routing rules on paper (fp64, one token at a time, nothing of transformers), and served blocks to compare with."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from epruntime.models.loader import load_model
from epruntime.moe.placement import Placement
from epruntime.testing import tiny_models
from epruntime.testing.ragged import local_runtime

HIDDEN, TOKENS = 64, 24
Choice = tuple[int, float]
Rule = Callable[[list[float]], list[Choice]]


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """One MoE block as transformers has it and as it is served, and the row count's setter."""

    name: str
    theirs: Any
    served: Any
    context: Any
    stats: Any

    def forward(self, x_TH: torch.Tensor) -> torch.Tensor:
        self.context.num_tokens = len(x_TH)
        with torch.inference_mode():
            out = self.served(x_TH[None])
        return (out[0] if isinstance(out, tuple) else out).view(x_TH.shape)


def blocks(model_type: str, path: Path, edit: Callable[[Any], None] | None = None, **overrides: Any) -> Blocks:
    """The last layer's block of a tiny model whose block is changed by `edit` before it is saved."""
    _, model = tiny_models.build(model_type, **overrides)
    name = [n for n, _ in model.named_modules() if n.endswith(".experts")][-1].rpartition(".")[0]
    theirs = model.get_submodule(name)
    if edit is not None:
        with torch.no_grad():
            edit(theirs)
    tiny_models.save(model, path)
    return _serve(name, theirs, path)


def placed(case: Blocks, path: Path, place: Callable[[int], Placement]) -> Blocks:
    """The same block, its experts placed otherwise on the one rank."""
    return _serve(case.name, case.theirs, path, place)


def _serve(name: str, theirs: Any, path: Path, place: Callable[[int], Placement] | None = None) -> Blocks:
    runtime = local_runtime(place=place)
    served = load_model(path, dtype="float32", moe=runtime).module.get_submodule(name)
    return Blocks(name=name, theirs=theirs, served=served, context=runtime.context, stats=runtime.stats)


def inputs(seed: int = 0) -> torch.Tensor:
    x_TH = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(seed))
    x_TH[:, 0] = 1.0  # a router's column 0 is a bias then
    return x_TH


def router_of(block: Any) -> Any:
    return getattr(block, "gate", None) if hasattr(block, "gate") else block.router


def softmax(z: list[float]) -> list[float]:
    top = max(z)
    e = [math.exp(v - top) for v in z]
    return [v / sum(e) for v in e]


def sigmoid(v: float) -> float:
    return 1 / (1 + math.exp(-v))


def best(scores: list[float], k: int) -> list[int]:
    return sorted(range(len(scores)), key=lambda e: (-scores[e], e))[:k]


def scaled(choices: list[Choice], *, renorm: bool = False, scale: float = 1.0) -> list[Choice]:
    total = sum(w for _, w in choices) if renorm else 1.0
    return [(e, w / total * scale) for e, w in choices]


def softmax_first(k: int, **how: Any) -> Rule:
    return lambda z: scaled([(e, softmax(z)[e]) for e in best(z, k)], **how)


def softmax_last(k: int) -> Rule:
    return lambda z: list(zip(best(z, k), softmax([z[e] for e in best(z, k)]), strict=True))


def grouped_sigmoid(
    bias: list[float], k: int, *, groups: int, kept: int, masked: float = -math.inf, recover: bool = False, **how: Any
) -> Rule:
    """DeepSeek-V3. `masked`, `recover`: the known mistakes (0.0 for masked experts; s taken as choice minus bias)."""

    def rule(z: list[float]) -> list[Choice]:
        s = [sigmoid(v) for v in z]
        choice = [a + b for a, b in zip(s, bias, strict=True)]
        if recover:
            choice = torch.tensor(choice, dtype=torch.float32).tolist()
        size = len(z) // groups
        score = [sum(sorted(choice[g * size : (g + 1) * size])[-2:]) for g in range(groups)]
        open_groups = best(score, kept)
        allowed = [c if e // size in open_groups else masked for e, c in enumerate(choice)]
        picked = best(allowed, k)
        return scaled([(e, choice[e] - bias[e] if recover else s[e]) for e in picked], **how)

    return rule


def mlp(x_H: torch.Tensor, gate_IH: torch.Tensor, up_IH: torch.Tensor, down_HI: torch.Tensor) -> torch.Tensor:
    gate = gate_IH.double() @ x_H
    return down_HI.double() @ (gate / (1 + torch.exp(-gate)) * (up_IH.double() @ x_H))


def fused_expert(block: Any) -> Callable[[torch.Tensor, int], torch.Tensor]:
    experts = block.experts
    return lambda x_H, e: mlp(x_H, *experts.gate_up_proj[e].chunk(2), experts.down_proj[e])


def paper(
    x_TH: torch.Tensor,
    weight_EH: torch.Tensor,
    rule: Rule,
    expert: Callable[[torch.Tensor, int], torch.Tensor],
    *,
    shared: Callable[[torch.Tensor], torch.Tensor] | None = None,
    bias_E: torch.Tensor | None = None,
) -> torch.Tensor:
    """sum over choices of weight x expert(x), plus the shared expert, each token by itself."""
    rows = []
    for x_H in x_TH.double():
        z = weight_EH.double() @ x_H
        if bias_E is not None:
            z = z + bias_E.double()
        y = torch.zeros_like(x_H) if shared is None else shared(x_H)
        for e, w in rule(z.tolist()):
            y = y + w * expert(x_H, e)
        rows.append(y)
    return torch.stack(rows).detach()


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected).abs().max() / expected.abs().max())
