"""The KV cache's books, in Python and in C++: tables, histories, what the prefix cache gives, what they refuse."""

import random

import numpy as np
import pytest

from epruntime.engine import kv_cache
from epruntime.engine.kv_cache import KVCache, make_kv_cache
from epruntime.engine.kv_reference import ReferenceKVCache
from epruntime.testing.mirrored_kv import MirroredKVCache, native_kv_cache

ALL = 2**62  # num_skippable: no token need be computed again

needs_native = pytest.mark.skipif(native_kv_cache() is None, reason="the C++ extension is not built")


@pytest.fixture(params=["python", pytest.param("c++", marks=needs_native)])
def make(request):
    return ReferenceKVCache if request.param == "python" else native_kv_cache()


def history(kv: KVCache, rid: int) -> list[int]:
    return np.frombuffer(kv.token_ids(rid), np.int32).tolist()


def append(kv: KVCache, tokens: dict[int, int]) -> list[int]:
    return kv.append(np.array(list(tokens), np.int64), np.array(list(tokens.values()), np.int32))


def test_prefix_hit_gives_the_confirmed_full_blocks_and_always_leaves_a_token(make):
    kv = make(num_blocks=8, block_size=2, prefix_caching=True)
    kv.add(1, [1, 2, 3, 4, 5])
    num_cached, first = kv.admit(1, ALL)
    assert (num_cached, len(first)) == (0, 3)
    kv.confirm(1, 3)  # one full block computed
    kv.add(2, [1, 2, 3, 4, 5])
    num_cached, second = kv.admit(2, ALL)
    assert num_cached == 2
    assert second[0] == first[0]
    assert not set(second[1:]) & set(first)
    kv.confirm(1, 5)
    kv.add(3, [1, 2, 3, 4])
    assert kv.admit(3, ALL)[0] == 2  # both blocks are cached, the last token is computed anyway
    assert kv.num_free_blocks == 8 - 3 - 2 - 1


def test_a_prefix_is_taken_up_to_what_may_be_skipped(make):
    kv = make(num_blocks=9, block_size=2, prefix_caching=True)
    kv.add(1, [1, 2, 3, 4, 5])
    kv.admit(1, ALL)
    kv.confirm(1, 5)
    for rid, num_skippable, num_cached in ((2, 0, 0), (3, 3, 2), (4, 4, 4)):
        kv.add(rid, [1, 2, 3, 4, 5])
        assert kv.admit(rid, num_skippable)[0] == num_cached
        kv.release(rid, -1)


def test_a_block_is_published_when_the_token_after_it_comes(make):
    kv = make(num_blocks=8, block_size=2, prefix_caching=True)
    kv.add(1, [1])
    kv.admit(1, ALL)
    append(kv, {1: 2})  # sampled, not computed
    kv.add(2, [1, 2, 9])
    assert kv.admit(2, ALL)[0] == 0
    append(kv, {1: 3})  # for this, token 2 has been computed
    kv.add(3, [1, 2, 9])
    assert kv.admit(3, ALL)[0] == 2
    assert history(kv, 1) == [1, 2, 3]


def test_nothing_is_published_without_prefix_caching(make):
    kv = make(num_blocks=8, block_size=2, prefix_caching=False)
    kv.add(1, [1, 2, 3, 4, 5])
    kv.admit(1, ALL)
    kv.confirm(1, 5)
    kv.add(2, [1, 2, 3, 4, 5])
    assert kv.admit(2, ALL)[0] == 0


def test_released_blocks_of_an_ended_step_are_free_at_once_and_later_ones_wait(make):
    kv = make(num_blocks=4, block_size=2, prefix_caching=True)
    kv.end_step(3)
    for rid in (1, 2):
        kv.add(rid, [rid, rid])
        kv.admit(rid, ALL)
    assert kv.num_free_blocks == 2
    kv.release(1, 3)
    assert kv.num_free_blocks == 3
    kv.release(2, 4)
    assert (kv.num_free_blocks, kv.num_returning([])) == (3, 1)
    kv.end_step(4)
    assert (kv.num_free_blocks, kv.num_returning([])) == (4, 0)


def test_the_tail_of_a_released_table_is_evicted_before_its_head(make):
    kv = make(num_blocks=3, block_size=1, prefix_caching=True)
    kv.add(1, [1, 2, 3])
    kv.admit(1, ALL)
    kv.confirm(1, 3)
    kv.release(1, -1)
    kv.add(2, [9])
    kv.admit(2, ALL)
    kv.add(3, [1, 2, 3])
    assert kv.can_admit(3, ALL) is False  # two blocks are left, and it would take both and a third
    kv.release(2, -1)
    assert kv.admit(3, ALL)[0] == 2


def test_admitting_takes_nothing_when_blocks_are_short(make):
    kv = make(num_blocks=2, block_size=2, prefix_caching=True)
    kv.add(1, [1, 2, 3, 4, 5])
    assert kv.admit(1, ALL) is None
    assert kv.can_admit(1, ALL) is False
    kv.add(2, [1, 2, 3])
    assert kv.can_admit(2, ALL) is True
    assert kv.num_free_blocks == 2
    assert kv.admit(2, ALL) == (0, (0, 1))
    assert kv.grow([2]) is None
    kv.release(2, -1)
    assert kv.num_free_blocks == 2


def test_tokens_of_requests_that_are_gone_are_pointed_out(make):
    kv = make(num_blocks=2, block_size=2, prefix_caching=True)
    kv.add(5, [1])
    assert append(kv, {4: 7, 5: 8, 6: 9}) == [0, 2]
    assert history(kv, 5) == [1, 8]


def test_calls_that_make_no_sense_are_refused(make):
    with pytest.raises(ValueError, match="block_size=0: must be at least 1"):
        make(num_blocks=2, block_size=0, prefix_caching=True)
    with pytest.raises(ValueError, match="num_blocks=0: a KV cache needs at least one block"):
        make(num_blocks=0, block_size=2, prefix_caching=True)
    kv = make(num_blocks=2, block_size=2, prefix_caching=True)
    kv.add(1, [1, 2, 3])
    with pytest.raises(ValueError, match="rid=1 is in use"):
        kv.add(1, [1])
    kv.admit(1, ALL)
    with pytest.raises(ValueError, match="request 1 has a block table already"):
        kv.admit(1, ALL)
    with pytest.raises(ValueError, match="request 1 still has a block table"):
        kv.forget(1)
    for call in (kv.forget, kv.token_ids):
        with pytest.raises(KeyError, match="7"):
            call(7)


def test_more_computed_tokens_than_there_can_be_are_refused(make):
    """Such as a rank reports that answers twice for one request: nothing beyond a table or a history is read."""
    kv = make(num_blocks=4, block_size=2, prefix_caching=True)
    kv.add(1, [1, 2, 3])
    kv.admit(1, ALL)
    with pytest.raises(ValueError, match="4 tokens cannot be computed, with 3 known and 2 blocks for them"):
        kv.confirm(1, 4)
    append(kv, {1: 4})
    append(kv, {1: 5})
    append(kv, {1: 6})  # no block was granted for the fifth
    with pytest.raises(ValueError, match="6 tokens cannot be computed, with 6 known and 2 blocks for them"):
        append(kv, {1: 7})


@needs_native
def test_random_calls_give_the_same_in_both():
    """MirroredKVCache compares each call. Sizes at which evictions, shared prefixes and shortages are frequent."""
    num_hits = num_short = 0
    for seed in range(40):
        rng = random.Random(seed)
        size = rng.randint(1, 5)
        kv = MirroredKVCache(num_blocks=rng.randint(4, 24), block_size=size, prefix_caching=seed % 5 > 0)
        tables: dict[int, int] = {}  # rid -> its blocks
        step = rid = 0
        for _ in range(300):
            event = rng.random()
            if event < 0.3:
                rid += 1
                kv.add(rid, [rng.randrange(2) for _ in range(rng.randint(1, 4 * size))])
                admitted = kv.admit(rid, rng.choice([ALL, ALL, 0, size]))
                if admitted is None:
                    num_short += 1
                    kv.forget(rid)
                else:
                    num_hits += admitted[0] > 0
                    tables[rid] = len(admitted[1])
                    kv.confirm(rid, len(history(kv, rid)))
            elif event < 0.7 and tables:
                chosen = rng.sample(sorted(tables), rng.randint(1, len(tables)))
                full = [r for r in chosen if len(history(kv, r)) >= tables[r] * size]
                if kv.grow(full) is not None:
                    for r in full:
                        tables[r] += 1
                    append(kv, {r: rng.randrange(2) for r in [*chosen, 10**6]})
            elif event < 0.85 and tables:
                gone = rng.choice(sorted(tables))
                kv.num_returning([gone])
                kv.release(gone, step + rng.randint(-1, 2))
                del tables[gone]
                if rng.random() < 0.5:
                    kv.forget(gone)
            else:
                step += 1
                kv.end_step(step)
    assert min(num_hits, num_short) > 100


def test_the_python_books_stand_in_where_the_extension_is_switched_off(monkeypatch, caplog):
    kv_cache._native.cache_clear()
    monkeypatch.setenv("EPRUNTIME_DISABLE_EXTENSION", "1")
    try:
        kv = make_kv_cache(num_blocks=2, block_size=2, prefix_caching=True)
        assert isinstance(kv, ReferenceKVCache)
        assert "EPRUNTIME_DISABLE_EXTENSION=1" in caplog.text
    finally:
        kv_cache._native.cache_clear()
