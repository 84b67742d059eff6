"""Every transport x experts backend x shape of work against an fp64 loop; and the same bits wherever the experts are.

All cases of a world size run in one set of rank processes (starting them costs more than the cases do); each case has
its own test, which looks at what its ranks returned.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from epruntime.comm.local import LocalTransport
from epruntime.comm.select import make_transport
from epruntime.comm.transport import GroupInfo, Transport
from epruntime.moe.experts import BACKENDS
from epruntime.moe.placement import Placement, contiguous, placement_for
from epruntime.moe.runtime import MoERuntime
from epruntime.moe.stats import MoEStats
from epruntime.moe.types import ExpertWeights, StepContext
from epruntime.testing.experts import dense_moe, random_experts, take_experts
from epruntime.testing.ragged import strict_ops
from epruntime.testing.ranks import run_ranks

#: Largest difference from fp64, relative to the largest output: a few ulps of fp32 over dot products of 24 and 40.
FP32_BOUND = 1e-6
#: bf16 rounds x W, the activation and the output: 2^-8 each.
BF16_BOUND = 1e-2
HIDDEN, INNER = 24, 40


@dataclass(frozen=True, kw_only=True)
class Case:
    """Tokens of the whole group, how they lie on the ranks, and how experts are placed."""

    name: str
    num_experts: int = 8
    top_k: int = 2
    tokens: int = 23
    split: str = "uneven"
    routing: str = "random"
    placement: str = "contiguous"
    budget: int = 8192
    dtype: torch.dtype = torch.float32
    layout: tuple[tuple[str, Any], ...] = ()
    fault: str = ""

    @functools.cached_property
    def experts(self) -> ExpertWeights:
        return random_experts(self.num_experts, HIDDEN, INNER, dtype=self.dtype, seed=5, **dict(self.layout))

    @functools.cached_property
    def work(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        g = torch.Generator().manual_seed(11)
        x = torch.randn(self.tokens, HIDDEN, generator=g).to(self.dtype)
        shape = (self.tokens, self.top_k)
        ids = torch.rand(self.tokens, self.num_experts, generator=g).argsort(1)[:, : self.top_k]
        if self.routing == "hot":
            ids[:, 0] = self.num_experts - 1
            ids[:, 1:] = torch.arange(self.top_k - 1)
        elif self.routing == "holes":
            ids[torch.rand(shape, generator=g) < 0.4] = -1
            ids[2] = -1
        elif self.routing == "duplicates":
            ids[:, 1] = ids[:, 0]
        elif self.routing == "nowhere":
            ids[:] = -1
        return x, ids, torch.rand(shape, generator=g) * 2 - 0.5

    def shares(self, world_size: int) -> list[int]:
        """Tokens per rank, in rank order."""
        if world_size == 1:
            return [self.tokens]
        if self.split == "idle":  # all on the last rank
            return [0] * (world_size - 1) + [self.tokens]
        first = [self.tokens // (2 * world_size)] * (world_size - 1)
        return [*first, self.tokens - sum(first)]

    def place(self, world_size: int) -> Placement:
        if self.placement == "contiguous":
            return contiguous(self.num_experts, world_size, version=1)
        if self.placement.startswith(("linear", "round_robin")):  # "linear+3": three redundant experts
            strategy, _, redundant = self.placement.partition("+")
            return placement_for(self.num_experts, world_size, strategy, int(redundant or 0))
        g = torch.Generator().manual_seed(17)
        physical = torch.randperm(self.num_experts, generator=g).tolist()
        if self.placement == "replicas":  # experts 0..2 twice, expert 0 three times
            physical += [0, 1, 2, 0]
        owners = [i * i % world_size for i in range(len(physical))]
        return Placement(
            version=2,
            num_logical=self.num_experts,
            world_size=world_size,
            physical_to_logical=tuple(physical),
            physical_to_rank=tuple(owners),
        )


CASES = [
    Case(name="uneven"),
    Case(name="one_token", tokens=1),
    Case(name="zero_tokens_everywhere", tokens=0),
    Case(name="idle_rank", split="idle", tokens=9),
    Case(name="experts_not_divisible", num_experts=7, top_k=3),
    Case(name="fewer_experts_than_ranks", num_experts=2, top_k=2),
    Case(name="one_expert", num_experts=1, top_k=1),
    Case(name="k_1", top_k=1),
    Case(name="k_all", num_experts=5, top_k=5),
    Case(name="holes", routing="holes", top_k=3),
    Case(name="nothing_routed", routing="nowhere"),
    Case(name="hot_expert", routing="hot", top_k=3, tokens=70),
    Case(name="same_expert_twice", routing="duplicates", top_k=3),
    Case(name="permuted", placement="permuted"),
    Case(name="replicas", placement="replicas", top_k=3),
    Case(name="round_robin", num_experts=7, placement="round_robin"),
    Case(name="redundant", num_experts=7, placement="linear+3", routing="holes", top_k=3, tokens=40),
    Case(name="redundant_round_robin", num_experts=3, placement="round_robin+4", top_k=3, budget=5),
    Case(name="redundant_hot", placement="linear+5", routing="hot", top_k=3, tokens=70),
    Case(name="redundant_same_expert_twice", placement="linear+6", routing="duplicates", top_k=3, split="idle"),
    Case(name="redundant_one_expert", num_experts=1, top_k=1, placement="round_robin+3"),
    Case(name="rounds", budget=3),
    Case(name="rounds_of_one", budget=1, tokens=7, top_k=4, placement="replicas"),
    Case(name="rounds_idle_rank", budget=4, split="idle", routing="hot"),
    Case(
        name="biased",
        placement="permuted",
        layout=(("bias", True), ("transposed", True), ("activation", "interleaved")),
    ),
    Case(name="no_gate", layout=(("activation", "relu2"),)),
    Case(name="post_norm", layout=(("post", True),)),
    Case(name="bf16", dtype=torch.bfloat16, budget=5, placement="replicas", top_k=4),
]
FAULTS = [Case(name=f"fault_{fault}", fault=fault) for fault in ("swapped_experts", "dropped_rank", "weights_twice")]
FAULTS.append(Case(name="fault_replica", fault="replica_of_another", placement="linear+4"))


@dataclass(frozen=True, kw_only=True)
class Outcome:
    y_TH: torch.Tensor
    padding_H: torch.Tensor
    rows_received_at_once: int
    stats: dict[str, Any]


def run_case(case: Case, group: GroupInfo, link: Transport, backend: str) -> Outcome:
    """One rank's part of a case: two layers, so that the second shows what the first left behind."""
    context, stats = StepContext(), MoEStats()
    runtime = MoERuntime(
        transport=link,
        placement_for=lambda _: case.place(group.world_size),
        backend=backend,
        strict=backend != "grouped_mm",
        budget_rows=case.budget,
        context=context,
        stats=stats,
    )
    local = list(runtime.local_experts(case.num_experts))
    if case.fault == "swapped_experts" and group.rank == 0:
        local[:2] = reversed(local[:2])
    if case.fault == "replica_of_another":
        replicas = runtime.placement(case.num_experts).replica_slots(group.rank)
        local = [(e + replica) % case.num_experts for e, replica in zip(local, replicas, strict=True)]
    weights = take_experts(case.experts, local)
    if case.fault == "dropped_rank" and group.rank == group.world_size - 1:
        weights = replace(weights, down_SHI=torch.zeros_like(weights.down_SHI))
    layers = [runtime.make_layer(i, case.num_experts, weights) for i in (3, 7)]
    biggest = 0
    inner = link.all_to_all_rows

    def watched(send_RB: torch.Tensor, send_counts: list[int], recv_counts: list[int]) -> Any:
        nonlocal biggest
        if send_RB.shape[1] != HIDDEN * case.dtype.itemsize:  # rows out; results back have no slots
            biggest = max(biggest, sum(recv_counts))
        return inner(send_RB, send_counts, recv_counts)

    link.all_to_all_rows = watched  # type: ignore[method-assign]
    shares = case.shares(group.world_size)
    mine = slice(sum(shares[: group.rank]), sum(shares[: group.rank + 1]))
    x, ids, factors = (part[mine] for part in case.work)
    # Padding rows hold what must not be looked at: NaN, and ids that look valid.
    x = torch.cat([x, torch.full((3, HIDDEN), torch.nan, dtype=x.dtype)])
    ids = torch.cat([ids, torch.zeros(3, case.top_k, dtype=ids.dtype)])
    factors = torch.cat([factors, torch.full((3, case.top_k), torch.nan)])
    context.num_tokens = shares[group.rank]
    outputs = []
    for layer in layers:
        y = layer.forward(x, ids, factors**2 if case.fault == "weights_twice" else factors)
        assert y.dtype == case.dtype
        assert y.shape == x.shape
        outputs.append(y)
    assert torch.equal(outputs[0], outputs[1])
    context.probe = True
    assert not layers[0].forward(x.nan_to_num(), ids, factors).any()
    del link.all_to_all_rows
    return Outcome(
        y_TH=outputs[0][:-3],
        padding_H=outputs[0][-3:],
        rows_received_at_once=biggest,
        stats=stats.snapshot()["layers"]["7"],
    )


def run_all(group: GroupInfo, transport: str, backends: list[str]) -> dict[tuple[str, str], Outcome]:
    link, cases = make_transport(transport, group), [(c, b) for b in backends for c in (*CASES, *FAULTS)]
    try:
        with strict_ops():
            return {(case.name, backend): run_case(case, group, link, backend) for case, backend in cases}
    finally:
        link.close()


@functools.cache
def outcomes_of(transport: str, world_size: int) -> list[dict[tuple[str, str], Outcome]]:
    """Per rank: (case, backend) -> what it returned."""
    if transport == "local":
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return [run_all(GroupInfo(rank=0, world_size=1), transport, list(BACKENDS))]
        finally:
            torch.set_num_threads(before)
    return run_ranks(world_size, run_all, transport, list(BACKENDS), timeout_s=120)


@functools.cache
def expected(case: Case) -> torch.Tensor:
    return dense_moe(*case.work, case.experts)


def error_of(case: Case, y_TH: torch.Tensor) -> float:
    """Largest difference from fp64, relative to the largest expected output."""
    want = expected(case)
    return float((y_TH.double() - want).abs().max() / want.abs().max()) if want.any() else float(y_TH.abs().sum())


TRANSPORTS = [("local", 1), ("gloo", 1), ("gloo", 2), ("gloo", 3)]


@pytest.mark.parametrize(("transport", "world_size"), TRANSPORTS)
@pytest.mark.parametrize("backend", list(BACKENDS))
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_layer_equals_fp64(transport: str, world_size: int, backend: str, case: Case) -> None:
    outcomes = [rank[case.name, backend] for rank in outcomes_of(transport, world_size)]
    assert [len(o.y_TH) for o in outcomes] == case.shares(world_size)
    y = torch.cat([o.y_TH for o in outcomes])
    assert error_of(case, y) < (BF16_BOUND if case.dtype is torch.bfloat16 else FP32_BOUND)
    assert not any(o.padding_H.any() for o in outcomes)
    assert all(o.rows_received_at_once <= case.budget for o in outcomes)
    if backend == "grouped_mm":  # a row's bits depend on its group there, which strict does not allow
        return
    # The same bits on one rank, with every expert there in order, in one round.
    plain = replace(case, placement="contiguous", budget=8192)
    group = GroupInfo(rank=0, world_size=1)
    with strict_ops():
        alone = run_case(plain, group, LocalTransport(group), backend)
    assert torch.equal(y, alone.y_TH)


@pytest.mark.parametrize(("transport", "world_size"), TRANSPORTS)
@pytest.mark.parametrize("case", FAULTS, ids=lambda case: case.name)
def test_faults_are_seen(transport: str, world_size: int, case: Case) -> None:
    """The comparison above can fail: these must."""
    y = torch.cat([rank[case.name, "reference"].y_TH for rank in outcomes_of(transport, world_size)])
    assert error_of(case, y) > 1000 * FP32_BOUND


def dealt(case: Case, ids: list[list[int]], world_size: int) -> list[tuple[int, int]]:
    """By rank: pairs that it computes, and those by other copies than the first, as docs/life_of_a_token.md says."""
    placement = case.place(world_size)
    loads, on_copies = [0] * world_size, [0] * world_size
    at = 0
    for source, share in enumerate(case.shares(world_size)):
        for row, chosen in enumerate(ids[at : at + share]):
            for expert in (e for e in chosen if e >= 0):
                physical = [p for p, logical in enumerate(placement.physical_to_logical) if logical == expert]
                copy = (row + source + 1) % len(physical)  # it is the layer's first step
                rank = placement.physical_to_rank[physical[copy]]
                loads[rank] += 1
                on_copies[rank] += copy > 0
        at += share
    return list(zip(loads, on_copies, strict=True))


@pytest.mark.parametrize(("transport", "world_size"), TRANSPORTS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_statistics(transport: str, world_size: int, case: Case) -> None:
    stats = [rank[case.name, "reference"].stats for rank in outcomes_of(transport, world_size)]
    _, ids, _ = case.work
    counts = torch.tensor([s["expert_tokens"] for s in stats]).sum(0)
    assert counts.tolist() == [int((ids == e).sum()) for e in range(case.num_experts)]
    assert sum(s["not_routed"] for s in stats) == int((ids == -1).sum())
    sent = sum(s["rows_sent"] for s in stats)
    assert sent == sum(s["rows_received"] for s in stats)
    assert len({s["rounds"] for s in stats}) == 1  # every rank alike
    most = max(s["rows_received"] for s in stats)
    assert stats[0]["rounds"] == -(-most // case.budget)
    if world_size == 1:
        assert sent == int((ids >= 0).any(1).sum())  # one row per token, however many choices
    pairs = int((ids >= 0).sum())
    assert sum(s["combine_bytes"] for s in stats) == pairs * HIDDEN * case.dtype.itemsize
    assert sum(s["pairs_received"] for s in stats) == pairs
    assert [(s["pairs_received"], s["replica_pairs"]) for s in stats] == dealt(case, ids.tolist(), world_size)
    assert all(s["steps"] == 1 and s["dispatch_s"] >= 0 and s["combine_s"] >= 0 for s in stats)
