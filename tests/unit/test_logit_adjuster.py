"""Penalties, logit bias and min_tokens against transformers' processors and arithmetic on paper."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from epruntime.plan import SamplingSpec
from epruntime.worker import sampler
from epruntime.worker.logit_adjuster import LogitAdjuster

VOCABULARY = 40


def spec(**fields: object) -> SamplingSpec:
    defaults = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "seed": 0, "stop_ids": (), "max_tokens": 100}
    return SamplingSpec(**(defaults | fields))  # type: ignore[arg-type]


def adjusted(row: np.ndarray, s: SamplingSpec, tokens: list[int], num_prompt: int) -> np.ndarray:
    """Through an adjuster that saw the prompt at once and the output token by token."""
    adjuster = LogitAdjuster(s, np.array(tokens[:num_prompt], np.int32), num_prompt)
    for token in tokens[num_prompt:]:
        adjuster.accept(token)
    readmitted = LogitAdjuster(s, np.array(tokens, np.int32), num_prompt)
    before = row.copy()
    out = adjuster.adjusted(row)
    np.testing.assert_array_equal(row, before, err_msg="the model's own logits are needed for log-probabilities")
    np.testing.assert_array_equal(out, readmitted.adjusted(row), err_msg="a preempted request goes on as before")
    return out


VALUES = st.one_of(
    st.sampled_from([0.0, -0.0, -math.inf, 3.4e38, -3.4e38, 1e-42, -1e-42, 1.0, -1.0, 2.0]),
    st.floats(-60, 60, width=32),
)
ROWS = st.lists(VALUES, min_size=VOCABULARY, max_size=VOCABULARY).map(lambda row: np.array(row, np.float32))
TOKENS = st.integers(0, VOCABULARY - 1)
HISTORIES = st.tuples(st.lists(TOKENS, min_size=1, max_size=12), st.lists(TOKENS, max_size=12))


@settings(max_examples=300, deadline=None)
@given(row=ROWS, history=HISTORIES, penalty=st.one_of(st.floats(0.05, 20.0), st.sampled_from([1.0, 1.1, 1e-6, 1e6])))
def test_the_repetition_penalty_is_transformers(row, history, penalty):
    prompt, output = history
    out = adjusted(row, spec(repetition_penalty=penalty), prompt + output, len(prompt))
    ids = torch.tensor([prompt + output])
    expected = RepetitionPenaltyLogitsProcessor(penalty)(ids, torch.from_numpy(row)[None])[0].numpy()
    # beyond float32 transformers has inf, which cannot be sampled from; here it is the largest float32
    np.testing.assert_array_equal(out, np.minimum(expected, np.finfo(np.float32).max))


@pytest.mark.parametrize("penalty", [1e-300, 5e-324, 1e300, 1.7e308])
def test_penalties_beyond_float32_leave_no_nan(penalty):
    row = np.array([0.0, 5.0, -5.0, -np.inf, 1.0], np.float32)
    out = adjusted(row, spec(repetition_penalty=penalty), [0, 1, 2, 3], 2)
    assert not np.isnan(out).any()
    assert not (out == np.inf).any()
    assert (out[0], out[3], out[4]) == (0.0, -np.inf, 1.0)


@settings(max_examples=200, deadline=None)
@given(row=ROWS, history=HISTORIES, minimum=st.integers(0, 14), stops=st.lists(TOKENS, min_size=1, unique=True))
def test_min_tokens_is_transformers_min_new_tokens(row, history, minimum, stops):
    prompt, output = history
    s = spec(min_tokens=minimum, stop_ids=(*stops, VOCABULARY, VOCABULARY + 7))
    out = adjusted(row, s, prompt + output, len(prompt))
    processor = MinNewTokensLengthLogitsProcessor(len(prompt), minimum, torch.tensor(stops))
    np.testing.assert_array_equal(out, processor(torch.tensor([prompt + output]), torch.from_numpy(row)[None])[0])


@settings(max_examples=200, deadline=None)
@given(
    history=HISTORIES,
    row=st.lists(st.integers(-320, 320), min_size=VOCABULARY, max_size=VOCABULARY),
    presence=st.integers(-64, 64),
    frequency=st.integers(-64, 64),
    bias=st.dictionaries(TOKENS, st.integers(-3200, 3200), max_size=5),
)
def test_presence_frequency_and_bias_are_openai_s_formula(history, row, presence, frequency, bias):
    """In whole multiples of 1/32, in which float32 is exact: mu - c * frequency - (c > 0) * presence, then the bias."""
    prompt, output = history
    s = spec(
        presence_penalty=presence / 32,
        frequency_penalty=frequency / 32,
        logit_bias=tuple((token, value / 32) for token, value in sorted(bias.items())),
    )
    out = adjusted(np.array(row, np.float32) / 32, s, prompt + output, len(prompt))
    expected = [
        row[t] - output.count(t) * frequency - (output.count(t) > 0) * presence + bias.get(t, 0)
        for t in range(VOCABULARY)
    ]
    assert (out * 32).tolist() == expected


def test_the_order_on_paper():
    """Repetition 2 on prompt and output, then penalties on the output, then the bias, then what may not come yet."""
    row = np.array([4.0, -4.0, 3.0, 1.0, 6.0], np.float32)
    s = spec(
        repetition_penalty=2.0,
        presence_penalty=0.5,
        frequency_penalty=0.25,
        logit_bias=((1, 10.0), (2, -1.0)),
        min_tokens=4,
        stop_ids=(4,),
    )
    tokens = [0, 1, 1, 1, 3]  # the prompt is [0]; then 1 three times... and 3 once
    # token 0: 4 / 2; token 1: -4 * 2 - 3 * 0.25 - 0.5 + 10; token 2: 3 - 1; token 3: 1 / 2 - 0.25 - 0.5
    assert adjusted(row, s, tokens[:4], 1).tolist() == [2.0, -8.0 - 0.75 - 0.5 + 10.0, 2.0, 1.0, -np.inf]
    assert adjusted(row, s, tokens, 1).tolist() == [2.0, 0.75, 2.0, -0.25, 6.0]


def test_only_requests_that_need_one_have_an_adjuster():
    tokens = np.arange(5, dtype=np.int32)
    assert LogitAdjuster.of(spec(stop_ids=(3,)), tokens, 4) is None
    assert LogitAdjuster.of(spec(min_tokens=1, stop_ids=(3,)), tokens, 4) is None, "it has its one token"
    for fields in (
        {"min_tokens": 2}, {"repetition_penalty": 1.1}, {"presence_penalty": -0.1}, {"frequency_penalty": 0.1},
        {"logit_bias": ((1, 0.5),)},
    ):  # fmt: skip
        assert LogitAdjuster.of(spec(**fields), tokens, 4) is not None


def test_counts_of_many_tokens():
    """Beyond the room that the counts begin with."""
    rng = np.random.default_rng(0)
    output = rng.integers(0, 1000, 3000).tolist()
    out = adjusted(np.zeros(1000, np.float32), spec(frequency_penalty=1.0), [7, *output], 1)
    assert out.tolist() == (-np.bincount(output, minlength=1000)).tolist()


def row_of(s: SamplingSpec, tokens: list[int], num_prompt: int) -> sampler.SamplingRow:
    return sampler.SamplingRow(
        spec=s, position=len(tokens), adjuster=LogitAdjuster.of(s, np.array(tokens, np.int32), num_prompt)
    )


def test_greedy_obeys_and_logprobs_are_those_of_the_unmodified_logits():
    logits = torch.tensor([[3.0, 2.9, 1.0, 0.0]])
    exact = torch.log_softmax(logits.double(), -1)[0]
    for fields, expected in (
        ({}, 0),
        ({"repetition_penalty": 1.5}, 1),
        ({"presence_penalty": 0.5}, 1),
        ({"logit_bias": ((3, 4.0),)}, 3),
        ({"logit_bias": ((0, -100.0), (1, -100.0))}, 2),
        ({"min_tokens": 2, "stop_ids": (0, 1)}, 2),
        ({"min_tokens": 1, "stop_ids": (0, 1)}, 0),
    ):
        out = sampler.sample(logits, [row_of(spec(logprobs=2, **fields), [2, 0], 1)])
        assert out.tokens.tolist() == [expected], fields
        assert out.logprobs[0].chosen == pytest.approx(exact[expected].item(), abs=1e-12)
        assert out.logprobs[0].top_ids == (0, 1)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_without_any_token_left_is_an_error_of_that_row_only(temperature):
    logits = torch.tensor([[0.0, -torch.inf, 1.0], [0.0, 0.0, 1.0]])
    masked = spec(temperature=temperature, min_tokens=3, stop_ids=(0, 2))
    out = sampler.sample(logits, [row_of(masked, [1, 1], 1), row_of(masked, [1, 1], 1)])
    assert list(out.errors) == [0]
    assert "min_tokens=3" in out.errors[0]
    assert out.tokens.tolist() == [-1, 1]


def kept_by_transformers(row: torch.Tensor, s: SamplingSpec, tokens: list[int]) -> list[int]:
    """Every step in the order of transformers' generate, on a row with the tokens so far."""
    ids, scores = torch.tensor([tokens]), row[None]
    if s.repetition_penalty != 1.0:
        scores = RepetitionPenaltyLogitsProcessor(s.repetition_penalty)(ids, scores)
    if s.temperature != 1.0:
        scores = TemperatureLogitsWarper(s.temperature)(ids, scores)
    if s.top_k:
        scores = TopKLogitsWarper(s.top_k)(ids, scores)
    if s.top_p < 1.0:
        scores = TopPLogitsWarper(s.top_p)(ids, scores)
    if s.min_p:
        scores = MinPLogitsWarper(s.min_p)(ids, scores)
    return torch.isfinite(scores[0]).nonzero()[:, 0].tolist()


@settings(max_examples=400, deadline=None)
@given(
    row=st.one_of(
        st.lists(st.one_of(st.floats(-20, 20, width=32), st.just(-math.inf)), min_size=2, max_size=60),
        st.lists(st.sampled_from([0.0, 0.5, 1.0, 1.5, -3.0, -math.inf]), min_size=2, max_size=60),
    ).filter(lambda row: max(row) > -math.inf),
    temperature=st.sampled_from([1.0, 0.3, 2.5]),
    top_k=st.sampled_from([0, 1, 3, 20]),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 0.01]),
    min_p=st.one_of(st.sampled_from([1e-45, 1e-12, 0.05, 0.5, 1.0]), st.floats(1e-6, 1.0)),
    penalty=st.sampled_from([1.0, 1.3, 0.6]),
    data=st.data(),
)
def test_the_kept_set_equals_transformers_with_min_p(row, temperature, top_k, top_p, min_p, penalty, data):
    tokens = data.draw(st.lists(st.integers(0, len(row) - 1), min_size=1, max_size=5))
    s = spec(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=penalty)
    row_V = torch.tensor(row, dtype=torch.float32)
    out = LogitAdjuster(s, np.array(tokens, np.int32), 1).adjusted(row_V.numpy())
    scaled_V, kept_C = sampler.kept_tokens(out, s)
    assert kept_C is not None
    assert np.isfinite(scaled_V[kept_C]).all(), "what min_p keeps was there before"
    assert kept_C.tolist() == kept_by_transformers(row_V, s, tokens)


PARAMETERS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.5, 1.0, 1.7]),
        "top_k": st.sampled_from([0, 1, 5, 100]),
        "top_p": st.sampled_from([1.0, 0.9, 0.4]),
        "min_p": st.sampled_from([0.0, 0.1, 0.9]),
        "repetition_penalty": st.sampled_from([1.0, 1.2, 0.7]),
        "presence_penalty": st.sampled_from([0.0, 0.6, -2.0]),
        "frequency_penalty": st.sampled_from([0.0, 0.4, -0.3]),
        "logit_bias": st.dictionaries(TOKENS, st.floats(-100, 100), max_size=3).map(lambda b: tuple(sorted(b.items()))),
        "stop_ids": st.lists(TOKENS, max_size=3).map(tuple),
        "min_tokens": st.integers(0, 6),
        "logprobs": st.sampled_from([-1, 0, 3]),
        "seed": st.integers(0, 2**63 - 1),
    }
)
REQUESTS = st.lists(st.tuples(PARAMETERS, HISTORIES, ROWS), min_size=1, max_size=6)


@settings(max_examples=150, deadline=None)
@given(requests=REQUESTS, order=st.randoms(use_true_random=False))
def test_a_row_does_not_depend_on_its_batch_mates_whatever_the_parameters(requests, order):
    logits = torch.from_numpy(np.stack([row for _, _, row in requests]))
    rows = [row_of(spec(**fields), prompt + output, len(prompt)) for fields, (prompt, output), _ in requests]
    places = list(range(len(rows)))
    order.shuffle(places)
    together = sampler.sample(logits[places], [rows[i] for i in places])
    for place, i in enumerate(places):
        alone = sampler.sample(logits[i : i + 1], [rows[i]])
        assert alone.tokens[0] == together.tokens[place]
        assert alone.logprobs.get(0) == together.logprobs.get(place)
        assert alone.errors.get(0) == together.errors.get(place)
