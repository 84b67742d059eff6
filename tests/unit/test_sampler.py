"""The sampler against transformers' warpers, exact probabilities and published generator vectors."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from transformers.generation.logits_process import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from epruntime.plan import SamplingSpec
from epruntime.worker import sampler
from epruntime.worker.philox import philox4x32, uniform


def spec(
    temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, seed: int = 0, logprobs: int = -1
) -> SamplingSpec:
    return SamplingSpec(
        temperature=temperature, top_k=top_k, top_p=top_p, seed=seed, stop_ids=(), max_tokens=8, logprobs=logprobs
    )


def sample(logits: torch.Tensor, specs: Sequence[SamplingSpec], positions: Sequence[int]) -> sampler.SampledTokens:
    rows = [sampler.SamplingRow(spec=s, position=p) for s, p in zip(specs, positions, strict=True)]
    return sampler.sample(logits, rows)


def kept_by_transformers(row_V: torch.Tensor, s: SamplingSpec) -> list[int]:
    scores = row_V[None]
    if s.temperature != 1.0:
        scores = TemperatureLogitsWarper(s.temperature)(None, scores)
    if s.top_k > 0:
        scores = TopKLogitsWarper(s.top_k)(None, scores)
    if s.top_p < 1.0:
        scores = TopPLogitsWarper(s.top_p)(None, scores)
    return torch.isfinite(scores[0]).nonzero()[:, 0].tolist()


def kept_here(row_V: torch.Tensor, s: SamplingSpec) -> list[int]:
    scaled_V, kept_C = sampler.kept_tokens(row_V.numpy(), s)
    ids = np.arange(scaled_V.size) if kept_C is None else kept_C
    return ids[np.isfinite(scaled_V[ids])].tolist()


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        # "kat_vectors" of the Random123 library, philox4x32 with 10 rounds.
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_known_answers(counter, key, expected):
    assert philox4x32(counter, key) == expected


def test_uniform_uses_seed_and_position_in_full():
    # From the first vector: 53 bits, the first word in front.
    assert uniform(0, 0) == ((0x6627E8D5 << 21) | (0xE169C58D >> 11)) / 2**53
    draws = {uniform(seed, position) for seed in (0, 1, 2**32, 2**63 - 1) for position in (0, 1, 2**32, 2**40)}
    assert len(draws) == 16
    assert all(0.0 <= u < 1.0 for u in draws)
    assert np.mean([uniform(7, p) for p in range(4000)]) == pytest.approx(0.5, abs=4 / math.sqrt(12 * 4000))


def test_greedy_takes_the_lowest_id_on_ties():
    logits = torch.tensor([[0.0, 3.0, 1.0, 3.0], [-1.0, -1.0, -1.0, -1.0], [0.0, 1.0, 2.0, 2.5]])
    out = sample(logits, [spec(temperature=0.0)] * 3, [5, 6, 7])
    assert out.tokens.tolist() == [1, 0, 3]
    assert out.tokens.dtype == np.int32
    assert not out.errors


ROWS = {
    "flat": lambda g, v: torch.randn(v, generator=g),
    "peaked": lambda g, v: torch.randn(v, generator=g) * 6,
    "ties": lambda g, v: torch.randint(-3, 4, (v,), generator=g).float() / 2,
    "bfloat16": lambda g, v: (torch.randn(v, generator=g) * 3).bfloat16().float(),
    "masked": lambda g, v: torch.where(torch.rand(v, generator=g) < 0.5, -torch.inf, torch.randn(v, generator=g)),
}


@pytest.mark.parametrize("kind", ROWS)
@pytest.mark.parametrize("vocabulary", [7, 100, 5000])
def test_the_kept_set_equals_transformers(kind, vocabulary):
    generator = torch.Generator().manual_seed(vocabulary)
    for trial in range(6):
        row_V = ROWS[kind](generator, vocabulary)
        if not torch.isfinite(row_V).any():
            continue
        for temperature in (1.0, 0.7, 3.0):
            for top_k in (0, 1, 5, 50, 6000):
                for top_p in (1.0, 0.999, 0.9, 0.5, 0.25, 1e-6):
                    s = spec(temperature, top_k, top_p)
                    assert kept_here(row_V, s) == kept_by_transformers(row_V, s), (trial, s)


def test_equal_probabilities_at_the_edge_of_the_nucleus_equal_transformers():
    # Four equal tokens: the cumulated 0.25, 0.5 <= 1 - 0.5 are removed, exactly two stay.
    for row in ([0.0] * 4, [0.0] * 3, [1.0, 0.0, 0.0, 1.0], [0.0, 0.0, -50.0]):
        for top_p in (0.25, 0.5, 0.75, 1 / 3, 2 / 3):
            s = spec(1.0, 0, top_p)
            assert kept_here(torch.tensor(row), s) == kept_by_transformers(torch.tensor(row), s)
    assert len(kept_here(torch.zeros(4), spec(1.0, 0, 0.5))) == 2


def test_equals_at_the_edge_are_the_rare_case_and_both_cases_are_reached(monkeypatch):
    edges = []
    among_equals = sampler._nucleus_among_equals
    monkeypatch.setattr(sampler, "_nucleus_among_equals", lambda *a: edges.append(a[1]) or among_equals(*a))
    row_V = torch.randn(2000, generator=torch.Generator().manual_seed(3)) * 4
    assert kept_here(row_V, spec(top_p=0.9)) == kept_by_transformers(row_V, spec(top_p=0.9))
    assert not edges
    for decimals in (0, 1):
        rounded_V = row_V.round(decimals=decimals)
        assert kept_here(rounded_V, spec(top_p=0.9)) == kept_by_transformers(rounded_V, spec(top_p=0.9))
    assert edges


def test_draws_follow_the_exact_distribution():
    row = torch.tensor([1.0, 0.0, 2.0, -1.0, 0.5, 1.5, -2.0, 0.25])
    draws = 20000

    def statistic(s: SamplingSpec, probabilities: np.ndarray) -> float:
        tokens = sample(row.expand(draws, -1).contiguous(), [s] * draws, range(draws)).tokens
        observed = np.bincount(tokens, minlength=8)
        assert not observed[probabilities == 0].any()
        support = probabilities > 0
        expected = draws * probabilities[support]
        return float(((observed[support] - expected) ** 2 / expected).sum())

    exact = np.exp(row.double().numpy() / 0.8)
    # Quantiles of chi-square at 1e-4: 29.88 with 7 degrees of freedom, 21.11 with 3.
    assert statistic(spec(0.8, seed=11), exact / exact.sum()) < 29.88
    assert statistic(spec(1.0, seed=11), exact / exact.sum()) > 29.88, "the bound tells another temperature apart"
    top4 = np.where(np.isin(np.arange(8), [2, 5, 0, 4]), exact, 0.0)
    assert statistic(spec(0.8, top_k=4, seed=12), top4 / top4.sum()) < 21.11


def test_the_inverse_cdf_runs_in_vocabulary_order(monkeypatch):
    row = torch.log(torch.tensor([[0.1, 0.4, 0.2, 0.3]]))
    for u, token in ((0.0, 0), (0.05, 0), (0.15, 1), (0.45, 1), (0.55, 2), (0.75, 3), (1 - 2**-53, 3)):
        monkeypatch.setattr(sampler, "uniform", lambda seed, position, u=u: u)
        assert sample(row, [spec()], [0]).tokens.tolist() == [token]
    # A draw exactly on a step belongs to the token above it: 0 to the first possible one, 1/2 to the second of two.
    for u, token in ((0.0, 1), (0.5, 2)):
        monkeypatch.setattr(sampler, "uniform", lambda seed, position, u=u: u)
        assert sample(torch.tensor([[-torch.inf, 0.0, 0.0]]), [spec()], [0]).tokens.tolist() == [token]


def test_a_row_does_not_depend_on_its_batch_mates():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(9, 300, generator=generator) * 2
    specs = [spec(0.9, 40, 0.95, seed=i) if i % 3 else spec(0.0, logprobs=5) for i in range(9)]
    positions = list(range(10, 19))
    together = sample(logits, specs, positions)
    for i in range(9):
        alone = sample(logits[i : i + 1], specs[i : i + 1], positions[i : i + 1])
        assert alone.tokens[0] == together.tokens[i]
        assert alone.logprobs.get(0) == together.logprobs.get(i)
    reverse = sample(logits.flip(0).contiguous(), specs[::-1], positions[::-1])
    assert reverse.tokens[::-1].tolist() == together.tokens.tolist()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_row_is_an_error_of_that_row_only(bad):
    logits = torch.randn(3, 10, generator=torch.Generator().manual_seed(1))
    good = sample(logits, [spec(seed=5)] * 3, [1, 2, 3])
    logits[1, 4] = bad
    out = sample(logits, [spec(seed=5, logprobs=2)] * 3, [1, 2, 3])
    assert list(out.errors) == [1]
    assert "position 1" in out.errors[1]
    assert str(bad) in out.errors[1]
    assert out.tokens[1] == -1
    assert 1 not in out.logprobs
    assert out.tokens[[0, 2]].tolist() == good.tokens[[0, 2]].tolist()
    assert sample(torch.full((1, 4), -torch.inf), [spec(0.0)], [1]).errors


def test_a_masked_token_is_never_drawn():
    logits = torch.tensor([[0.0, -torch.inf, 0.0, -torch.inf]]).expand(500, -1).contiguous()
    assert set(sample(logits, [spec()] * 500, range(500)).tokens.tolist()) == {0, 2}


@pytest.mark.parametrize("temperature", [1e-3, 1e-30, 1e-40, 1e-300, 1e30])
def test_extreme_temperatures_approach_their_limits(temperature):
    logits = torch.tensor([[5.0, -80.0, 9.0, 8.0], [-5.0, -8.0, -90.0, -4.0]])
    tokens = [sample(logits, [spec(temperature, seed=s)] * 2, [3, 4]).tokens.tolist() for s in range(200)]
    if temperature < 1:
        assert tokens == [[2, 3]] * 200
    else:
        assert {t[0] for t in tokens} == {0, 1, 2, 3}


def test_logprobs_are_those_of_the_unmodified_logits():
    logits = torch.randn(4, 500, generator=torch.Generator().manual_seed(2)) * 3
    specs = [spec(0.5, 3, 0.9, seed=9, logprobs=n) for n in (0, 1, 5, 20)]
    out = sample(logits, specs, [4, 5, 6, 7])
    exact = torch.log_softmax(logits.double(), dim=-1)
    for i, s in enumerate(specs):
        got = out.logprobs[i]
        assert got.chosen == pytest.approx(exact[i, out.tokens[i]].item(), abs=1e-12)
        expected = torch.topk(exact[i], s.logprobs)
        assert list(got.top_ids) == expected.indices.tolist()
        assert list(got.top_values) == pytest.approx(expected.values.tolist(), abs=1e-12)
        assert all(isinstance(v, float) for v in (got.chosen, *got.top_values))


def test_top_logprobs_break_ties_by_the_lowest_id():
    row = np.array([0.0, 2.0, 1.0, 2.0, 1.0, 1.0, 2.0], np.float32)
    assert sampler.token_logprobs(row, 0, 5).top_ids == (1, 3, 6, 2, 4)
    assert sampler.token_logprobs(row, 0, 20).top_ids == (1, 3, 6, 2, 4, 5, 0), "no more than the vocabulary"


def test_no_rows():
    assert sample(torch.empty(0, 10), [], []).tokens.shape == (0,)
