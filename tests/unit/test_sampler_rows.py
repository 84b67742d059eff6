"""A row of logits gives the same token and the same log-probabilities, to the bit, in any company."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from epruntime.plan import SamplingSpec
from epruntime.worker.logit_adjuster import LogitAdjuster
from epruntime.worker.sampler import SamplingRow, sample

ROWS = 40


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def _rows(vocabulary: int) -> list[SamplingRow]:
    rows = []
    for i in range(ROWS):
        spec = SamplingSpec(
            temperature=(0.0, 0.7, 1.3)[i % 3],
            top_k=(0, 5)[i % 2],
            top_p=(1.0, 0.9, 0.5)[i // 2 % 3],
            min_p=(0.0, 0.05)[i // 3 % 2],
            seed=i,
            stop_ids=(1,),
            max_tokens=9,
            logprobs=i % 4,
            repetition_penalty=(1.0, 1.3)[i // 4 % 2],
        )
        tokens = np.arange(i, i + 9, dtype=np.int32) % vocabulary
        rows.append(SamplingRow(spec=spec, position=9, adjuster=LogitAdjuster.of(spec, tokens, 6)))
    return rows


@pytest.mark.parametrize("vocabulary", [33, 1031, 40_007])
def test_alone_and_among_others(vocabulary: int) -> None:
    logits = torch.randn(ROWS, vocabulary, generator=torch.Generator().manual_seed(1)) * 3
    rows = _rows(vocabulary)
    torch.set_num_threads(1)
    whole = sample(logits, rows)
    assert len(whole.logprobs) == ROWS
    for num_threads in (1, 2, 4):
        torch.set_num_threads(num_threads)
        for first, count in ((0, 1), (3, 1), (5, 7), (1, 33), (20, 20)):
            part = sample(logits[first : first + count], rows[first : first + count])
            assert part.tokens.tolist() == whole.tokens[first : first + count].tolist()
            assert part.logprobs == {i: whole.logprobs[first + i] for i in range(count)}


def test_nan_of_one_row_reaches_no_other() -> None:
    logits = torch.randn(ROWS, 131, generator=torch.Generator().manual_seed(1))
    rows = _rows(131)
    whole = sample(logits, rows)
    logits[7] = float("nan")
    logits[9, 3] = float("inf")
    found = sample(logits, rows)
    assert set(found.errors) == {7, 9}
    others = [i for i in range(ROWS) if i not in (7, 9)]
    assert found.tokens[others].tolist() == whole.tokens[others].tolist()
    assert [found.logprobs[i] for i in others] == [whole.logprobs[i] for i in others]
