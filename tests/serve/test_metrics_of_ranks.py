"""/metrics over a real engine of two ranks: values against what clients saw and against arithmetic."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from metrics_text import Exposition

from epruntime.config import EngineConfig
from epruntime.engine.async_llm import AsyncLLM
from epruntime.errors import InvalidRequestError
from epruntime.moe.rows import RowFormat
from epruntime.sampling_params import SamplingParams
from epruntime.serve.gate import Gate
from epruntime.serve.metrics import Metrics

HIDDEN, TOP_K, LAYERS, EXPERTS, BLOCK = 64, 2, 3, 8, 16
DEADLINE_S = 120


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    from epruntime.testing.tiny_models import build, save

    path = tmp_path_factory.mktemp("tiny")
    config, made = build("mixtral", seed=0)
    assert (config.hidden_size, config.num_experts_per_tok, config.num_hidden_layers) == (HIDDEN, TOP_K, LAYERS)
    assert config.num_local_experts == EXPERTS
    save(made, path)
    return path


class Seen:
    """What the clients of an engine saw."""

    def __init__(self) -> None:
        self.prompt = self.output = self.cached = self.requests = 0
        self.sequences: dict[str, int] = {}
        self.first_tokens = self.gaps = 0

    async def request(
        self, llm: AsyncLLM, prompt: list[int], leave_after: int | None = None, **sampling: object
    ) -> None:
        params = SamplingParams(temperature=0, ignore_eos=True, **sampling)  # type: ignore[arg-type]
        stream = llm.stream({"prompt_token_ids": prompt}, params)
        tokens = [0] * params.n
        async for delta in stream:
            for output in delta.outputs:
                tokens[output.index] += len(output.token_ids)
                if output.finish_reason:
                    self.sequences[output.finish_reason] = self.sequences.get(output.finish_reason, 0) + 1
            if leave_after is not None and sum(tokens) >= leave_after:
                self.sequences["abort"] = self.sequences.get("abort", 0) + params.n
                break
        await stream.aclose()
        self.requests += 1
        self.prompt += len(delta.prompt_token_ids)
        self.cached += delta.num_cached_tokens
        self.output += sum(tokens)
        self.first_tokens += any(tokens)
        self.gaps += sum(max(count - 1, 0) for count in tokens)


@pytest.mark.slow
def test_counters_are_what_clients_saw_and_what_arithmetic_says(model) -> None:
    async def run() -> tuple[Seen, Exposition, Exposition]:
        config = EngineConfig.from_kwargs(
            model=str(model), expert_parallel_size=2, threads_per_rank=1, max_num_batched_tokens=32, max_num_seqs=4,
            block_size=BLOCK, num_kv_blocks=64,
        )  # fmt: skip
        llm = await AsyncLLM.create(config)
        try:
            gate = Gate()
            metrics = Metrics(gate, per_expert=True)
            gate.ready(llm)
            assert await llm.refresh_stats()
            before = Exposition((await metrics.render())[0])
            llm.poll_stats(0.02)  # far more often than in service: it must not change what is counted
            seen = Seen()
            prompts = [[(7 * i + 3 * j) % 120 + 3 for j in range(n)] for i, n in enumerate((1, 5, 17, 40, 60, 90))]
            await asyncio.gather(*(seen.request(llm, p, max_tokens=4 + i) for i, p in enumerate(prompts)))
            for _ in range(2):  # an idle engine gives both to the same rank, where the second finds the first one's KV
                await seen.request(llm, prompts[-1], max_tokens=3)
            await seen.request(llm, prompts[2], n=3, max_tokens=5)
            await seen.request(llm, prompts[1], max_tokens=100, stop_token_ids=list(range(128)))
            with pytest.raises(InvalidRequestError):
                await seen.request(llm, [500])
            await seen.request(llm, prompts[1], max_tokens=300, leave_after=1)
            assert await llm.drain(60)
            async with asyncio.timeout(60):
                while not await llm.refresh_stats() or any(r.num_running for r in llm.stats_snapshot().ranks):
                    await asyncio.sleep(0.01)
            return seen, before, Exposition((await metrics.render())[0])
        finally:
            await llm.shutdown()

    seen, before, after = asyncio.run(asyncio.wait_for(run(), DEADLINE_S))

    # before the first request everything is there, and zero
    assert before.sum("epruntime_rank_expert_tokens_total") == 0
    assert len(before.all("epruntime_rank_expert_tokens_total")) == LAYERS * 2
    assert len(before.all("epruntime_expert_tokens_total")) == LAYERS * EXPERTS
    assert before.sum("epruntime_rows_sent_total") == 0

    def count(name: str, **labels: str) -> float:
        return after.value(f"epruntime_{name}", **labels)

    # what clients saw; of the request that was left, tokens may have been made that nobody fetched
    assert count("prompt_tokens_total") == seen.prompt
    unseen = count("generation_tokens_total") - seen.output
    assert 0 <= unseen <= 300
    assert count("requests_admitted_total") == seen.requests
    assert count("requests_refused_total", error="InvalidRequestError") == 1
    assert seen.sequences == {"length": 6 + 2 + 3, "stop": 1, "abort": 1}
    for reason, number in seen.sequences.items():
        assert count("request_success_total", finished_reason=reason) == number
    assert seen.cached >= 80  # 90 tokens: five blocks of 16, and some more
    assert count("prompt_tokens_cached_total") == seen.cached
    assert after.sum("epruntime_prefix_cache_hits_total") >= seen.cached
    assert after.sum("epruntime_prefix_cache_queries_total") == seen.prompt + 2 * 17  # three sequences of one prompt
    for name, number in {
        "time_to_first_token_seconds": seen.first_tokens,
        "inter_token_latency_seconds": seen.gaps + unseen,
        "e2e_request_latency_seconds": seen.requests,
        "request_queue_time_seconds": seen.requests,
        "request_prefill_time_seconds": seen.requests,
        "request_prompt_tokens": seen.requests,
        "request_generation_tokens": seen.requests + 2,
        "request_params_n": seen.requests,
        "iteration_tokens_total": count("steps_total"),
    }.items():
        assert count(f"{name}_count") == number, name
    assert count("request_generation_tokens_sum") == seen.output + unseen
    assert count("request_params_n_sum") == seen.requests + 2
    inference, queue = count("request_inference_time_seconds_sum"), count("request_queue_time_seconds_sum")
    assert inference + queue == pytest.approx(count("e2e_request_latency_seconds_sum"))

    # arithmetic: each computed token goes to top_k experts in each MoE layer
    computed = count("prefill_tokens_total") + count("decode_tokens_total")
    assert count("iteration_tokens_total_sum") == computed
    for layer in ("0", "1", "2"):
        assert after.sum("epruntime_expert_tokens_total", layer=layer) == computed * TOP_K
        assert after.sum("epruntime_rank_expert_tokens_total", layer=layer) == computed * TOP_K
        # contiguous placement: the first half of the experts is on rank 0
        mine = sum(count("expert_tokens_total", layer=layer, expert=str(e)) for e in range(EXPERTS // 2))
        assert count("rank_expert_tokens_total", layer=layer, rank="0") == mine
        assert 0.5 <= count("expert_balancedness", layer=layer) <= 1
    sent, received = after.sum("epruntime_rows_sent_total"), after.sum("epruntime_rows_received_total")
    assert sent == received
    assert computed * LAYERS <= sent <= computed * LAYERS * TOP_K
    row_bytes = RowFormat(hidden_size=HIDDEN, top_k=TOP_K, dtype=torch.float32).row_bytes
    assert row_bytes == 64 * 4 + 2 * 4 + 8  # padded to a multiple of 16
    for rank in ("0", "1"):
        assert count("dispatch_bytes_total", rank=rank) == count("rows_sent_total", rank=rank) * row_bytes
        pairs = after.sum("epruntime_rank_expert_tokens_total", rank=rank)
        assert count("combine_bytes_total", rank=rank) == pairs * HIDDEN * 4
        assert count("rank_steps_total", rank=rank) == count("steps_total")
        # one round per layer, but in steps without any token, which have none
        rounds = count("exchange_rounds_total", rank=rank)
        assert rounds == count("exchange_rounds_total", rank="0")
        assert rounds % LAYERS == 0
        assert count("steps_total") - 10 <= rounds / LAYERS <= count("steps_total")
        assert count("dispatch_seconds_total", rank=rank) > 0
        assert count("rank_up", rank=rank) == 1
        assert count("rank_heartbeat_age_seconds", rank=rank) < 5
        assert count("kv_cache_usage_perc", rank=rank) == 0
        assert count("kv_cache_blocks", rank=rank) == 64
        assert count("num_requests_running", rank=rank) == count("num_requests_waiting", rank=rank) == 0
        assert count("rank_resident_memory_bytes", rank=rank) > 50e6
    assert after.value("epruntime_parallel_config_info", transport="gloo", expert_parallel_size="2") == 1


def test_a_scrape_sends_nothing_and_waits_for_nothing(model) -> None:
    """Also while a rank does not answer: counters grow old, the rest is fresh."""

    async def run() -> None:
        config = EngineConfig.from_kwargs(model=str(model), threads_per_rank=1, num_kv_blocks=64)
        llm = await AsyncLLM.create(config)
        try:
            gate = Gate()
            metrics = Metrics(gate)
            gate.ready(llm)
            assert await llm.refresh_stats()
            await Seen().request(llm, [5, 6], max_tokens=2)
            (rank,) = llm._group.ranks
            asked: list[str] = []

            def silent(type: str, timeout_s: float | None = None, **body: object) -> asyncio.Future:
                asked.append(type)
                return asyncio.get_running_loop().create_future()

            rank.call = silent  # type: ignore[method-assign]
            first = Exposition((await metrics.render())[0])
            assert asked == []
            llm.poll_stats(0.01)
            await asyncio.sleep(0.1)
            assert asked == ["counters"]  # one question at a time
            later = Exposition((await metrics.render())[0])
            age = "epruntime_counters_age_seconds"
            assert later.value(age) >= first.value(age) + 0.1
            assert later.value("epruntime_steps_total") == llm.stats_snapshot().steps > 0
            assert later.value("epruntime_rank_steps_total", rank="0") == 0
            del rank.call
        finally:
            await llm.shutdown()

    asyncio.run(asyncio.wait_for(run(), DEADLINE_S))
