"""derive_seed against the published sequence of SplitMix64."""

from __future__ import annotations

from epruntime.sampling_params import MAX_SEED, derive_seed

#: First outputs for seed 1234567, as the reference implementation (Vigna, prng.di.unimi.it/splitmix64.c) gives them.
_SEED = 1234567
_OUTPUTS = (
    6457827717110365317,
    3203168211198807973,
    9817491932198370423,
    4593380528125082431,
    16408922859458223821,
)


def test_known_answers() -> None:
    assert [derive_seed(_SEED, index) for index in range(1, 6)] == [output & MAX_SEED for output in _OUTPUTS]


def test_index_0_is_the_seed_itself() -> None:
    assert derive_seed(_SEED, 0) == _SEED
    assert derive_seed(MAX_SEED, 0) == MAX_SEED


def test_seeds_of_one_request_and_of_neighbours_differ_and_are_in_range() -> None:
    seeds = [derive_seed(seed, index) for seed in range(50) for index in range(128)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed <= MAX_SEED for seed in seeds)
