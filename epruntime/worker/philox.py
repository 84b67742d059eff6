"""Philox4x32-10, a counter-based random generator: the number for (key, counter) is a function, not a state.

Salmon, Moraes, Dror, Shaw 2011, "Parallel random numbers: as easy as 1, 2, 3" (SC'11). A request's
draws therefore depend on its seed and the token's position only, whatever ran beside it, and a
request that starts again on another rank draws the same numbers.
"""

from __future__ import annotations

_ROUNDS = 10
_MULTIPLIER_0, _MULTIPLIER_1 = 0xD2511F53, 0xCD9E8D57
_WEYL_0, _WEYL_1 = 0x9E3779B9, 0xBB67AE85
_MASK = 0xFFFFFFFF


def philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Ten rounds on a counter of four and a key of two 32-bit words; gives four 32-bit words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        product_0 = _MULTIPLIER_0 * c0
        product_1 = _MULTIPLIER_1 * c2
        c0, c1, c2, c3 = (product_1 >> 32) ^ c1 ^ k0, product_1 & _MASK, (product_0 >> 32) ^ c3 ^ k1, product_0 & _MASK
        k0, k1 = (k0 + _WEYL_0) & _MASK, (k1 + _WEYL_1) & _MASK
    return c0, c1, c2, c3


def uniform(seed: int, position: int) -> float:
    """A float64 in [0, 1), uniform on multiples of 2**-53.

    Args:
        seed: the request's key, in [0, 2**64).
        position: index of the token drawn, in the whole sequence (prompt, then output), in [0, 2**64).
    """
    word_0, word_1, _, _ = philox4x32(
        (position & _MASK, position >> 32 & _MASK, 0, 0), (seed & _MASK, seed >> 32 & _MASK)
    )
    return ((word_0 << 21) | (word_1 >> 11)) * 2.0**-53
