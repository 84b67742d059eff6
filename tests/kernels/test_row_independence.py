"""A row's bits must not depend on how many rows, which rows, or how many threads work beside it."""

from __future__ import annotations

import random

import pytest
import torch

from epruntime.ops.combine import combine_rows
from tests.kernels.paged import PagedCase

CASES = {
    "fp32": {"H": 4, "K": 2, "D": 24, "V": 40},
    "mha": {"H": 2, "K": 2, "D": 16, "V": 16},
    "bf16": {"H": 6, "K": 2, "D": 32, "V": 32, "dtype": torch.bfloat16},
    "latent": {"H": 4, "K": 1, "D": 36, "V": 32, "latent": True},
    "window": {"options": {"window": 140}},
    "chunk": {"options": {"chunk": 100}},
    "softcap and sinks": {"options": {"softcap": 3.0, "sinks_H": torch.tensor([0.0, 1.0, -1.0, 3.0])}},
}


@pytest.mark.parametrize("name", CASES)
def test_prefill_chunks_and_decode_give_equal_bits(implementation: str, name: str) -> None:
    """The sequence crosses two partition borders. Whole, in random chunks among batch-mates, and one by one."""
    length = 270
    case = PagedCase(lengths=[length, 50, 131], **CASES[name])
    whole = case.run([(0, 0, length)])[0]
    draw = random.Random(1)
    done = 0
    while done < length:
        step = min(draw.choice([1, 2, 5, 31, 64]), length - done)
        spans = [(0, done, done + step)]
        for s in (1, 2):
            begin = draw.randrange(case.lengths[s])
            spans.append((s, begin, draw.randint(begin + 1, case.lengths[s])))
        draw.shuffle(spans)
        out = case.run(spans, padding=draw.randrange(3))[spans.index((0, done, done + step))]
        assert torch.equal(out, whole[done : done + step]), f"rows {done} to {done + step} of a chunk"
        done += step
    for position in [*range(0, length, 23), 127, 128, 255, 256, length - 1]:
        assert torch.equal(case.run([(0, position, position + 1)])[0][0], whole[position]), f"decode at {position}"


@pytest.mark.parametrize("num_threads", [1, 2, 3, 4])
def test_rows_1_to_70_on_threads_1_to_4(implementation: str, num_threads: int, threads: None) -> None:
    case = PagedCase(lengths=[190, 140], H=4, K=2, D=32, V=32)
    torch.set_num_threads(1)
    whole, mate = case.run([(0, 0, 190), (1, 0, 140)])
    torch.set_num_threads(num_threads)
    counts = range(1, 71) if implementation != "reference" else range(1, 71, 6)
    for rows in counts:
        out, other = case.run([(0, 190 - rows, 190), (1, 70, 70 + rows)])
        assert torch.equal(out, whole[190 - rows :]), f"{rows} rows on {num_threads} threads"
        assert torch.equal(other, mate[70 : 70 + rows]), f"{rows} rows of the second sequence"


def test_where_the_blocks_lie_changes_nothing(implementation: str) -> None:
    first = PagedCase(lengths=[200], seed=0)
    second = PagedCase(lengths=[3, 200, 40], block_size=8, seed=1)
    second.q[1] = first.q[0]
    for cache, rows in ((second.k_cache, first.k), (second.v_cache, first.v)):
        cache.view(-1, *cache.shape[2:])[second.slots(1, 0, 200)] = rows[0]
    assert torch.equal(first.run([(0, 0, 200)])[0], second.run([(1, 0, 200)])[0])


@pytest.mark.parametrize("num_threads", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_combine(implementation: str, dtype: torch.dtype, num_threads: int, threads: None) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(500, 130, generator=generator).to(dtype)
    index = torch.randint(-1, 500, (70, 8), generator=generator, dtype=torch.int32)
    weights = torch.rand(70, 8, generator=generator)
    torch.set_num_threads(1)
    whole = combine_rows(rows, index, weights)
    torch.set_num_threads(num_threads)
    for count in range(1, 71):
        order = torch.randperm(70, generator=generator)[:count]
        assert torch.equal(combine_rows(rows, index[order], weights[order]), whole[order]), f"{count} rows"
