"""Rows 1 to 70 on threads 1 to 4: each row as it is alone on one thread."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from epruntime.ops import extension

MOST = 70
COUNTS = range(1, MOST + 1)
THREADS = (1, 2, 3, 4)
#: The instruction set that this CPU would use.
BEST = "reference" if (native := extension.load()) is None else native.supported_isas()[0]


def counts_of(implementation: str) -> Mapping[int, Sequence[int]]:
    """Counts of rows for each number of threads.

    Every count on every number of threads with the best instruction set. What shares out work does not know the
    instruction set: with the others every second count on one number of threads. The plain-torch reference, which is
    slow, at a few counts.
    """
    if implementation == "reference":
        return dict.fromkeys(THREADS, (1, 33, 70))
    if implementation == BEST:
        return dict.fromkeys(THREADS, COUNTS)
    return {threads: [count for count in COUNTS if (count + count // 8 + 2 * threads) % 8 == 0] for threads in THREADS}


def chosen_rows(count: int) -> torch.Tensor:
    """So many of the rows 0 to 69: neighbours, or any, in any order."""
    if count % 2:
        first = count * 37 % (MOST - count + 1)
        return torch.arange(first, first + count)
    return torch.randperm(MOST, generator=torch.Generator().manual_seed(count))[:count]


def check_rows(run: Callable[[torch.Tensor], torch.Tensor], counts: Mapping[int, Sequence[int]]) -> torch.Tensor:
    """Counts of rows on numbers of threads against the rows alone on one; returns these, all 70, for the caller.

    Args:
        run: numbers of n rows, int64 [n] -> their results [n, ...], in one call of what is tested.
    """
    torch.set_num_threads(1)
    alone = torch.cat([run(torch.tensor([i])) for i in range(MOST)])
    for num_threads, some in counts.items():
        torch.set_num_threads(num_threads)
        for count in some:
            rows = chosen_rows(count)
            assert torch.equal(run(rows), alone[rows]), f"{count} rows on {num_threads} threads"
    return alone


def num_parts(rows: int, grain: int, num_threads: int) -> int:
    """Parts that at::parallel_for makes: a thread for each begun grain, at most all, and equal shares of rows."""
    threads = min(num_threads, -(-rows // grain))
    return -(-rows // -(-rows // threads))
