"""Comparing bit for bit: what counts as a difference, where the first one is, and in which layer."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from epruntime.plan import TokenLogprobs
from epruntime.verify.compare import NOT_COMPUTED, Difference, compare, digest, first_difference
from epruntime.verify.outputs import Output
from epruntime.verify.session import Trace


def _entry(chosen: float, *top: tuple[int, float]) -> TokenLogprobs:
    return TokenLogprobs(chosen=chosen, top_ids=tuple(i for i, _ in top), top_values=tuple(v for _, v in top))


def _output(index: int = 0, tokens: Sequence[int] = (5, 6, 7), *, rank: int = 0, prompt: int = 0) -> Output:
    return Output(
        index=index,
        num_prompt_tokens=1 + prompt,
        rank=rank,
        tokens=list(tokens),
        logprobs=[_entry(-0.5 - i, (token, -0.5 - i), (99, -3.0)) for i, token in enumerate(tokens)],
        prompt_logprobs=[_entry(-float(i + 1)) for i in range(prompt)] if prompt else None,
    )


def _next_float(value: float) -> float:
    return struct.unpack("<d", struct.pack("<q", struct.unpack("<q", struct.pack("<d", value))[0] + 1))[0]


def test_equal_outputs_have_no_difference_and_one_digest() -> None:
    base = {0: _output(0, prompt=3), 1: _output(1, (8, 9, 8))}
    copies = [_output(1, (8, 9, 8), rank=1), _output(0, prompt=3), _output(0, prompt=3, rank=2)]
    found = compare(base, copies, num_tokens=3)
    assert (found.num_compared, found.num_different, found.first) == (3, 0, None)
    # the digest tells neither ranks nor copies nor the order in which they came
    assert found.digest == digest(list(base.values()), num_tokens=3)


def test_the_last_bit_of_a_logprob_is_a_difference() -> None:
    got = _output()
    got.logprobs[1] = replace(got.logprobs[1], chosen=_next_float(-1.5))
    found = first_difference(_output(), got, 3)
    assert found is not None
    assert (found.where, found.position) == ("output", 1)
    assert (found.expected_token, found.got_token) == (6, 6)
    assert (found.expected_logprob, found.got_logprob) == (-1.5, _next_float(-1.5))
    assert digest([got], num_tokens=3) != digest([_output()], num_tokens=3)
    # what comes later is no part of a shorter comparison
    assert first_difference(_output(), got, 1) is None
    assert digest([got], num_tokens=1) == digest([_output()], num_tokens=1)


def test_bits_are_compared_and_not_values() -> None:
    zero, minus_zero = _output(), _output()
    zero.logprobs[0], minus_zero.logprobs[0] = _entry(0.0), _entry(-0.0)
    assert first_difference(zero, minus_zero, 3) is not None
    zero.logprobs[0], minus_zero.logprobs[0] = _entry(math.nan), _entry(math.nan)
    assert first_difference(zero, minus_zero, 3) is None


def test_another_token_and_another_rank_of_likely_tokens() -> None:
    found = first_difference(_output(), _output(tokens=(5, 6, 1)), 3)
    assert found is not None
    assert (found.position, found.expected_token, found.got_token) == (2, 7, 1)
    assert "token 1, expected 7" in str(found)
    got = _output()
    got.logprobs[0] = _entry(-0.5, (5, -0.5), (98, -3.0))
    found = first_difference(_output(), got, 3)
    assert found is not None
    assert found.note == "among the most likely tokens 98 (-3.0), expected 99 (-3.0)"


def test_prompt_positions_come_first() -> None:
    expected, got = _output(prompt=4), _output(tokens=(5, 6, 1), prompt=4)
    assert got.prompt_logprobs is not None
    got.prompt_logprobs[2] = _entry(-3.5)
    found = first_difference(expected, got, 3)
    assert found is not None
    # the first entry is that of the second position
    assert (found.where, found.position, found.expected_logprob, found.got_logprob) == ("prompt", 3, -3.0, -3.5)
    got.prompt_logprobs = None
    found = first_difference(expected, got, 3)
    assert found is not None
    assert "missing" in found.note


def test_an_output_that_ends_early_differs() -> None:
    got = _output(tokens=(5, 6))
    found = first_difference(_output(), got, 3)
    assert found is not None
    assert (found.where, found.position) == ("end", 2)
    failed = _output()
    failed.error = "NaN"
    found = first_difference(_output(), failed, 3)
    assert found is not None
    assert "NaN" in found.note


def _hashes(*values: int) -> list[np.ndarray]:
    return [np.array(values, np.int64)]


LAYERS = ("input", "0", "1", "2")


def test_the_layer_of_the_earliest_token_that_parts() -> None:
    base = {(0, 0): _hashes(1, 2, 3, 4), (0, 1): _hashes(5, 6, 7, 8), (1, 0): _hashes(9, 9, 9, 9)}
    trace = {
        (0, 0): _hashes(1, 2, 3, 4),
        # computed twice, as after a preemption; once in other bits
        (0, 1): [*_hashes(5, 6, 7, 8), *_hashes(5, 6, 70, 80)],
        (0, 2): _hashes(0, 0, 0, 0),  # the baseline never computed it
        (1, 0): _hashes(9, 9, 9, 9),
    }
    got = _output(tokens=(5, 6, 1))
    found = compare({0: _output()}, [got], num_tokens=3, expected_trace=base, trace=trace, layers=LAYERS)
    assert found.first is not None
    assert (found.first.layer, found.first.layer_position) == ("1", 1)
    assert str(found.first).endswith("hidden states part at token 1, in layer 1")


def test_what_comes_later_is_no_cause() -> None:
    """The head gives other bits for the first output token, and layers part at a later one."""
    base = {(0, 0): _hashes(1, 2, 3, 4), (0, 1): _hashes(5, 6, 7, 8)}
    trace = {(0, 0): _hashes(1, 2, 3, 4), (0, 1): _hashes(5, 6, 7, 9)}
    got = _output()
    got.logprobs[0] = _entry(-0.25)
    found = compare({0: _output()}, [got], num_tokens=3, expected_trace=base, trace=trace, layers=LAYERS)
    assert found.first is not None
    assert (found.first.position, found.first.layer) == (0, "after the last layer")


def test_hidden_states_alone_can_differ() -> None:
    base, trace = {(0, 0): _hashes(1, 2, 3, 4)}, {(0, 0): _hashes(8, 2, 3, 4)}
    found = compare({0: _output()}, [_output(rank=1)], num_tokens=3, expected_trace=base, trace=trace, layers=LAYERS)
    assert found.first is not None
    assert (found.num_different, found.first.where, found.first.layer, found.first.rank) == (
        1,
        "hidden state",
        "input",
        1,
    )


def test_a_token_that_was_not_computed_is_where_hidden_states_part() -> None:
    base = {(0, i): _hashes(i, 2, 3, 4) for i in range(4)}  # a prompt of 2 tokens, and the first 2 of 3 of output
    trace = {place: rows for place, rows in base.items() if place != (0, 1)} | {(0, 2): _hashes(8, 2, 3, 4)}
    outputs = [_output(prompt=1)]

    def found(trace: Trace, outputs: list[Output] = outputs, **more: bool) -> Difference | None:
        alone = {0: _output(prompt=1)}
        return compare(alone, outputs, num_tokens=3, expected_trace=base, trace=trace, layers=LAYERS, **more).first

    missing = found(trace, all_computed=True)
    assert missing is not None
    assert (missing.layer, missing.layer_position) == (NOT_COMPUTED, 1)
    assert str(missing).endswith("hidden states part at token 1, which was not computed")
    other = found(trace, [_output(tokens=(5, 6, 1), prompt=1)], all_computed=True)
    assert other is not None
    assert (other.where, other.layer, other.layer_position) == ("output", NOT_COMPUTED, 1)
    # a prefix cache may have had it; then the next one is the first that parts
    cached = found(trace)
    assert cached is not None
    assert (cached.layer, cached.layer_position) == ("input", 2)
    # an output that was asked to be shorter, or ended, computes no more than its tokens but for the last
    shorter = [replace(_output(tokens=(5, 6), prompt=1), end=2)]
    without_the_last = {place: rows for place, rows in base.items() if place != (0, 3)}
    assert found(without_the_last, shorter, all_computed=True) is None
    assert found(without_the_last, all_computed=True) is not None


def test_what_differs_after_the_last_layer() -> None:
    base = {(0, 0): _hashes(1, 2, 3, 4)}
    found = compare(
        {0: _output()}, [_output(tokens=(1, 1, 1))], num_tokens=3, expected_trace=base, trace=base, layers=LAYERS
    )
    assert found.first is not None
    assert found.first.layer == "after the last layer"
    assert str(found.first).endswith("hidden states part after the last layer")


def test_an_output_that_ends_early_ends_there_everywhere() -> None:
    base = _output(0, (5, 6))
    assert first_difference(base, _output(0, (5, 6)), 8) is None
    assert first_difference(base, replace(_output(0, (5,)), end=1), 8) is None  # no more was asked for
    for tokens, words in (((5,), "1 token"), ((5, 6, 7), "3 tokens")):
        found = first_difference(base, _output(0, tokens), 8)
        assert found is not None
        assert (found.where, found.note) == ("end", f"it ended with {words!r}, expected '2 tokens'")
    # what ends beyond the tokens that are compared is not seen
    assert first_difference(base, _output(0, (5, 6, 7)), 2) is None


def test_an_output_that_is_gone_on_with_has_the_rest_of_the_tokens() -> None:
    base = _output(0, (5, 6, 7), prompt=3)
    rest = Output(index=0, start=1, end=3, tokens=[6, 7], logprobs=base.logprobs[1:])
    assert compare({0: base}, [base, rest], num_tokens=3).first is None
    # it is no whole output, and leaves the digest alone
    assert digest([base, rest], num_tokens=3) == digest([base], num_tokens=3)
    assert digest([base, replace(base, tokens=[5], end=1)], num_tokens=3) == digest([base], num_tokens=3)
    found = first_difference(base, replace(rest, tokens=[6, 8]), 3)
    assert found is not None
    assert (found.where, found.position, found.expected_token, found.got_token) == ("output", 2, 7, 8)
    assert first_difference(base, replace(rest, tokens=[6]), 3) is not None
