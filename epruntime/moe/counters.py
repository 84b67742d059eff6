"""Names of what is counted per MoE layer; without torch, since the coordinator reads them too."""

from __future__ import annotations

#: Counters of a layer, in the order of their packed form. What each one means: LayerStats.
LAYER_COUNTERS = (
    "steps",
    "rounds",
    "rows_sent",
    "rows_received",
    "pairs_received",
    "replica_pairs",
    "dispatch_bytes",
    "combine_bytes",
    "dispatch_s",
    "combine_s",
)
