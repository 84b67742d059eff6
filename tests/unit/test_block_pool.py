"""BlockPool: who owns a block, when it may be handed out again, how a published one is found."""

from array import array

import pytest

from epruntime.engine.block_pool import NO_CONTENT, BlockPool


def ids(*tokens: int) -> bytes:
    return array("i", tokens).tobytes()


def test_allocate_gives_distinct_blocks_until_none_is_left():
    pool = BlockPool(5)
    first, second = pool.allocate(2), pool.allocate(3)
    assert sorted(first + second) == [0, 1, 2, 3, 4]
    assert pool.num_free == 0
    with pytest.raises(ValueError, match="1 KV blocks asked, 0 of 5 free"):
        pool.allocate(1)


def test_a_shared_block_is_free_only_after_its_last_release():
    pool = BlockPool(2)
    (block,) = pool.allocate(1)
    pool.share([block])
    pool.release([block])
    assert pool.num_free == 1
    pool.release([block])
    assert pool.num_free == 2
    with pytest.raises(ValueError, match="released more often"):
        pool.release([block])


def test_quarantine_holds_blocks_until_exactly_its_step_has_ended():
    pool = BlockPool(3)
    pool.quarantine(pool.allocate(2), until_step=7)
    pool.quarantine(pool.allocate(1), until_step=6)
    assert (pool.num_free, pool.num_quarantined, pool.num_returning()) == (0, 3, 3)
    pool.end_step(5)
    assert pool.num_free == 0
    pool.end_step(6)
    assert pool.num_free == 1
    pool.end_step(7)
    assert (pool.num_free, pool.num_quarantined) == (3, 0)


def test_released_published_blocks_are_evicted_least_recently_used_first():
    pool = BlockPool(3)
    a, b, c = pool.allocate(3)
    for block, token in ((a, 1), (b, 2), (c, 3)):
        pool.publish(block, NO_CONTENT, ids(token))
    pool.release([b])
    pool.release([a])
    pool.release([c])
    pool.share([b])  # used again, and released last
    pool.release([b])
    assert pool.num_free == 3
    assert pool.allocate(1) == [a]
    assert pool.match(ids(1), 1) == []
    assert pool.match(ids(2), 1) == [b]
    assert pool.allocate(2) == [c, b]
    assert pool.match(ids(2), 1) == pool.match(ids(3), 1) == []


def test_match_stops_at_the_first_gap():
    pool = BlockPool(4)
    a, b, c, d = pool.allocate(4)
    first = pool.publish(a, NO_CONTENT, ids(1, 2))
    second = pool.publish(b, first, ids(3, 4))
    pool.publish(c, second, ids(5, 6))
    assert pool.match(ids(1, 2, 3, 4, 5, 6), 2) == [a, b, c]
    assert pool.match(ids(1, 2, 0, 4, 5, 6), 2) == [a]
    assert pool.match(ids(3, 4), 2) == []  # same block, other history
    assert pool.publish(d, NO_CONTENT, ids(1, 2)) == first  # the same content again: the first block stays
    assert pool.match(ids(1, 2), 2) == [a]


def test_a_content_published_again_gets_a_number_of_its_own():
    """What was published after the evicted block is not found any more, rather than taken for something else."""
    pool = BlockPool(3)
    a, b = pool.allocate(2)
    first = pool.publish(a, NO_CONTENT, ids(1))
    pool.publish(b, first, ids(2))
    pool.release([a])
    assert pool.allocate(2) == [2, a]  # block 2 was free, a is evicted
    again = pool.publish(2, NO_CONTENT, ids(1))
    assert again != first
    assert pool.match(ids(1, 2), 1) == [2]


def test_share_of_a_block_without_content_is_refused():
    pool = BlockPool(2)
    with pytest.raises(ValueError, match="has no content to share"):
        pool.share([0])
    with pytest.raises(ValueError, match="not referenced"):
        pool.publish(0, NO_CONTENT, ids(1))
    pool.publish(pool.allocate(1)[0], NO_CONTENT, ids(1))
    with pytest.raises(ValueError, match="published already"):
        pool.publish(0, NO_CONTENT, ids(2))


def test_can_take_counts_evictable_hits_once():
    pool = BlockPool(3)
    a, b = pool.allocate(2)
    pool.publish(a, NO_CONTENT, ids(1))
    pool.release([a])  # a cached and evictable, one more free, b in use
    assert pool.num_free == 2
    assert pool.can_take([a], 1)
    assert not pool.can_take([a], 2)  # taking a leaves one
    assert pool.can_take([b], 2)  # b costs nothing: it is referenced already
