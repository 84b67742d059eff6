"""Reads an exposition, and makes statistics of a small engine to expose."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from prometheus_client.parser import text_string_to_metric_families

from epruntime.engine.scheduler_counters import SchedulerCounters
from epruntime.engine.stats import EngineStats, LayerLoad, RankStats
from epruntime.moe.counters import LAYER_COUNTERS


class Exposition:
    """Values by sample name and labels."""

    def __init__(self, body: bytes | str) -> None:
        text = body if isinstance(body, str) else body.decode()
        self.families = {family.name: family for family in text_string_to_metric_families(text)}
        self.samples = {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in self.families.values()
            for sample in family.samples
        }

    def value(self, name: str, **labels: str) -> float:
        """The one sample of that name that has these labels among its own."""
        found = self.all(name, **labels)
        assert len(found) == 1, (name, labels, found)
        return found[0]

    def all(self, name: str, **labels: str) -> list[float]:
        wanted = labels.items()
        return [value for (n, have), value in self.samples.items() if n == name and wanted <= dict(have).items()]

    def sum(self, name: str, **labels: str) -> float:
        return sum(self.all(name, **labels))


def rank_stats(slot: int, *, moe: Mapping[str, float] = MappingProxyType({}), **fields: object) -> RankStats:
    scheduler = dict.fromkeys(SchedulerCounters.__dataclass_fields__, 0)
    values: dict[str, object] = {
        "slot": slot, "host": f"host{slot}", "ep_rank": slot, "incarnation": 0, "up": True, "progress_age_s": 0.5,
        "heartbeat_age_s": 0.1,
        "num_running": 0, "num_waiting": 0, "kv_usage": 0.0, "num_kv_blocks": 8, "scheduler": scheduler, "moe": moe,
        "rss_bytes": 1000,
    }  # fmt: skip
    return RankStats(**{**values, **fields})  # type: ignore[arg-type]


def engine_stats(**fields: object) -> EngineStats:
    """Two ranks and two MoE layers of three experts; `fields` replace."""
    values: dict[str, object] = {
        "time": 100.0, "counters_age_s": 0.5, "generation": 0, "restarts": 0, "steps": 7, "prefill_tokens": 20,
        "decode_tokens": 30,
        "ranks": tuple(
            rank_stats(slot, moe={name: 10.0 * (i + 1) + slot for i, name in enumerate(LAYER_COUNTERS)})
            for slot in (0, 1)
        ),
        "layers": (
            LayerLoad(layer=3, expert_tokens=(1, 2, 3), rank_tokens=(4, 2), balancedness=0.75),
            LayerLoad(layer=11, expert_tokens=(0, 6, 0), rank_tokens=(3, 3), balancedness=1.0),
        ),
        "cache_facts": {"block_size": 16, "enable_prefix_caching": True},
        "parallel_facts": {"expert_parallel_size": 2, "transport": "gloo"},
    }  # fmt: skip
    return EngineStats(**{**values, **fields})  # type: ignore[arg-type]
