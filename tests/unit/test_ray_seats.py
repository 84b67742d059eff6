"""Placement arithmetic, on paper."""

from __future__ import annotations

import random

import pytest

from epruntime.launchers.ray_seats import (
    Bundle,
    Node,
    bundles_for_ranks,
    local_device_index,
    no_room_in_group_text,
    no_room_text,
    seats_in_node_order,
    threads_that_fit,
)


@pytest.mark.parametrize(
    ("free", "num_ranks", "threads"),
    [
        ([2], 2, 1),
        ([8], 2, 4),
        ([8], 3, 2),  # 3 x 3 = 9 > 8
        ([8, 4], 3, 4),  # two on the first, one on the second
        ([8, 4], 2, 4),  # 5 would fit once only
        ([16, 1], 2, 8),
        ([1, 1], 4, 1),  # does not fit at all: placement will say so
        ([], 1, 1),
        ([2.5], 1, 2),
    ],
)
def test_threads_that_fit(free, num_ranks, threads):
    assert threads_that_fit(free, num_ranks) == threads


def node(name: str, address: str) -> Node:
    return Node(node_id=name, host=f"host-{name}", address=address, total={"CPU": 4.0})


def test_ranks_of_one_node_are_neighbours_and_the_coordinators_come_first():
    nodes = [node("a", "10.0.0.10"), node("b", "10.0.0.9"), node("c", "10.0.0.2")]
    bundles = {0: "a", 1: "b", 2: "c", 3: "a", 4: "b"}
    items = list(bundles.items())
    for _ in range(5):
        random.shuffle(items)
        placed = seats_in_node_order(items, nodes, first_node="a", threads=3)
        assert [(p.seat.slot, p.bundle, p.seat.host, p.seat.local_rank) for p in placed] == [
            (0, 0, "host-a", 0),
            (1, 3, "host-a", 1),  # the coordinator's
            (2, 2, "host-c", 0),  # .2
            (3, 1, "host-b", 0),
            (4, 4, "host-b", 1),  # .9, and .10 would have been last
        ]
        assert {p.seat.threads for p in placed} == {3}


def test_no_room_says_what_was_asked_and_what_there_is():
    nodes = [
        Node(node_id="a", host="big", address="10.0.0.1", total={"CPU": 8.0}, free={"CPU": 1.0}),
        Node(node_id="b", host="full", address="10.0.0.2", total={"CPU": 8.0}, free={}),
        Node(node_id="c", host="new", address="10.0.0.3", total={}, free=None),
    ]
    text = no_room_text(4, {"CPU": 2.0}, nodes)
    for part in (
        "asked for 4 ranks of 2 CPU each",
        "big (10.0.0.1): CPU 1 free of 8",
        "full (10.0.0.2): CPU 0 free of 8",
        "new (10.0.0.3): CPU ? free of 0",
        "expert_parallel_size",
        "start_timeout_s",
    ):
        assert part in text
    assert "no alive node" in no_room_text(1, {"GPU": 1.0}, [])


@pytest.mark.parametrize(
    ("free", "num_ranks", "need", "places"),
    [
        ([4, 4], 2, 1, [0, 1]),  # one for each, not both in the first
        ([4, 4], 3, 1, [0, 0, 1]),
        ([4, 4], 2, 4, [0, 1]),
        ([0, 4, 4], 2, 4, [1, 2]),  # the first is the caller's own
        ([9], 4, 2, [0, 0, 0, 0]),
        ([1, 5, 2], 4, 1, [0, 1, 1, 2]),  # a second one where there is room for it
        ([1.5, 1.5], 3, 1, []),
        ([], 1, 1, []),
    ],
)
def test_ranks_go_round_the_bundles(free, num_ranks, need, places):
    assert bundles_for_ranks([{"CPU": float(cpus)} for cpus in free], num_ranks, {"CPU": float(need)}) == places


def test_a_bundle_without_the_resource_has_no_room():
    assert bundles_for_ranks([{"CPU": 8.0}, {"GPU": 1.0}], 1, {"GPU": 1.0}) == [1]
    assert bundles_for_ranks([{"CPU": 8.0}], 1, {"GPU": 1.0}) == []


@pytest.mark.parametrize(
    ("gpu_id", "visible", "index"),
    [
        ("3", None, 3),
        ("3", "", 3),
        ("4", "4,5", 0),
        ("5", "4,5", 1),
        ("0", "2, 1, 0", 2),
        ("GPU-ab", "GPU-cd,GPU-ab", 1),
        ("MIG-7", "MIG-7", 0),
    ],
)
def test_device_index_counts_among_the_visible(gpu_id, visible, index):
    assert local_device_index(gpu_id, visible) == index


@pytest.mark.parametrize(("gpu_id", "visible"), [("0", "4,5"), ("GPU-ab", None)])
def test_a_gpu_that_the_process_cannot_see_is_an_error(gpu_id, visible):
    with pytest.raises(ValueError, match="Ray gave GPU"):
        local_device_index(gpu_id, visible)


def test_no_room_in_a_group_says_what_was_asked_and_what_there_is():
    bundles = [
        Bundle(index=0, total={"CPU": 4.0}, free={"CPU": 1.5}),
        Bundle(index=2, total={"GPU": 1.0}, free={"GPU": 1.0}),
    ]
    text = no_room_in_group_text(3, {"CPU": 2.0}, bundles, "abc")
    for part in (
        "placement group abc",
        "3 ranks of 2 CPU each",
        "bundle 0: CPU 1.5 free of 4",
        "bundle 2: CPU 0 free of 0",
        "expert_parallel_size",
    ):
        assert part in text
