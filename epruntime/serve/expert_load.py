"""Expert loads out of the engine's facts: per layer, tokens by expert and by rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from epruntime.moe.placement import contiguous


@dataclass(frozen=True, kw_only=True)
class LayerLoad:
    """Tokens that the router of one layer chose, since the model was loaded.

    Attributes:
        tokens_per_expert: by logical expert id. A token counts once for each of its top-k experts.
        tokens_per_rank: by expert-parallel rank: the sum over the experts that the rank owns.
    """

    layer: int
    tokens_per_expert: list[int]
    tokens_per_rank: list[int]


def expert_load(info: dict[str, Any]) -> list[LayerLoad]:
    """Adds up what each rank counted for its own tokens.

    Args:
        info: of Engine.info: `ranks[i]["moe"]["layers"][str(layer)]["expert_tokens"]`.
    """
    ranks = info.get("ranks", [])
    totals: dict[int, list[int]] = {}
    for rank in ranks:
        for name, counters in rank.get("moe", {}).get("layers", {}).items():
            counts = counters["expert_tokens"]
            total = totals.setdefault(int(name), [0] * len(counts))
            totals[int(name)] = [a + b for a, b in zip(total, counts, strict=True)]
    loads = []
    for layer, counts in sorted(totals.items()):
        placement = contiguous(len(counts), len(ranks))
        per_rank = [sum(counts[e] for e in placement.local_logical(rank)) for rank in range(len(ranks))]
        loads.append(LayerLoad(layer=layer, tokens_per_expert=counts, tokens_per_rank=per_rank))
    return loads
