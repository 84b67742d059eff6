"""Steps of exact numbers of rows: of which requests, and when each one ends."""

from __future__ import annotations

import pytest

from epruntime.verify.requests import Shape, make_requests, random_prompts, shape_of
from epruntime.verify.row_counts import ROWS, TAILS, Wave, ranges, small_waves, tail_waves


def _shape(max_tokens: int = 8) -> Shape:
    return shape_of(max_model_len=512, max_tokens=max_tokens, max_prompt_tokens=48, block_size=16)


def _tails(shape: Shape, num_kv_blocks: int | None = None) -> tuple[list[Wave], list[int]]:
    requests = make_requests(random_prompts(12, shape, vocab_size=50, seed=1), shape, vocab_size=50, seed=1)
    return tail_waves(requests, shape, most_rows=ROWS * shape.longest_prompt, num_kv_blocks=num_kv_blocks)


def _decode_rows(wave: Wave) -> list[int]:
    """Of each step after that of the prompts: those that have not ended."""
    assert not any(request.spec.stop_ids for request in wave), "it may end earlier"
    most = max(request.spec.max_tokens for request in wave)
    return [sum(request.spec.max_tokens > step for request in wave) for step in range(1, most)]


def test_requests_end_so_that_steps_have_the_numbers_around_tiles() -> None:
    waves, counts = _tails(_shape())
    assert [_decode_rows(wave) for wave in waves] == [[64, 63, 49, 48, 47, 33, 32], [31, 17, 16, 15, 14, 13]]
    assert counts == sorted(TAILS)
    assert all(len({request.index for request in wave}) > 1 for wave in waves)


@pytest.mark.parametrize(("max_tokens", "rows"), [(2, [[17], [16]]), (4, [[64, 63, 33], [32, 17, 16]])])
def test_where_outputs_are_short_those_that_tell_most(max_tokens: int, rows: list[list[int]]) -> None:
    waves, _ = _tails(_shape(max_tokens))
    assert [_decode_rows(wave) for wave in waves] == rows


def test_one_wave_of_long_outputs() -> None:
    waves, _ = _tails(_shape(20))
    assert [_decode_rows(wave) for wave in waves] == [sorted(TAILS, reverse=True)]


def test_what_does_not_fit_is_left_out() -> None:
    _, counts = _tails(_shape(), num_kv_blocks=40)
    assert counts
    assert max(counts) < 48
    assert _tails(_shape(), num_kv_blocks=3) == ([], [])
    shape = _shape()
    equal = make_requests([[7] * 48] * 4, shape, vocab_size=50, seed=1)
    assert tail_waves(equal, shape, most_rows=ROWS * 48, num_kv_blocks=None) == ([], [])


def test_every_small_number_has_a_wave() -> None:
    shape = _shape()
    requests = make_requests([[5]] * 3, shape, vocab_size=50, seed=1)
    waves = small_waves(requests, shape)
    assert [len(wave) for wave in waves] == list(range(1, ROWS + 1))
    assert {request.spec.max_tokens for wave in waves for request in wave} == {4}
    assert {request.index for request in waves[-1]} == {0, 1, 2}
    requests = make_requests([[5], [5] * 9, [5] * 3, [5] * 2], shape, vocab_size=50, seed=1)
    assert {request.index for request in small_waves(requests, shape)[-1]} == {0, 2, 3}  # it would take longest


def test_ranges() -> None:
    assert ranges([1, 2, 3, 5, 7, 8]) == "1-3, 5, 7-8"
    assert ranges([]) == ""
