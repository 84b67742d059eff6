"""Expert loads out of the engine's facts: per layer, tokens by expert and by rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class LayerLoad:
    """Tokens that the router of one layer chose, since the model was loaded.

    Attributes:
        tokens_per_expert: by logical expert id. A token counts once for each of its top-k experts.
        tokens_per_rank: by expert-parallel rank: what the rank's experts computed, wherever the placement put them.
    """

    layer: int
    tokens_per_expert: list[int]
    tokens_per_rank: list[int]


def expert_load(info: dict[str, Any]) -> list[LayerLoad]:
    """Adds up what each rank counted.

    Args:
        info: of Engine.info. Of each entry of `ranks[i]["moe"]["layers"]`: `expert_tokens` (choices of the rank's own
            tokens by logical expert) and `pairs_received` (choices that the rank computed).
    """
    ranks = [rank.get("moe", {}).get("layers", {}) for rank in info.get("ranks", [])]
    loads = []
    for name in sorted({name for layers in ranks for name in layers}, key=int):
        counters = [layers[name] for layers in ranks if name in layers]
        loads.append(
            LayerLoad(
                layer=int(name),
                tokens_per_expert=[sum(counts) for counts in zip(*(c["expert_tokens"] for c in counters), strict=True)],
                tokens_per_rank=[c["pairs_received"] for c in counters],
            )
        )
    return loads
