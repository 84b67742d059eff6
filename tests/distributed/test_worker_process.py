"""Real rank processes driven by hand-written plans: tokens equal transformers, failures leave a rank usable."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from epruntime.errors import ConfigError, EngineDeadError, ProtocolError, RankLostError, UnsupportedModelError
from epruntime.launchers.pool import RankPool
from epruntime.plan import NewRequest, SamplingSpec, StepPlan, StepResult
from epruntime.testing import tiny_models
from epruntime.testing.patience import PATIENCE_S, soon

pytestmark = pytest.mark.timeout(180)
PROMPTS = {1: [5, 17, 99, 3, 64, 23, 8, 91, 44, 12, 70, 31, 6, 118, 55, 29, 101], 2: [40], 3: [77, 13, 2, 60, 19]}
NEW_TOKENS = 10


class Fleet:
    """A pool of two ranks on one event loop, and the calls that the engine would make."""

    def __init__(self) -> None:
        self.runner = asyncio.Runner()
        self.pool: RankPool = self.run(RankPool.start(2, launcher="local", threads_per_rank=1, start_timeout_s=90))
        self.generation = -1

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.runner.run(work)

    def all(self, type: str, bodies: list[dict[str, Any]], timeout_s: float = 60) -> list[Any]:
        """One call per rank at once; replies or exceptions."""

        async def calls() -> list[Any]:
            ranks = self.pool.ranks[: len(bodies)]
            return await asyncio.gather(
                *(rank.call(type, timeout_s, **body) for rank, body in zip(ranks, bodies, strict=True)),
                return_exceptions=True,
            )

        return self.run(calls())

    def configure(self, world_size: int, step_timeout_s: float = 30.0) -> None:
        self.generation = self.pool.next_generation()
        host, port = self.pool.store_address
        bodies = [
            {
                "generation": self.generation,
                "ep_rank": rank,
                "world_size": world_size,
                "store_host": host,
                "store_port": port,
                "hosts": ["here"] * world_size,
                "transport": "auto",
                "experts_backend": "auto",
                "invariance": "strict",
                "exchange_budget_tokens": 64,
                "step_timeout_s": step_timeout_s,
                "threads": 1,
            }
            for rank in range(world_size)
        ]
        replies = self.all("configure", bodies)
        assert [r["type"] for r in replies] == ["configured"] * world_size, replies

    def load(self, path: Path, world_size: int, **changes: Any) -> list[Any]:
        body = {
            "model": str(path),
            "dtype": "auto",
            "max_model_len": 64,
            "block_size": 8,
            "num_kv_blocks": 24,
            "kv_cache_memory_bytes": None,
            "max_num_seqs": 4,
            "max_num_batched_tokens": 16,
            "ranks_on_host": world_size,
            **changes,
        }
        return self.all("load", [body] * world_size)

    def step(self, plans: list[StepPlan]) -> list[Any]:
        replies = self.all("plan", [{"plan": plan.to_wire()} for plan in plans])
        return [r if isinstance(r, Exception) else StepResult.from_wire(r["result"]) for r in replies]

    def plan(self, step: int, **fields: Any) -> StepPlan:
        return StepPlan(step=step, generation=self.generation, **fields)


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    fleet = Fleet()
    try:
        yield fleet
    finally:
        fleet.run(fleet.pool.stop())
        fleet.runner.close()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    _, model = tiny_models.build("mixtral", 0)
    return tiny_models.save(model, tmp_path_factory.mktemp("mixtral")), model


def request(rid: int, blocks: tuple[int, ...]) -> NewRequest:
    spec = SamplingSpec(temperature=0.0, top_k=0, top_p=1.0, seed=0, stop_ids=(), max_tokens=NEW_TOKENS, logprobs=3)
    return NewRequest(
        rid=rid,
        token_ids=tuple(PROMPTS[rid]),
        num_prompt_tokens=len(PROMPTS[rid]),
        num_computed_tokens=0,
        block_ids=blocks,
        sampling=spec,
    )


def expected(model: Any, prompt: list[int]) -> tuple[list[int], torch.Tensor]:
    out = model.generate(torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None)
    with torch.no_grad():
        logits = model(out).logits[0, len(prompt) - 1 : -1]
    return out[0, len(prompt) :].tolist(), torch.log_softmax(logits.double(), -1)


@pytest.mark.parametrize("world_size", [1, 2])
def test_hand_written_plans_give_the_tokens_of_transformers(fleet, tiny, world_size):
    path, model = tiny
    fleet.configure(world_size)
    loaded = fleet.load(path, world_size)
    assert all(r["type"] == "loaded" and r["num_kv_blocks"] == 24 for r in loaded), loaded
    assert loaded[0]["info"]["model_type"] == "mixtral"
    # Request 1 comes in chunks of 7, 7 and 3; the others join while it is at it, on the last rank. Then all decode.
    first, last = {}, {}
    schedule = {
        0: (first, {"new": (request(1, (3, 0)),), "prefill": {1: 7}}),
        1: (first, {"prefill": {1: 7}}),
        2: (last, {"new": (request(2, (20, 21)), request(3, (7, 9))), "prefill": {2: 1, 3: 4}}),
        3: (first, {"blocks": {1: (11, 5)}, "prefill": {1: 3}}),
        4: (last, {"prefill": {3: 1}}),
        6: (first, {"hold": (1,)}),
    }
    tokens: dict[int, list[int]] = {}
    logprobs: dict[int, list[Any]] = {}
    for step in range(20):
        plans = [fleet.plan(step)] * world_size
        rank_of = {id(first): 0, id(last): world_size - 1}
        if step in schedule:
            where, fields = schedule[step]
            plans[rank_of[id(where)]] = fleet.plan(step, **fields)
        for result in fleet.step(plans):
            for i, rid in enumerate(result.rids.tolist()):
                tokens.setdefault(rid, []).append(int(result.tokens[i]))
                logprobs.setdefault(rid, []).append(result.logprobs[i])
    for rid, prompt in PROMPTS.items():
        ids, exact = expected(model, prompt)
        assert tokens[rid] == ids
        for position, (token, got) in enumerate(zip(ids, logprobs[rid], strict=True)):
            assert got.chosen == pytest.approx(exact[position, token].item(), abs=1e-4)
            assert got.top_ids == tuple(exact[position].topk(3).indices.tolist())
    stats = fleet.all("stats", [{}] * world_size)
    routed = sum(sum(layer["expert_tokens"]) for s in stats for layer in s["moe"]["layers"].values())
    # Two choices in each of 3 layers for every computed token; the last token of a request is not computed.
    assert routed == 2 * 3 * sum(len(p) + NEW_TOKENS - 1 for p in PROMPTS.values())
    assert all(s["kv"]["num_blocks"] == 24 and s["num_requests"] == 0 for s in stats)


def test_a_refused_load_leaves_the_ranks_usable(fleet, tiny, tmp_path):
    path, _ = tiny
    fleet.configure(1)
    for changes, kind, words in (
        ({"max_model_len": 513}, ConfigError, ("513", "512")),
        ({"num_kv_blocks": 7}, ConfigError, ("num_kv_blocks=7", "needs 8", "at most 57")),
        ({"num_kv_blocks": 10**9}, ConfigError, ("free memory",)),
        ({"model": str(tmp_path)}, Exception, (str(tmp_path),)),
    ):
        (error,) = fleet.load(path, 1, **changes)
        assert isinstance(error, kind), error
        assert all(word in str(error) for word in (*words, "rank 0", "load")), error
    _, dense = tiny_models.build("llama")
    (error,) = fleet.load(tiny_models.save(dense, tmp_path / "dense"), 1)
    assert isinstance(error, UnsupportedModelError)
    (loaded,) = fleet.load(path, 1, max_model_len=None, num_kv_blocks=None)
    # The default: max_num_seqs=4 sequences of the model's 512 tokens, of which the last is never computed.
    assert (loaded["max_model_len"], loaded["num_kv_blocks"]) == (512, 4 * 64)


def test_unload_returns_the_memory(fleet, tmp_path):
    _, model = tiny_models.build("mixtral", 0, hidden_size=512, intermediate_size=1024, num_hidden_layers=4)
    path = tiny_models.save(model, tmp_path)
    size = sum(p.numel() * 4 for p in model.parameters())
    assert size > 190 * 10**6
    fleet.configure(1)
    pss = lambda: fleet.all("stats", [{}])[0]["memory"]["pss"]  # noqa: E731
    fleet.load(path, 1)
    fleet.all("unload", [{}])
    before = pss()  # libraries that the first load brought in are there from here on
    fleet.load(path, 1)
    loaded = pss()
    fleet.all("unload", [{}])
    after = pss()
    print(f"weights {size >> 20} MiB; pss unloaded {before >> 20}, loaded {loaded >> 20}, unloaded {after >> 20} MiB")
    assert loaded - before > 0.9 * size
    assert after - before < 0.1 * size


def test_a_step_that_fails_on_one_rank_ends_it_on_the_other_and_both_serve_again(fleet, tiny):
    path, _ = tiny
    fleet.configure(2)
    fleet.load(path, 2)
    began = time.monotonic()
    good = fleet.plan(0, new=(request(2, (1, 2)),), prefill={2: 1})
    mistaken, waiting = fleet.step([fleet.plan(0, prefill={9: 1}), good])
    assert time.monotonic() - began < soon(15), "well before step_timeout_s"
    assert isinstance(mistaken, ProtocolError)
    assert "step 0" in str(mistaken)
    assert "request 9" in str(mistaken)
    assert isinstance(waiting, EngineDeadError)
    (late,) = fleet.step([fleet.plan(1)])
    assert isinstance(late, EngineDeadError)
    fleet.configure(2)
    fleet.load(path, 2)
    results = fleet.step([fleet.plan(0), fleet.plan(0, new=(request(2, (1, 2)),), prefill={2: 1})])
    assert [r.rids.tolist() for r in results] == [[], [2]]


def test_what_was_imported_is_never_collected():
    """A full collection in the middle of a step would go through all of torch and transformers."""
    program = (
        "import gc; gc.disable(); from epruntime.worker.main import prepare_process; prepare_process(1); "
        "print(gc.get_freeze_count(), len(gc.get_objects()), gc.isenabled())"
    )
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    frozen, left, enabled = told.stdout.split()
    assert (int(frozen) > 100_000, int(left) < 5_000, enabled) == (True, True, "True")


def test_interrupts_are_the_coordinators_and_a_termination_is_prompt(fleet, tiny):
    """Last: it costs the fleet a rank."""
    path, _ = tiny
    fleet.configure(2)
    fleet.load(path, 2)
    for rank in fleet.pool.ranks:
        os.kill(rank.info.pid, signal.SIGINT)
    assert [s["type"] for s in fleet.all("stats", [{}, {}])] == ["stats", "stats"]

    async def terminate_while_waiting_in_an_exchange() -> BaseException | None:
        rank = fleet.pool.ranks[1]
        call = rank.call("plan", PATIENCE_S, plan=fleet.plan(0, new=(request(2, (1, 2)),), prefill={2: 1}).to_wire())
        await asyncio.sleep(1.0)  # rank 0 gets no plan, so that rank 1 waits for it in the first layer
        assert not call.done()
        os.kill(rank.info.pid, signal.SIGTERM)
        await asyncio.wait([call], timeout=PATIENCE_S)
        return call.exception()

    error = fleet.run(terminate_while_waiting_in_an_exchange())
    assert isinstance(error, RankLostError)
    assert "SIGTERM" in str(error)
