"""Visibility: which keys a query sees, recognised from a predicate that a mask is made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from epruntime.errors import UnsupportedModelError

_FAR = 1 << 31


@dataclass(frozen=True, kw_only=True)
class Visibility:
    """Which keys a query at position p sees: max(start)..p, start = 0 | p-window+1 | (p//chunk)*chunk. 0: none.

    A window of 1 and chunks of 1 are the same: window=1.
    """

    window: int = 0
    chunk: int = 0


def visibility_of(sees: Callable[[int, int], bool]) -> Visibility:
    """Recognises full, sliding-window and chunked causal attention from a predicate.

    Args:
        sees: `sees(q, k)`, may the query at position q see the key at position k?

    Raises:
        UnsupportedModelError: it is none of the three, judged at positions around every boundary.
    """

    if not sees(0, 0):
        raise UnsupportedModelError(
            "the attention mask is neither full, nor a window, nor chunks: a token does not see its own key (a "
            "sliding_window of 0 or less hides every key; null stands for no window)"
        )

    def first_seen(q: int) -> int:
        low, high = 0, q
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if sees(q, middle) else (middle + 1, high)
        return low

    # The first query that does not see key 0 is at position `reach` for a window and for a chunk alike.
    low, high = 1, _FAR
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if not sees(middle, 0) else (middle + 1, high)
    reach = low
    if reach >= _FAR:
        found, reach = Visibility(), 0
    elif first_seen(reach) == reach > 1:
        found = Visibility(chunk=reach)
    else:
        found = Visibility(window=reach)

    around = {q for base in (1, reach, 2 * reach, 7 * reach, 1000) for q in range(base - 1, base + 3) if q >= 0}
    for q in sorted(around):
        start = first_visible(found, q)
        expected = {start: True, q: True, q + 1: False, (start + q) // 2: True}
        if start > 0:
            expected |= {start - 1: False, 0: False}
        for k, visible in expected.items():
            if sees(q, k) != visible:
                raise UnsupportedModelError(
                    f"the attention mask is neither full, nor a window, nor chunks: query {q} "
                    f"{'does not see' if visible else 'sees'} key {k}"
                )
    return found


def first_visible(visibility: Visibility, position: int) -> int:
    """First key position that the query at `position` sees."""
    if visibility.window:
        return max(0, position - visibility.window + 1)
    if visibility.chunk:
        return position // visibility.chunk * visibility.chunk
    return 0
