"""Payloads: every wrong delivery is found and told from every other. Ranks are threads; expected bytes: arithmetic."""

from __future__ import annotations

import time
from functools import partial

import pytest
import torch
from preflight_facts import rank

from epruntime.comm.local import LocalTransport
from epruntime.comm.progress import Stamps
from epruntime.comm.transport import GroupInfo, Transport
from epruntime.preflight.checks_exchange import check_mismatches
from epruntime.preflight.exchange import check_exchange, time_pairs
from epruntime.preflight.pairs import PairTime, Probe, schedule
from epruntime.preflight.payload import Mismatch, inspect_counts, inspect_rows, outgoing, payload, trials
from epruntime.testing.faulty_transport import FlippedBit, SlowLink, WrongCounts, WrongOrder
from epruntime.testing.memory_transport import run_threads
from epruntime.testing.patience import soon


def _check(transport: Transport) -> list[Mismatch]:
    return check_exchange(transport, Stamps(), seed=7)


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_trials_are_uneven_with_empty_pairs_and_bounded(world_size: int) -> None:
    found = {trial.name: trial for trial in trials(world_size)}
    sizes = [rows for row in found["uneven"].counts for rows in row]
    assert world_size == 1 or len(set(sizes)) > 1
    assert world_size == 1 or 0 in sizes
    assert all(rows == 0 for row in found["nothing"].counts for rows in row)
    for trial in found.values():
        for counts in trial.counts:
            assert sum(counts) * trial.row_bytes < 2**20


def test_payloads_of_all_pairs_differ_and_rows_do_not_depend_on_their_number() -> None:
    pairs = [(s, d) for s in range(5) for d in range(5)]
    made = [bytes(payload(s, d, num_rows=2, row_bytes=40).flatten().tolist()) for s, d in pairs]
    assert len(set(made)) == len(pairs)
    body = {data[8:40] for data in made}  # also without what the row says of itself
    assert len(body) == len(pairs)
    assert torch.equal(payload(1, 2, num_rows=9, row_bytes=40)[:2], payload(1, 2, num_rows=2, row_bytes=40))
    assert made[7][:8] == (1).to_bytes(2, "little") + (2).to_bytes(2, "little") + (0).to_bytes(4, "little")
    assert not torch.equal(payload(1, 2, num_rows=1, row_bytes=40, seed=1), payload(1, 2, num_rows=1, row_bytes=40))


def test_bytes_of_payloads_are_spread_evenly() -> None:
    counts = torch.bincount(payload(3, 1, num_rows=64, row_bytes=4104)[:, 8:].flatten().long(), minlength=256)
    assert counts.min() > 800  # 262144 bytes: 1024 of each value, 32 being one standard deviation
    assert counts.max() < 1250


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_a_true_transport_delivers_everything(world_size: int) -> None:
    assert run_threads(world_size, _check) == [[]] * world_size


def test_one_rank_alone() -> None:
    assert _check(LocalTransport(GroupInfo(rank=0, world_size=1))) == []


@pytest.mark.parametrize("world_size", [2, 4])
def test_swapped_sources_are_found_and_named(world_size: int) -> None:
    for here, found in enumerate(run_threads(world_size, _check, wrap=WrongOrder)):
        assert {mismatch.kind for mismatch in found} == {"order"}
        assert all(mismatch.destination == here for mismatch in found)
        last = world_size - 1
        large = next(m for m in found if m.source == 0 and "'large'" in m.detail)
        assert f"is row 0 of what rank {last} sent to rank {here}" in large.detail


def test_a_flipped_bit_is_found_with_its_place() -> None:
    for here, found in enumerate(run_threads(2, _check, wrap=FlippedBit)):
        (mismatch,) = found
        assert (mismatch.kind, mismatch.source, mismatch.destination) == ("bits", 1, here)
        rows = next(trial for trial in trials(2) if trial.name == "large").counts[1][here]
        assert f"1 of {rows} rows: row {rows - 1} differs in 1 of 4099 bytes, the first at 2049" in mismatch.detail


def test_a_flipped_bit_in_the_head_of_a_row_is_no_other_rows() -> None:
    trial = trials(2)[0]
    rows_NB = payload(0, 1, num_rows=trial.counts[0][1], row_bytes=trial.row_bytes)
    rows_NB = torch.cat([rows_NB, payload(1, 1, num_rows=trial.counts[1][1], row_bytes=trial.row_bytes)])
    assert inspect_rows(trial, rows_NB, 1) == []
    rows_NB[0, 0] ^= 1  # now it says that rank 1 sent it
    assert [mismatch.kind for mismatch in inspect_rows(trial, rows_NB, 1)] == ["bits"]


def test_rows_out_of_order_within_a_source() -> None:
    trial = trials(3)[-1]
    own = torch.cat([payload(s, 0, num_rows=trial.counts[s][0], row_bytes=trial.row_bytes) for s in range(3)])
    own[[0, 1]] = own[[1, 0]]
    (mismatch,) = inspect_rows(trial, own, 0)
    assert (mismatch.kind, mismatch.source) == ("order", 0)
    assert "row 0 is row 1 of what rank 0 sent to rank 0" in mismatch.detail


def test_rows_of_an_earlier_run_do_not_pass() -> None:
    trial = trials(2)[-1]
    old = torch.cat([payload(s, 0, num_rows=trial.counts[s][0], row_bytes=trial.row_bytes, seed=1) for s in (0, 1)])
    assert [mismatch.kind for mismatch in inspect_rows(trial, old, 0, seed=2)] == ["bits", "bits"]


def test_too_few_rows() -> None:
    trial = trials(2)[-1]
    (mismatch,) = inspect_rows(trial, outgoing(trial, 0)[:1], 0)
    assert mismatch.kind == "order"
    assert "shape (1, 4099)" in mismatch.detail


def test_wrong_counts_are_found_and_named() -> None:
    found = run_threads(2, _check, wrap=WrongCounts)
    assert {mismatch.kind for mismatches in found for mismatch in mismatches} == {"counts"}
    trial = trials(2)[0]
    counts_RR = torch.tensor(trial.counts)
    assert inspect_counts(trial, counts_RR, 0) == []
    counts_RR[1, 0] += 1
    (mismatch,) = inspect_counts(trial, counts_RR, 0)
    assert mismatch.source == 1
    assert f"in place of {list(trial.counts[1])}" in mismatch.detail


def test_findings_of_mismatches_name_both_ends() -> None:
    ranks = [rank(0, "a"), rank(1, "b"), rank(2, "c")]
    mismatches = [
        Mismatch(source=source, destination=2, kind="order", detail=f"detail {source}") for source in (0, 1)
    ] + [Mismatch(source=0, destination=1, kind="bits", detail="byte")]
    order, bits = check_mismatches(mismatches, ranks)
    assert (order.id, order.slots, order.hosts) == ("exchange-order", (2, 0, 1), ("c", "a", "b"))
    assert order.found == "rank 2 received from rank 0: detail 0 (and 1 more)"
    assert (bits.id, bits.slots) == ("exchange-bits", (1, 0))


def _times(transport: Transport, rounds: list[tuple[Probe, ...]]) -> list[PairTime]:
    return time_pairs(transport, Stamps(), rounds)


def test_every_rank_makes_the_same_calls_and_every_pair_is_timed_both_ways() -> None:
    rounds = schedule(["a", "b", "a", "b"])
    found = [t for times in run_threads(4, partial(_times, rounds=rounds)) for t in times]
    assert sorted((t.source, t.destination) for t in found) == [(s, d) for s in range(4) for d in range(4) if s != d]
    assert all(t.latency_s > 0 and t.bytes_per_s > 0 for t in found)


def test_a_slow_direction_shows_in_its_times() -> None:
    """0.5 s per MiB from rank 1: a probe of 256 KiB takes at least 125 ms, so at most 2.1 MB/s."""
    rounds = [(Probe(first=0, second=1, num_bytes=256 * 1024),)]
    began = time.monotonic()
    slow = partial(SlowLink, source=1, bytes_per_s=2 * 2**20)
    (there, back), _ = run_threads(2, partial(_times, rounds=rounds), wrap=slow)
    assert time.monotonic() - began < soon(5)
    assert (there.source, back.source) == (0, 1)
    assert back.bytes_per_s < 2 * 2 * 2**20  # half of what a probe took is kept for it at least
    assert there.bytes_per_s > 2 * back.bytes_per_s


def test_a_slow_answer_shows_as_latency() -> None:
    slow = partial(SlowLink, source=1, delay_s=0.02)
    (there, _), _ = run_threads(2, partial(_times, rounds=[(Probe(first=0, second=1),)]), wrap=slow)
    assert 0.01 <= there.least_latency_s <= there.latency_s < soon(0.1)


def test_waits_are_counted_alike_on_all_ranks() -> None:
    """So that a rank that stands still is told from those that wait for it (engine/blame.py)."""

    def sequence(transport: Transport) -> int:
        stamps = Stamps()
        check_exchange(transport, stamps)
        time_pairs(transport, stamps, schedule(["a", "a", "b"]))
        return stamps.read().sequence

    counts = run_threads(3, sequence)
    assert len(set(counts)) == 1
    assert counts[0] > 0
