"""Waves of requests whose steps have exact numbers of rows that decode: every small one, and those around tiles.

requests -> one wave for each number up to ROWS; few waves of many, which end one after another -> numbers of rows
"""

from __future__ import annotations

from collections.abc import Sequence

from epruntime.verify.requests import Shape, VerifyRequest

#: every number of rows up to this one.
ROWS = 12
_ROWS_TOKENS, _SEVERAL = 4, 4
#: further ones, around multiples of 16, at which kernels change from whole tiles to tails; those that tell most first.
TAILS = (16, 17, 32, 33, 64, 63, 48, 49, 15, 31, 47, 13, 14)
_TAIL_WAVES = 2

Wave = tuple[VerifyRequest, ...]


def small_waves(requests: Sequence[VerifyRequest], shape: Shape) -> list[Wave]:
    """A wave of each number of requests up to ROWS; that of the longest prompt is in none where there are several."""
    tokens = min(_ROWS_TOKENS, shape.max_tokens)
    longest = max(requests, key=lambda request: len(request.token_ids))
    chosen = [request for request in requests if request is not longest or len(requests) < _SEVERAL]
    return [tuple(chosen[(n + i) % len(chosen)].shortened(tokens) for i in range(n)) for n in range(1, ROWS + 1)]


def tail_waves(
    requests: Sequence[VerifyRequest], shape: Shape, *, most_rows: int, num_kv_blocks: int | None
) -> tuple[list[Wave], list[int]]:
    """Few waves, and the numbers of TAILS that they run down through while one request after another ends.

    Args:
        most_rows: all prompts of a wave are prefilled in one step of so many. num_kv_blocks: that a rank has; None: as
            many as are needed.
    """
    per_wave = shape.max_tokens - 1  # the first token of a request is sampled when its prompt is there
    left, waves, found = sorted(TAILS[: _TAIL_WAVES * per_wave], reverse=True), [], []
    lasting = sorted((r for r in requests if not r.spec.stop_ids), key=lambda request: len(request.token_ids))

    def fits(wave: Wave) -> bool:
        blocks = sum(-(-(len(r.token_ids) + r.spec.max_tokens - 1) // shape.block_size) for r in wave)
        rows = sum(len(request.token_ids) for request in wave)
        return rows <= most_rows and blocks <= (num_kv_blocks or blocks)

    while left:
        counts = left[:per_wave]
        # of the shorter half, or of fewer, where prompts are long
        tried = (_ending_one_by_one(lasting[:n], counts) for n in range(-(-len(lasting) // 2), 0, -1))
        wave = next(filter(fits, tried), None)
        if wave is None:
            left = left[1:]
            continue
        waves.append(wave)
        found += counts
        left = left[per_wave:]
    return waves, sorted(found)


def _ending_one_by_one(requests: Sequence[VerifyRequest], counts: Sequence[int]) -> Wave:
    """So many that after the prompts' step as many decode as the first of `counts` says, then the second, and so on."""
    return tuple(requests[i % len(requests)].shortened(1 + sum(n > i for n in counts)) for i in range(counts[0]))


def ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers in words: "13-15, 17"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
