"""padded_rows on paper."""

from __future__ import annotations

import pytest

from epruntime.ops.padding import padded_rows


@pytest.mark.parametrize(("n", "padded"), [(0, 0), (1, 32), (31, 32), (32, 32), (33, 64), (1000, 1024)])
def test_strict_rounds_up_to_32(n: int, padded: int) -> None:
    assert padded_rows(n, strict=True) == padded
    assert padded_rows(n, strict=False) == n


def test_negative_is_refused() -> None:
    with pytest.raises(ValueError, match="n=-1"):
        padded_rows(-1, strict=True)
