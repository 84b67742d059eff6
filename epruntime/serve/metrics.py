"""Metrics: what /metrics answers.

the engine tells RequestMetrics as it happens; at a scrape: gate, EngineStats, RequestMetrics -> families -> text

A scrape asks no rank and waits for nothing: what ranks count themselves comes from the engine's last poll.
"""

from __future__ import annotations

import asyncio
import copy
import re
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from epruntime.serve.engine import Engine
from epruntime.serve.gate import Gate, ServerState
from epruntime.serve.metrics_engine import engine_families, engine_state_family, info_family, state_family
from epruntime.serve.metrics_requests import RequestMetrics
from epruntime.version import __version__

#: Samples that become text at once: about a millisecond.
_SLICE = 256
#: What opens the text of a family, and what ends an OpenMetrics exposition.
_HEADER = re.compile(rb"\A(?:# (?:HELP|TYPE|UNIT) .*\n)+")
_END = b"# EOF\n"


class _Families(Collector):
    """Families as the encoders want them."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> list[Metric]:
        return self._families


class Metrics(Collector):
    """The metrics of one server. It has a registry of its own; prometheus_client's global one is not used.

    Args:
        gate: of the server; once it has an engine, that is observed.
        per_expert: expose tokens by layer and logical expert.
    """

    def __init__(self, gate: Gate, *, per_expert: bool = False) -> None:
        self._gate, self._per_expert = gate, per_expert
        self._engine: Engine | None = None
        self._requests: RequestMetrics | None = None
        self._registry = CollectorRegistry(auto_describe=False)
        ProcessCollector(registry=self._registry)
        PlatformCollector(registry=self._registry)
        GCCollector(registry=self._registry)
        self._registry.register(self)
        gate.on_change(self._attach)
        self._attach()

    async def render(self, accept: str = "") -> tuple[bytes, str]:
        """The body of /metrics and its content type. Call it on the engine's loop.

        Turning many samples into text takes a while, so it is done in slices, and the engine's steps go on in between.

        Args:
            accept: the request's Accept header; OpenMetrics where it asks for that, else Prometheus' text format.
        """
        encode, content_type = choose_encoder(accept)
        parts: list[bytes] = []
        for family in self._registry.collect():
            for start in range(0, max(len(family.samples), 1), _SLICE):
                part = copy.copy(family)
                part.samples = family.samples[start : start + _SLICE]
                text = encode(_Families([part])).removesuffix(_END)
                parts.append(text if start == 0 else _HEADER.sub(b"", text))
                await asyncio.sleep(0)
        return b"".join(parts) + encode(_Families([])), content_type

    def collect(self) -> Iterator[Metric]:
        gate = self._gate
        yield info_family("build", "What runs here.", {"version": __version__})
        started = GaugeMetricFamily("epruntime_start_time_seconds", "When the server started, seconds since 1970.")
        started.add_metric([], gate.started)
        yield started
        yield state_family(
            "server_state", "State of the server.", {each.value: each is gate.state for each in ServerState}
        )
        engine, requests = self._engine, self._requests
        if engine is None or requests is None:
            return
        info = engine.model_info
        name = info["name"]
        facts = ("architecture", "dtype", "max_model_len", "num_layers", "num_experts", "top_k")
        yield info_family("model", "The model.", {"model_name": name, **{fact: info[fact] for fact in facts}})
        yield engine_state_family(engine.status.state)
        yield from requests.families(name)
        stats = engine.stats_snapshot()
        yield info_family("cache_config", "The KV cache.", {"model_name": name, **stats.cache_facts})
        yield info_family("parallel_config", "The ranks.", {"model_name": name, **stats.parallel_facts})
        yield from engine_families(stats, name, per_expert=self._per_expert)

    def _attach(self) -> None:
        engine = self._gate.engine
        if engine is not None and self._engine is None:
            self._engine = engine
            self._requests = RequestMetrics(max_model_len=engine.model_info["max_model_len"])
            engine.add_observer(self._requests)
