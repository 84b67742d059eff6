"""Payloads that tell where they come from: each (source, destination) pair has its own, and each row says whose it is.

row = source u16, destination u16, row u32 (little-endian), then bytes that a hash makes of source, destination, index
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch

_HEAD = struct.Struct("<HHI")
MIN_ROW_BYTES = _HEAD.size
_MASK = 0x7FFF_FFFF


@dataclass(frozen=True, kw_only=True)
class Mismatch:
    """Rows that are not what their source sent.

    Attributes:
        source, destination: ranks of the exchange. kind: "counts", "order" or "bits". detail: in words, with places
            and values.
    """

    source: int
    destination: int
    kind: str
    detail: str


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One exchange. `counts[s][d]`: rows from rank s to rank d; row_bytes: of each."""

    name: str
    counts: tuple[tuple[int, ...], ...]
    row_bytes: int


def trials(world_size: int) -> tuple[Trial, ...]:
    """Exchanges that a transport must get right: uneven, with empty pairs, one receiver, none at all, and large."""
    ranks = range(world_size)

    def counts(rows: object) -> tuple[tuple[int, ...], ...]:
        assert callable(rows)
        return tuple(tuple(int(rows(s, d)) for d in ranks) for s in ranks)

    large = max(1, 128 // world_size)
    return (
        Trial(name="uneven", counts=counts(lambda s, d: (3 * s + 5 * d + 1) % 4), row_bytes=24),
        Trial(name="one receiver", counts=counts(lambda s, d: (s + 1) * (d == world_size - 1)), row_bytes=137),
        Trial(name="nothing", counts=counts(lambda s, d: 0), row_bytes=64),
        Trial(name="large", counts=counts(lambda s, d: large + (s + 2 * d) % 3), row_bytes=4099),
    )


def payload(source: int, destination: int, *, num_rows: int, row_bytes: int, seed: int = 0) -> torch.Tensor:
    """uint8 [num_rows, row_bytes]: what `source` sends to `destination`. Row r is the same whatever `num_rows` is."""
    assert row_bytes >= MIN_ROW_BYTES, row_bytes
    index_N = torch.arange(num_rows * row_bytes, dtype=torch.int64)
    key = (source * 0x9E37_79B1 + destination * 0x85EB_CA77 + seed * 0xC2B2_AE3D + 1) & _MASK
    # the finaliser of MurmurHash3 (public domain), on 31 bits, so that shifts see no sign
    hash_N = (index_N + key) & _MASK
    for factor in (0x85EB_CA6B, 0xC2B2_AE35):
        hash_N = ((hash_N ^ (hash_N >> 15)) * factor) & _MASK
    rows_NB = ((hash_N ^ (hash_N >> 16)) & 0xFF).to(torch.uint8).view(num_rows, row_bytes)
    if num_rows:
        heads = b"".join(_HEAD.pack(source, destination, row) for row in range(num_rows))
        rows_NB[:, :MIN_ROW_BYTES] = torch.frombuffer(bytearray(heads), dtype=torch.uint8).view(num_rows, MIN_ROW_BYTES)
    return rows_NB


def outgoing(trial: Trial, source: int, *, seed: int = 0) -> torch.Tensor:
    """uint8 [rows, row_bytes]: all that `source` sends in a trial, rows for rank 0 first."""
    return torch.cat(
        [
            payload(source, destination, num_rows=rows, row_bytes=trial.row_bytes, seed=seed)
            for destination, rows in enumerate(trial.counts[source])
        ]
    )


def inspect_counts(trial: Trial, counts_RR: torch.Tensor, destination: int) -> list[Mismatch]:
    """What is wrong with all ranks' counts as `destination` has gathered them."""
    expected_RR = torch.tensor(trial.counts, dtype=torch.int64)
    if counts_RR.shape != expected_RR.shape:
        detail = f"trial {trial.name!r}: shape {tuple(counts_RR.shape)} in place of {tuple(expected_RR.shape)}"
        return [Mismatch(source=destination, destination=destination, kind="counts", detail=detail)]
    rows = (counts_RR != expected_RR).any(1).nonzero().flatten().tolist()
    return [
        Mismatch(
            source=source,
            destination=destination,
            kind="counts",
            detail=f"trial {trial.name!r}: {counts_RR[source].tolist()} in place of {list(trial.counts[source])}",
        )
        for source in rows
    ]


def inspect_rows(trial: Trial, rows_NB: torch.Tensor, destination: int, *, seed: int = 0) -> list[Mismatch]:
    """What is wrong with the rows that `destination` has received in a trial; one entry per source at most."""
    incoming = [row[destination] for row in trial.counts]
    if rows_NB.shape != (sum(incoming), trial.row_bytes):
        shape = (sum(incoming), trial.row_bytes)
        detail = f"trial {trial.name!r}: shape {tuple(rows_NB.shape)} in place of {shape}"
        return [Mismatch(source=destination, destination=destination, kind="order", detail=detail)]
    found, first = [], 0
    for source, rows in enumerate(incoming):
        mismatch = _compare(trial, rows_NB[first : first + rows], source, destination, seed)
        if mismatch is not None:
            found.append(mismatch)
        first += rows
    return found


def _compare(trial: Trial, rows_NB: torch.Tensor, source: int, destination: int, seed: int) -> Mismatch | None:
    rows, row_bytes = rows_NB.shape
    expected_NB = payload(source, destination, num_rows=rows, row_bytes=row_bytes, seed=seed)
    wrong_NB = rows_NB != expected_NB
    if not wrong_NB.any():
        return None
    bad_rows = wrong_NB.any(1).nonzero().flatten().tolist()
    row = bad_rows[0]
    owner = _owner(trial, rows_NB[row], seed)
    where = f"trial {trial.name!r}, {len(bad_rows)} of {rows} rows: row {row}"
    if owner is not None:
        theirs, meant_for, number = owner
        detail = f"{where} is row {number} of what rank {theirs} sent to rank {meant_for}"
        return Mismatch(source=source, destination=destination, kind="order", detail=detail)
    byte = int(wrong_NB[row].nonzero()[0])
    detail = (
        f"{where} differs in {int(wrong_NB[row].sum())} of {row_bytes} bytes, the first at {byte}: "
        f"0x{int(rows_NB[row, byte]):02x} in place of 0x{int(expected_NB[row, byte]):02x}"
    )
    return Mismatch(source=source, destination=destination, kind="bits", detail=detail)


def _owner(trial: Trial, row_B: torch.Tensor, seed: int) -> tuple[int, int, int] | None:
    """(source, destination, row) of a whole row of this trial; None if it is none."""
    theirs, meant_for, number = _HEAD.unpack(bytes(row_B[:MIN_ROW_BYTES].tolist()))
    counts: Sequence[Sequence[int]] = trial.counts
    if theirs >= len(counts) or meant_for >= len(counts) or number >= counts[theirs][meant_for]:
        return None
    true_NB = payload(theirs, meant_for, num_rows=number + 1, row_bytes=len(row_B), seed=seed)
    return (theirs, meant_for, number) if torch.equal(true_NB[number], row_B) else None
