"""Metric families of the engine and its ranks, made from one EngineStats at each scrape."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from epruntime.engine.stats import EngineStats, RankStats
from epruntime.engine.status import EngineState

#: name, documentation, value of a rank; None: not known yet
_RankValue = tuple[str, str, Callable[[RankStats], float | None]]

_RANK_GAUGES: tuple[_RankValue, ...] = (
    ("num_requests_running", "Sequences that the rank works on.", lambda r: r.num_running),
    ("num_requests_waiting", "Sequences queued for the rank.", lambda r: r.num_waiting),
    ("kv_cache_usage_perc", "Share of the rank's KV blocks in use, 1 is all.", lambda r: r.kv_usage),
    ("kv_cache_blocks", "KV blocks of the rank.", lambda r: r.num_kv_blocks),
    ("rank_incarnation", "How often the rank's place was filled anew.", lambda r: r.incarnation),
    (
        "rank_progress_age_seconds",
        "Seconds since the rank's progress changed, idle or not.",
        lambda r: r.progress_age_s,
    ),
    ("rank_heartbeat_age_seconds", "Seconds since the rank's last heartbeat.", lambda r: r.heartbeat_age_s),
    ("rank_resident_memory_bytes", "Resident memory of the rank's process.", lambda r: r.rss_bytes or None),
)

_SCHEDULER_COUNTERS = (
    ("prefix_cache_queries", "Tokens looked up in the prefix cache.", "prefix_query_tokens"),
    ("prefix_cache_hits", "Tokens found in the prefix cache.", "prefix_hit_tokens"),
    ("num_preemptions", "Sequences taken off the rank because KV blocks ran out.", "preemptions"),
    ("num_holds", "Decodes that sat a step out, waiting for a KV block.", "holds"),
)

_MOE_COUNTERS = (
    ("rank_steps", "Forward passes of the rank.", "steps"),
    ("exchange_rounds", "Exchange rounds of all MoE layers.", "rounds"),
    (
        "replica_tokens",
        "Tokens that the rank computed with other copies of their experts than the first ones.",
        "replica_pairs",
    ),
    ("rows_sent", "Rows (token, destination rank) that the rank sent, to itself included.", "rows_sent"),
    ("rows_received", "Rows that the rank received, from itself included.", "rows_received"),
    ("dispatch_bytes", "Bytes of rows that the rank handed to the transport, to itself included.", "dispatch_bytes"),
    ("combine_bytes", "Bytes of results that the rank handed to the transport, to itself included.", "combine_bytes"),
    ("dispatch_seconds", "Seconds that the rank waited for counts and rows.", "dispatch_s"),
    ("combine_seconds", "Seconds that the rank waited for results.", "combine_s"),
)


def engine_families(stats: EngineStats, model_name: str, *, per_expert: bool) -> Iterator[Metric]:
    """Everything that an EngineStats tells.

    Args:
        per_expert: also tokens by layer and logical expert: layers x experts samples.
    """
    yield from _totals(stats, model_name)
    yield from _ranks(stats, model_name)
    yield from _experts(stats, model_name, per_expert=per_expert)


def state_family(name: str, documentation: str, states: Mapping[str, bool]) -> GaugeMetricFamily:
    """One sample per state: 1 for the present one, else 0."""
    family = GaugeMetricFamily(f"epruntime_{name}", documentation, labels=["state"])
    for state, present in states.items():
        family.add_metric([state], float(present))
    return family


def engine_state_family(state: EngineState) -> GaugeMetricFamily:
    return state_family("engine_state", "State of the engine.", {each.value: each is state for each in EngineState})


def info_family(name: str, documentation: str, facts: Mapping[str, object]) -> GaugeMetricFamily:
    """Facts as labels of a sample that is always 1."""
    family = GaugeMetricFamily(f"epruntime_{name}_info", documentation, labels=list(facts))
    family.add_metric([str(value) for value in facts.values()], 1.0)
    return family


def _totals(stats: EngineStats, model_name: str) -> Iterator[Metric]:
    for name, documentation, value in (
        ("steps", "Lockstep steps.", stats.steps),
        ("prefill_tokens", "Prompt tokens computed, after a preemption again.", stats.prefill_tokens),
        ("decode_tokens", "Tokens computed in decoding.", stats.decode_tokens),
        ("restarts", "How often lost ranks were replaced and the model loaded again.", stats.restarts),
    ):
        counter = CounterMetricFamily(f"epruntime_{name}", documentation, labels=["model_name"])
        counter.add_metric([model_name], value)
        yield counter
    if stats.counters_age_s is not None:
        age = GaugeMetricFamily(
            "epruntime_counters_age_seconds", "Age of what the ranks themselves count.", labels=["model_name"]
        )
        age.add_metric([model_name], stats.counters_age_s)
        yield age


def _ranks(stats: EngineStats, model_name: str) -> Iterator[Metric]:
    labels = ["model_name", "rank"]
    up = GaugeMetricFamily("epruntime_rank_up", "1 while the rank lives.", labels=["model_name", "rank", "host"])
    for rank in stats.ranks:
        up.add_metric([model_name, str(rank.slot), rank.host], float(rank.up))
    yield up
    for name, documentation, read in _RANK_GAUGES:
        gauge = GaugeMetricFamily(f"epruntime_{name}", documentation, labels=labels)
        for rank in stats.ranks:
            if (value := read(rank)) is not None:
                gauge.add_metric([model_name, str(rank.slot)], value)
        yield gauge
    for name, documentation, key in _SCHEDULER_COUNTERS:
        counter = CounterMetricFamily(f"epruntime_{name}", documentation, labels=labels)
        for rank in stats.ranks:
            counter.add_metric([model_name, str(rank.slot)], rank.scheduler[key])
        yield counter
    for name, documentation, key in _MOE_COUNTERS:
        counter = CounterMetricFamily(f"epruntime_{name}", documentation, labels=labels)
        for rank in stats.ranks:
            if key in rank.moe:
                counter.add_metric([model_name, str(rank.slot)], rank.moe[key])
        yield counter


def _experts(stats: EngineStats, model_name: str, *, per_expert: bool) -> Iterator[Metric]:
    by_rank = CounterMetricFamily(
        "epruntime_rank_expert_tokens",
        "Tokens that the rank's experts of a layer computed; a token counts once for each of its top-k experts.",
        labels=["model_name", "layer", "rank"],
    )
    balance = GaugeMetricFamily(
        "epruntime_expert_balancedness",
        "Mean over max of the ranks' expert tokens of a layer, lately; 1 is perfect.",
        labels=["model_name", "layer"],
    )
    slots = sorted(rank.slot for rank in stats.ranks)
    for load in stats.layers:
        layer = str(load.layer)
        for slot, tokens in zip(slots, load.rank_tokens, strict=True):
            by_rank.add_metric([model_name, layer, str(slot)], tokens)
        if load.balancedness is not None:
            balance.add_metric([model_name, layer], load.balancedness)
    yield by_rank
    yield balance
    if not per_expert:
        return
    by_expert = CounterMetricFamily(
        "epruntime_expert_tokens",
        "Tokens that chose a logical expert of a layer.",
        labels=["model_name", "layer", "expert"],
    )
    for load in stats.layers:
        for expert, tokens in enumerate(load.expert_tokens):
            by_expert.add_metric([model_name, str(load.layer), str(expert)], tokens)
    yield by_expert
