"""/metrics without an engine behind it: names, values, formats, the documentation and the board."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import pytest
from fake_llm import FakeLLM
from metrics_text import Exposition, engine_stats, rank_stats
from prometheus_client.exposition import choose_encoder
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics

from epruntime.config import ServeConfig
from epruntime.engine.observer import AdmittedRequest, FinishedRequest, NewTokens
from epruntime.engine.stats import LayerLoad
from epruntime.engine.status import EngineState
from epruntime.errors import EngineDeadError, QueueFullError
from epruntime.moe.counters import LAYER_COUNTERS
from epruntime.outputs import RequestMetrics as Times
from epruntime.serve.gate import Gate
from epruntime.serve.metrics import Metrics
from epruntime.serve.metrics_histogram import Histogram, one_two_five
from epruntime.serve.server import FrontEnds
from epruntime.serve.stats_log import StatsLog
from epruntime.testing.patience import PATIENCE_S

ROOT = Path(__file__).parents[2]


def on_loop(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(test())


@contextmanager
def serving(*, per_expert: bool = False) -> Iterator[tuple[Gate, FakeLLM, Metrics]]:
    gate, llm = Gate(), FakeLLM()
    llm.stats = engine_stats()
    metrics = Metrics(gate, per_expert=per_expert)
    gate.ready(llm)
    yield gate, llm, metrics


async def _scrape(metrics: Metrics) -> Exposition:
    return Exposition((await metrics.render())[0])


def _finished(times: Times, reasons: tuple[str, ...] = ("stop",), output: tuple[int, ...] = (4,)) -> FinishedRequest:
    return FinishedRequest(
        request_id="a",
        metrics=times,
        finish_reasons=reasons,
        num_prompt_tokens=30,
        num_output_tokens=output,
        num_cached_tokens=16,
    )


def test_histograms_count_as_prometheus_does() -> None:
    assert one_two_five(100) == (1, 2, 5, 10, 20, 50, 100)
    assert one_two_five(99) == (1, 2, 5, 10, 20, 50)
    assert one_two_five(1) == (1,)
    histogram = Histogram("h", "help", (1, 2.5, 10))
    histogram.observe_all([0.5, 1, 1.001, 2.5, 9, 10, 11, 1e9])
    samples = {(s.name, s.labels.get("le")): s.value for s in histogram.family("m").samples}
    # bounds are inclusive, buckets cumulative
    assert samples == {
        ("h_bucket", "1.0"): 2,
        ("h_bucket", "2.5"): 4,
        ("h_bucket", "10.0"): 6,
        ("h_bucket", "+Inf"): 8,
        ("h_count", None): 8,
        ("h_sum", None): 0.5 + 1 + 1.001 + 2.5 + 9 + 10 + 11 + 1e9,
    }


def test_while_the_model_loads_there_is_little_and_it_is_true() -> None:
    async def test() -> None:
        seen = await _scrape(Metrics(Gate()))
        assert seen.value("epruntime_server_state", state="loading") == 1
        assert seen.sum("epruntime_server_state") == 1
        assert "epruntime_engine_state" not in seen.families
        assert seen.value("process_resident_memory_bytes") > 1e6

    on_loop(test)


def test_states_and_ranks() -> None:
    async def test() -> None:
        with serving() as (_, llm, metrics):
            assert (await _scrape(metrics)).value("epruntime_engine_state", state="ready") == 1
            lost = rank_stats(1, up=False, progress_age_s=7.5, num_running=3)
            llm.stats = engine_stats(ranks=(rank_stats(0), lost), restarts=2)
            llm.become(EngineState.RESTARTING, "rank 1 is lost")
            seen = await _scrape(metrics)
            assert seen.value("epruntime_engine_state", state="restarting") == 1
            assert seen.sum("epruntime_engine_state") == 1
            assert seen.value("epruntime_rank_up", rank="0", host="host0") == 1
            assert seen.value("epruntime_rank_up", rank="1", host="host1") == 0
            assert seen.value("epruntime_rank_progress_age_seconds", rank="1") == 7.5
            assert seen.value("epruntime_num_requests_running", rank="1") == 3
            assert seen.value("epruntime_restarts_total") == 2
            llm.die(EngineDeadError("dead"))
            seen = await _scrape(metrics)
            assert seen.value("epruntime_engine_state", state="dead") == 1
            assert seen.value("epruntime_server_state", state="dead") == 1

    on_loop(test)


def test_requests_are_counted_by_what_the_engine_tells() -> None:
    async def test() -> None:
        with serving() as (_, llm, metrics):
            (observer,) = llm.observers
            for n, most in ((1, 100), (3, None)):
                observer.admitted(AdmittedRequest(request_id="a", num_prompt_tokens=30, n=n, max_tokens=most))
            observer.refused(QueueFullError("full"))
            observer.tokens(NewTokens(num_tokens=2, num_prompt_tokens=30, first_token_s=[0.03, 3.0]))
            observer.tokens(NewTokens(num_tokens=3, inter_token_s=[0.02, 0.02, 0.06]))
            observer.step(30, 0)
            observer.step(0, 4)
            # arrived at 10, on a rank at 11, first token at 13, three more in 4.5 s
            observer.finished(_finished(Times(10.0, 11.0, 13.0, 17.5)))
            # one of two sequences was cut off; never got a token
            observer.finished(_finished(Times(20.0, None, None, 21.0), ("abort", "abort"), (0, 0)))
            seen = await _scrape(metrics)
        assert seen.value("epruntime_requests_admitted_total") == 2
        assert seen.value("epruntime_requests_refused_total", error="QueueFullError") == 1
        assert seen.value("epruntime_generation_tokens_total", model_name="echo") == 5
        assert seen.value("epruntime_prompt_tokens_total") == 30
        assert seen.value("epruntime_prompt_tokens_cached_total") == 32
        assert {r: seen.value("epruntime_request_success_total", finished_reason=r) for r in ("stop", "abort")} == {
            "stop": 1,
            "abort": 2,
        }
        for name, count, total in (
            ("time_to_first_token_seconds", 2, 3.03),
            ("inter_token_latency_seconds", 3, 0.1),
            ("iteration_tokens_total", 2, 34),
            ("e2e_request_latency_seconds", 2, 8.5),
            ("request_queue_time_seconds", 1, 1),
            ("request_prefill_time_seconds", 1, 2),
            ("request_decode_time_seconds", 1, 4.5),
            ("request_inference_time_seconds", 1, 6.5),
            ("request_time_per_output_token_seconds", 1, 1.5),
            ("request_prompt_tokens", 2, 60),
            ("request_generation_tokens", 3, 4),
            ("request_params_n", 2, 4),
            ("request_params_max_tokens", 1, 100),
        ):
            assert seen.value(f"epruntime_{name}_count") == count, name
            assert seen.value(f"epruntime_{name}_sum") == pytest.approx(total), name
            assert seen.value(f"epruntime_{name}_bucket", le="+Inf") == count, name
        assert seen.value("epruntime_time_to_first_token_seconds_bucket", le="0.04") == 1
        assert seen.value("epruntime_iteration_tokens_total_bucket", le="8.0") == 1

    on_loop(test)


@pytest.mark.parametrize("per_expert", [False, True])
def test_expert_load(per_expert) -> None:
    async def test() -> None:
        with serving(per_expert=per_expert) as (_, _, metrics):
            seen = await _scrape(metrics)
        assert seen.value("epruntime_rank_expert_tokens_total", layer="3", rank="0") == 4
        assert seen.sum("epruntime_rank_expert_tokens_total", layer="11") == 6
        assert seen.value("epruntime_expert_balancedness", layer="3") == 0.75
        place = LAYER_COUNTERS.index("replica_pairs") + 1
        assert seen.value("epruntime_replica_tokens_total", rank="1") == 10 * place + 1
        assert len(seen.all("epruntime_expert_tokens_total")) == 6 * per_expert
        if per_expert:
            assert seen.value("epruntime_expert_tokens_total", layer="11", expert="1") == 6

    on_loop(test)


def test_the_format_is_the_one_that_is_asked_for() -> None:
    async def test() -> None:
        with serving() as (_, _, metrics):
            body, kind = await metrics.render("text/html,*/*")
            assert kind.startswith("text/plain; version=0.0.4")
            assert not body.endswith(b"# EOF\n")
            body, kind = await metrics.render("application/openmetrics-text;version=1.0.0,text/plain;q=0.5")
            assert kind.startswith("application/openmetrics-text; version=1.0.0")
            families = {family.name: family.type for family in parse_openmetrics(body.decode())}
            assert families["epruntime_prompt_tokens"] == "counter"
            assert families["epruntime_time_to_first_token_seconds"] == "histogram"

    on_loop(test)


@pytest.mark.parametrize("accept", ["", "application/openmetrics-text;version=1.0.0"])
def test_a_large_exposition_is_made_in_slices(accept) -> None:
    """The text is the same as in one go, and others get their turn in between."""

    async def test() -> None:
        with serving(per_expert=True) as (_, llm, metrics):
            loads = (
                LayerLoad(layer=i, expert_tokens=(i,) * 100, rank_tokens=(1, 2), balancedness=None) for i in range(9)
            )
            llm.stats = engine_stats(layers=tuple(loads))
            turns = 0

            async def other() -> None:
                nonlocal turns
                while True:
                    turns += 1
                    await asyncio.sleep(0)

            task = asyncio.create_task(other())
            body, _ = await metrics.render(accept)
            task.cancel()
            assert turns >= len(list(metrics._registry.collect())) + 900 // 256 - 1
            encode, _ = choose_encoder(accept)
            whole = encode(metrics._registry)

            def ours(text: bytes) -> list[bytes]:
                return [line for line in text.splitlines() if b"epruntime_" in line or line == b"# EOF"]

            assert ours(body) == ours(whole)
            assert len(ours(body)) > 900

    on_loop(test)


@pytest.mark.parametrize(("ranks", "layers"), [(1, 0), (2, 2), (8, 48)])
def test_the_number_of_series_is_as_documented(ranks, layers) -> None:
    async def test() -> None:
        with serving() as (_, llm, metrics):
            moe = llm.stats.ranks[0].moe
            loads = (
                LayerLoad(layer=i, expert_tokens=(1,) * 128, rank_tokens=(1,) * ranks, balancedness=0.5)
                for i in range(layers)
            )
            llm.stats = engine_stats(ranks=tuple(rank_stats(i, moe=moe) for i in range(ranks)), layers=tuple(loads))
            seen = await _scrape(metrics)
            series = [name for name, _ in seen.samples if name.startswith("epruntime_")]
            assert llm.model_info["max_model_len"] == 65536
            assert len(series) == 293 + 22 * ranks + layers * (ranks + 1)

    on_loop(test)


def test_two_servers_in_one_process_do_not_share() -> None:
    async def test() -> None:
        with serving() as (_, llm, one), serving() as (_, _, other):
            llm.observers[0].tokens(NewTokens(num_tokens=5))
            assert (await _scrape(one)).value("epruntime_generation_tokens_total") == 5
            assert (await _scrape(other)).value("epruntime_generation_tokens_total") == 0

    on_loop(test)


def test_the_server_answers_with_them() -> None:
    """Over HTTP, with the token that all but health needs."""

    async def test() -> None:
        gate = Gate()
        front_ends = FrontEnds(ServeConfig(port=0, grpc_port=0, api_key=("secret",), expert_metrics="expert"), gate)
        url = re.search(r"HTTP on (\S+)", await front_ends.start())[1]
        try:
            llm = FakeLLM()
            llm.stats = engine_stats()
            gate.ready(llm)
            async with httpx2.AsyncClient(base_url=url) as http:
                assert (await http.get("/metrics")).status_code == 401
                answer = await http.get("/metrics", headers={"Authorization": "Bearer secret"})
            assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
            seen = Exposition(answer.text)
            assert seen.value("epruntime_server_state", state="ready") == 1
            assert len(seen.all("epruntime_expert_tokens_total")) == 6
        finally:
            await front_ends.stop()

    on_loop(test)


def _documented() -> dict[str, tuple[str, set[str]]]:
    """Name -> type and labels, as docs/metrics.md has them."""
    found = {}
    for line in (ROOT / "docs/metrics.md").read_text(encoding="utf-8").splitlines():
        if match := re.match(r"\| `(epruntime_\w+)` \| (\w+) \|([^|]*)\|", line):
            name, kind, labels = match.groups()
            assert name not in found, f"{name} is documented twice"
            found[name] = (kind, set(re.findall(r"`(\w+)`", labels)))
    return found


def _exposed() -> dict[str, tuple[str, set[str]]]:
    found = {}

    async def test() -> None:
        with serving(per_expert=True) as (_, llm, metrics):
            llm.observers[0].refused(QueueFullError("full"))
            seen = await _scrape(metrics)
        for family in seen.families.values():
            if family.name.startswith("epruntime_"):
                name = f"{family.name}_total" if family.type == "counter" else family.name
                labels = {label for sample in family.samples for label in sample.labels} - {"le"}
                found[name] = (family.type, labels)

    on_loop(test)
    return found


def test_every_metric_is_documented_as_it_is() -> None:
    documented, exposed = _documented(), _exposed()
    # labels of these two are settings, and named in words
    for name in ("epruntime_cache_config_info", "epruntime_parallel_config_info"):
        assert documented.pop(name)[0] == exposed.pop(name)[0] == "gauge"
    assert documented == exposed


def test_the_board_shows_what_exists() -> None:
    board = json.loads((ROOT / "examples/grafana/epruntime.json").read_text(encoding="utf-8"))
    panels = [panel for panel in board["panels"] if panel["type"] != "row"]
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    exposed = _exposed()
    for panel in panels:
        assert panel["title"]
        assert panel["datasource"]["uid"] == "${datasource}"
        x, y, w, h = (panel["gridPos"][key] for key in "xywh")
        assert 0 <= x <= x + w <= 24
        assert y >= 0
        assert h > 0
        for target in panel["targets"]:
            names = re.findall(r"epruntime_\w+", target["expr"])
            assert names, target
            for name in names:
                base = re.sub(r"_(bucket|count|sum)$", "", name)
                kind, labels = exposed[base if base in exposed else name]
                assert (name != base) == (kind == "histogram"), name
                used = set(re.findall(r"by \(([^)]*)\)", target["expr"]))
                assert {x.strip() for part in used for x in part.split(",")} <= labels | {"le"}, target
    overlaps = [(p["gridPos"], p["id"]) for p in board["panels"]]
    cells = [
        (x, y) for pos, _ in overlaps for x in range(pos["x"], pos["x"] + pos["w"])
        for y in range(pos["y"], pos["y"] + pos["h"])
    ]  # fmt: skip
    assert len(cells) == len(set(cells)), "panels overlap"
    variables = {variable["name"] for variable in board["templating"]["list"]}
    assert set(re.findall(r"\$\{?(\w+)", json.dumps(board))) <= variables | {"__rate_interval", "__all"}


def test_the_log_line_and_its_silence(caplog) -> None:
    caplog.set_level(logging.INFO)

    async def run() -> None:
        llm = FakeLLM()
        llm.stats = engine_stats()
        log = StatsLog(llm, 1000)
        log.tokens(NewTokens(num_tokens=50, num_prompt_tokens=200))
        grown = dict(llm.stats.ranks[0].scheduler)
        grown.update(prefix_query_tokens=80, prefix_hit_tokens=20, preemptions=2)
        ranks = (
            replace(llm.stats.ranks[0], scheduler=grown, num_running=3, kv_usage=0.5),
            replace(llm.stats.ranks[1], num_running=1, num_waiting=6, kv_usage=0.25),
        )
        first, second = llm.stats.layers
        layers = (replace(first, rank_tokens=(4 + 30, 2 + 10)), replace(second, rank_tokens=(3 + 9, 3 + 9)))
        llm.stats = replace(llm.stats, time=110.0, ranks=ranks, layers=layers)
        # 10 s: 200 and 50 tokens; layer 3: 30 and 10 tokens, mean 20 of 30
        assert log.line() == (
            "prompt 20.0 tokens/s, generation 5.0 tokens/s, running 4, waiting 6, KV cache 50.0 %, "
            "prefix hits 25.0 %, balancedness 0.67 (layer 3), preemptions 2"
        )
        llm.stats = replace(llm.stats, time=120.0, ranks=tuple(replace(r, num_running=0, num_waiting=0) for r in ranks))
        assert log.line() == (
            "prompt 0.0 tokens/s, generation 0.0 tokens/s, running 0, waiting 0, KV cache 50.0 %, "
            "prefix hits -, balancedness -, preemptions 0"
        )
        assert log.line() is None
        log.tokens(NewTokens(num_tokens=1))
        assert log.line() is not None
        log.stop()
        assert not llm.observers
        quick = StatsLog(llm, 0.01)
        quick.tokens(NewTokens(num_tokens=1))
        deadline = time.monotonic() + PATIENCE_S
        while "generation" not in caplog.text:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)
        quick.stop()

    asyncio.run(run())
    assert sum("tokens/s" in line for line in caplog.messages) <= 2  # the one with a token, and the first idle one
