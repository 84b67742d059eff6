"""Placement, row plans and rounds: expected values on paper, properties by hypothesis."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from epruntime.errors import ConfigError
from epruntime.moe.placement import Placement, contiguous, placement_for
from epruntime.moe.rounds import split_rounds
from epruntime.moe.rows import PlacementTables, RowFormat, pairs_by_peer, plan_rows


def test_contiguous_gives_the_first_ranks_one_more() -> None:
    placement = contiguous(7, 3)
    assert [placement.local_logical(r) for r in range(3)] == [(0, 1, 2), (3, 4), (5, 6)]
    assert placement.physical_to_slot == (0, 1, 2, 0, 1, 0, 1)


def test_more_ranks_than_experts_leaves_ranks_empty() -> None:
    placement = contiguous(2, 4, version=3)
    assert [placement.local_logical(r) for r in range(4)] == [(0,), (1,), (), ()]
    assert placement.version == 3


@pytest.mark.parametrize(
    ("experts", "ranks", "strategy", "redundant", "local"),
    [
        (7, 3, "linear", 0, [(0, 1, 2), (3, 4), (5, 6)]),
        (7, 3, "round_robin", 0, [(0, 3, 6), (1, 4), (2, 5)]),
        (4, 2, "linear", 1, [(0, 1, 2), (2, 3)]),
        (4, 2, "linear", 2, [(0, 1, 2), (2, 3, 0)]),
        (4, 2, "round_robin", 2, [(0, 2, 1), (1, 3, 0)]),
        (7, 3, "linear", 2, [(0, 1, 2), (3, 4, 0), (5, 6, 1)]),
        (2, 4, "linear", 0, [(0,), (1,), (), ()]),
        (2, 4, "round_robin", 0, [(0,), (1,), (), ()]),
        (2, 4, "linear", 5, [(0, 1), (1, 0), (0, 1), (1,)]),  # more than there are experts
        (3, 1, "linear", 4, [(0, 1, 2, 0, 1, 2, 0)]),  # one rank: slots of the same expert
    ],
)
def test_placements_on_paper(
    experts: int, ranks: int, strategy: str, redundant: int, local: list[tuple[int, ...]]
) -> None:
    placement = placement_for(experts, ranks, strategy, redundant)
    assert [placement.local_logical(rank) for rank in range(ranks)] == local
    # the first copy of each is where it is without redundant ones
    plain = placement_for(experts, ranks, strategy)
    for rank in range(ranks):
        held = zip(local[rank], placement.replica_slots(rank), strict=True)
        assert tuple(expert for expert, replica in held if not replica) == plain.local_logical(rank)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_placements_are_even_and_complete(data: st.DataObject) -> None:
    experts, ranks = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 8))
    strategy = data.draw(st.sampled_from(["linear", "round_robin"]))
    redundant = data.draw(st.integers(0, min(experts * (4 * ranks - 1), 60)))
    placement = placement_for(experts, ranks, strategy, redundant)
    local = [placement.local_logical(rank) for rank in range(ranks)]
    assert sum(map(len, local)) == experts + redundant
    assert max(map(len, local)) - min(map(len, local)) <= 1
    assert {expert for ids in local for expert in ids} == set(range(experts))
    for ids in local:
        assert len(set(ids)) in (len(ids), experts), "an expert twice on a rank that lacks another"
    for physical in placement.replicas:
        owners = [placement.physical_to_rank[p] for p in physical]
        if redundant <= experts * (ranks - 1):
            assert len(set(owners)) == len(owners)
    # one more redundant expert moves nothing
    if redundant:
        fewer = placement_for(experts, ranks, strategy, redundant - 1)
        assert placement.physical_to_logical[:-1] == fewer.physical_to_logical
        assert placement.physical_to_rank[:-1] == fewer.physical_to_rank
        assert placement.fingerprint != fewer.fingerprint


def test_the_fingerprint_tells_placements_apart() -> None:
    everything = {
        placement_for(*key).fingerprint
        for key in [(6, 2), (6, 3), (7, 2), (6, 2, "round_robin"), (6, 2, "linear", 1), (6, 2, "round_robin", 1)]
    }
    assert len(everything) == 6
    assert placement_for(6, 2).fingerprint == contiguous(6, 2).fingerprint


@pytest.mark.parametrize(
    ("redundant", "message"),
    [
        (-1, "num_redundant_experts=-1 for 4 experts per layer on 3 ranks: must be in 0..44"),
        (45, "num_redundant_experts=45 .* must be in 0..44, and 8 put every expert on every rank"),
    ],
)
def test_copies_without_sense_are_refused(redundant: int, message: str) -> None:
    assert len(placement_for(4, 3, "linear", 44).physical_to_rank) == 48
    with pytest.raises(ConfigError, match=message):
        placement_for(4, 3, "linear", redundant)
    with pytest.raises(ConfigError, match="expert_placement='random': must be linear or round_robin"):
        placement_for(4, 3, "random")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"physical_to_logical": (0, 1, 1)}, r"logical experts \[2\] are on no rank"),
        ({"physical_to_logical": (0, 1, 3)}, r"physical expert 2 holds logical 3, must be in 0\.\.2"),
        ({"physical_to_rank": (0, 1, 2)}, r"physical expert 2 is on rank 2, must be in 0\.\.1"),
        ({"physical_to_rank": (0, 1)}, "3 logical ids for 2 ranks"),
    ],
)
def test_an_impossible_placement_is_refused(change: dict[str, tuple[int, ...]], message: str) -> None:
    good = {"physical_to_logical": (0, 1, 2), "physical_to_rank": (0, 1, 1)}
    Placement(version=0, num_logical=3, world_size=2, **good)
    with pytest.raises(ValueError, match=message):
        Placement(version=0, num_logical=3, world_size=2, **{**good, **change})


def test_replicas_are_dealt_to_token_rows_in_turn() -> None:
    # Logical 0 on ranks 0, 1 and 2; logical 1 on rank 1 only, where it sits before the replica of 0.
    placement = Placement(
        version=0, num_logical=2, world_size=3, physical_to_logical=(0, 1, 0, 0), physical_to_rank=(0, 1, 1, 2)
    )
    assert placement.replicas == ((0, 2, 3), (1,))
    rank, slot = PlacementTables(placement).addresses(torch.tensor([[0, 1], [0, -1], [0, 0], [0, 1]]))
    assert rank.tolist() == [[0, 1], [1, 3], [2, 2], [0, 1]]  # 3 = the world size: not routed
    assert slot.tolist() == [[0, 0], [1, -1], [0, 0], [0, 0]]
    rank, slot = PlacementTables(placement).addresses(torch.tensor([[0, 1], [1, 0], [0, 0]]), first=5)
    assert rank.tolist() == [[2, 1], [1, 0], [1, 1]]
    assert slot.tolist() == [[0, 0], [0, 0], [1, 1]]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 4), st.integers(1, 5), st.integers(0, 9), st.integers(1, 7))
def test_every_replica_gets_its_share(ranks: int, experts: int, redundant: int, rows: int) -> None:
    """All tokens choose one expert, a few per rank and step: over ranks and steps all replicas get equally many."""
    placement = placement_for(experts, ranks, "linear", min(redundant, experts * (4 * ranks - 1)))
    tables = PlacementTables(placement)
    for expert, copies in enumerate(placement.replicas):
        ids = torch.full((rows, 1), expert)
        got = dict.fromkeys(((placement.physical_to_rank[p], placement.physical_to_slot[p]) for p in copies), 0)
        for step in range(tables.period):
            for source in range(ranks):
                rank, slot = tables.addresses(ids, first=source + step)
                for address in zip(rank[:, 0].tolist(), slot[:, 0].tolist(), strict=True):
                    got[address] += 1
        assert len(set(got.values())) == 1


def test_row_plan_on_paper() -> None:
    # Experts 0, 1 on rank 0; 2, 3 on rank 1.
    tables = PlacementTables(contiguous(4, 2))
    plan = plan_rows(torch.tensor([[0, 3, 1], [2, 2, 3], [-1, -1, -1], [-1, 1, 1]]), tables)
    assert plan.rows_R.tolist() == [2, 2]
    assert plan.token_N.tolist() == [0, 3, 0, 1]
    assert plan.slots_NK.tolist() == [[0, -1, 1], [-1, 1, 1], [-1, 1, -1], [0, 0, 1]]
    # Results in row order, then k: token 0 has 0 and 1, token 3 has 2 and 3, then rank 1's.
    assert plan.index_TK(5).tolist() == [[0, 4, 1], [5, 6, 7], [-1, -1, -1], [-1, 2, 3], [-1, -1, -1]]
    assert pairs_by_peer(plan.slots_NK, [2, 2]) == [4, 4]
    assert pairs_by_peer(plan.slots_NK, [0, 1, 3, 0]) == [0, 2, 6, 0]


def test_rounds_on_paper() -> None:
    rows = torch.tensor([[3, 1], [4, 0]])  # rank 0 receives 3 of its own, then 4 of rank 1
    assert split_rounds(rows, 7).tolist() == [rows.tolist()]
    assert split_rounds(rows, 4).tolist() == [[[3, 1], [1, 0]], [[0, 0], [3, 0]]]
    assert split_rounds(torch.zeros(2, 2, dtype=torch.int64), 1).shape == (0, 2, 2)


@settings(max_examples=200, deadline=None)
@given(
    st.integers(1, 5).flatmap(
        lambda n: st.lists(st.lists(st.integers(0, 20), min_size=n, max_size=n), min_size=n, max_size=n)
    ),
    st.integers(1, 30),
)
def test_rounds_keep_every_row_and_the_budget(matrix: list[list[int]], budget: int) -> None:
    rows = torch.tensor(matrix)
    rounds = split_rounds(rows, budget)
    assert torch.equal(rounds.sum(0), rows)
    assert bool((rounds >= 0).all())
    incoming = rounds.sum(1)
    assert bool((incoming <= budget).all())
    assert len(rounds) == -(-max(sum(row[d] for row in matrix) for d in range(len(matrix))) // budget)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_row_plan_names_every_choice_once(data: st.DataObject) -> None:
    world, experts = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 6))
    physical = [*range(experts), *data.draw(st.lists(st.integers(0, experts - 1), max_size=4))]
    owners = data.draw(st.lists(st.integers(0, world - 1), min_size=len(physical), max_size=len(physical)))
    placement = Placement(
        version=0,
        num_logical=experts,
        world_size=world,
        physical_to_logical=tuple(physical),
        physical_to_rank=tuple(owners),
    )
    tokens, top_k = data.draw(st.integers(0, 9)), data.draw(st.integers(1, 5))
    ids = torch.tensor(
        [[data.draw(st.integers(-1, experts - 1)) for _ in range(top_k)] for _ in range(tokens)], dtype=torch.int64
    ).reshape(tokens, top_k)
    plan = plan_rows(ids, PlacementTables(placement))
    destination = [r for r, n in enumerate(plan.rows_R.tolist()) for _ in range(n)]
    assert len({*zip(destination, plan.token_N.tolist(), strict=True)}) == len(destination)  # one row per pair
    results = []  # what comes back: the logical expert of each (row, slot), and whose it was
    for rank, token, slots in zip(destination, plan.token_N.tolist(), plan.slots_NK.tolist(), strict=True):
        assert max(slots) >= 0
        results += [(token, k, placement.local_logical(rank)[s]) for k, s in enumerate(slots) if s >= 0]
    index = plan.index_TK(tokens + 2)
    assert index[tokens:].eq(-1).all()
    for t in range(tokens):
        for k in range(top_k):
            at = int(index[t, k])
            assert (at < 0) == (int(ids[t, k]) < 0)
            assert at < 0 or results[at] == (t, k, int(ids[t, k]))


@pytest.mark.parametrize(
    ("hidden", "top_k", "dtype", "row_bytes"),
    [(4, 1, torch.float32, 32), (7, 3, torch.bfloat16, 32), (1024, 8, torch.bfloat16, 2080), (1, 1, torch.float32, 16)],
)
def test_row_format(hidden: int, top_k: int, dtype: torch.dtype, row_bytes: int) -> None:
    fmt = RowFormat(hidden_size=hidden, top_k=top_k, dtype=dtype)
    assert fmt.row_bytes == row_bytes
    x = torch.randn(6, hidden).to(dtype)
    plan = plan_rows(torch.randint(-1, 4, (6, top_k)), PlacementTables(contiguous(4, 2)))
    message = fmt.pack(x, plan)
    assert message.shape == (len(plan.token_N), row_bytes)
    assert torch.equal(fmt.hidden_of(message), x[plan.token_N])
    assert torch.equal(fmt.slots_of(message), plan.slots_NK)
    used = message.clone()
    fmt.hidden_of(used).zero_()
    fmt.slots_of(used).zero_()
    assert not used.any()  # nothing but the two parts and zeros goes on the wire
