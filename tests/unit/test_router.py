"""Router: least outstanding tokens, lowest index on a tie."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epruntime.engine.router import Router


def test_picks_the_least_loaded_group_and_the_lowest_on_a_tie():
    router = Router(3)
    assert [router.assign(1, 10), router.assign(2, 4), router.assign(3, 5)] == [0, 1, 2]
    assert router.assign(4, 1) == 1  # 10, 4, 5
    assert router.assign(5, 1) == 1  # 10, 5, 5
    assert router.assign(6, 1) == 2  # 10, 6, 5
    assert router.loads == (10, 6, 6)
    assert router.release(1) == 0
    assert router.loads == (0, 6, 6)
    assert router.assign(7, 3) == 0


def test_misuse_is_refused():
    router = Router(2)
    router.assign(1, 5)
    with pytest.raises(ValueError, match="already assigned to group 0"):
        router.assign(1, 5)
    with pytest.raises(ValueError, match="must be positive"):
        router.assign(2, 0)
    assert router.release(1) == 0
    assert router.release(1) is None
    assert router.loads == (0, 0)
    with pytest.raises(ValueError, match="num_groups"):
        Router(0)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.integers(1, 5), st.lists(st.tuples(st.booleans(), st.integers(1, 50)), max_size=60))
def test_loads_are_the_sum_of_what_is_outstanding_and_stay_close(num_groups, events):
    router, weights, groups = Router(num_groups), {}, {}
    for rid, (add, weight) in enumerate(events):
        if add or not weights:
            before = router.loads
            groups[rid] = router.assign(rid, weight)
            assert before[groups[rid]] == min(before)
            weights[rid] = weight
        else:
            rid = next(iter(weights))
            router.release(rid)
            del weights[rid]
    expected = [sum(w for r, w in weights.items() if groups[r] == g) for g in range(num_groups)]
    assert list(router.loads) == expected
