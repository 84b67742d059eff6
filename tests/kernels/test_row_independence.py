"""Attention: a row's bits depend neither on the rows beside it nor on where its keys lie."""

from __future__ import annotations

import random

import pytest
import torch

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


def test_where_the_blocks_lie_changes_nothing(implementation: str) -> None:
    first = PagedCase(lengths=[200], seed=0)
    second = PagedCase(lengths=[3, 200, 40], block_size=8, seed=1)
    second.q[1] = first.q[0]
    for cache, rows in ((second.k_cache, first.k), (second.v_cache, first.v)):
        cache.view(-1, *cache.shape[2:])[second.slots(1, 0, 200)] = rows[0]
    assert torch.equal(first.run([(0, 0, 200)])[0], second.run([(1, 0, 200)])[0])
