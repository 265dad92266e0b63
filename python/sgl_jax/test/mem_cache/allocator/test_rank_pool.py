"""The free structure of one pool: states, window, released buffer."""

from __future__ import annotations

import numpy as np
import pytest

from sgl_jax.srt.mem_cache.allocator.rank_pool import ALLOCATED, FREE, PENDING, RESERVED, IdBuffer, RankPool
from sgl_jax.srt.mem_cache.errors import DoubleFreeError, SlotRangeError
from sgl_jax.test.mem_cache.allocator.build import ids, span


def pool(count: int = 8) -> RankPool:
    return RankPool(count, rank=1, label="swa", unit="page")


def test_a_fresh_pool_hands_out_ascending_ids_from_one():
    p = pool()
    assert p.take(3).tolist() == [1, 2, 3]
    assert p.take(2).tolist() == [4, 5]
    assert p.available == 3
    assert p.state.tolist() == [RESERVED] + [ALLOCATED] * 5 + [FREE] * 3


def test_a_short_take_changes_nothing():
    p = pool(3)
    p.take(1)
    assert p.take(3) is None
    assert p.available == 2 and p.take(2).tolist() == [2, 3]
    assert p.take(0).tolist() == [] and p.take(1) is None


def test_freed_ids_wait_until_the_window_runs_dry_and_come_back_sorted():
    p = pool(6)
    p.take(6)
    p.surrender(p.owned(ids(5, 2, 4), strict=True), defer=False)
    assert p.window().tolist() == [] and p.released().tolist() == [5, 2, 4]
    assert p.take(2).tolist() == [2, 4]
    assert p.window().tolist() == [5] and p.released().tolist() == []


def test_merge_of_few_ids_sorts_them_instead_of_scanning_the_pool():
    p = pool(1000)
    p.take(1000)
    p.surrender(ids(700, 3, 41), defer=False)
    p.state[999] = FREE  # a scan would find it; the sort of released ids does not
    p.merge()
    assert p.window().tolist() == [3, 41, 700]


def test_merge_of_many_ids_rebuilds_the_window_from_the_states():
    p = pool(16)
    p.take(16)
    p.surrender(ids(9, 4, 12, 1), defer=False)
    p.merge()
    assert p.window().tolist() == [1, 4, 9, 12]


def test_owned_drops_free_pending_reserved_and_foreign_ids():
    p = pool(8)
    p.take(4)
    p.surrender(ids(2), defer=True)
    assert p.owned(ids(4, 0, 2, 7, 3, -5, 900, 3), strict=False).tolist() == [4, 3]


@pytest.mark.parametrize(
    "named,error,text",
    [
        ([1, 7], DoubleFreeError, r"dp_rank=1 pool=swa: pages \[7\] are already free"),
        ([1, 99], SlotRangeError, r"dp_rank=1 pool=swa: pages \[99\] are outside 1..8"),
        ([-1], SlotRangeError, r"pages \[-1\] are outside"),
        ([0, 1], SlotRangeError, "page 0 is reserved"),
    ],
)
def test_strict_owned_names_rank_pool_and_ids(named, error, text):
    p = pool(8)
    p.take(4)
    with pytest.raises(error, match=text):
        p.owned(ids(*named), strict=True)
    assert p.available == 4


def test_strict_owned_accepts_what_the_open_group_already_surrendered():
    p = pool(8)
    p.take(4)
    p.surrender(p.owned(ids(1, 2), strict=True), defer=True)
    assert p.owned(ids(2, 3), strict=True).tolist() == [3]


@pytest.mark.parametrize(
    "named,distinct",
    [([3, 1, 3, 1, 2], {1, 2, 3}), ([1, 2, 3], {1, 2, 3}), ([2, 2], {2}), ([], set()), ([5], {5})],
)
def test_distinct_keeps_one_of_each(named, distinct):
    out = pool().distinct(ids(*named)).tolist()
    assert set(out) == distinct and len(out) == len(distinct)


def test_pending_is_neither_owned_nor_allocatable_until_the_flush():
    p = pool(4)
    p.take(4)
    p.surrender(ids(2, 3), defer=True)
    assert p.available == 0 and p.take(1) is None
    assert p.mask(PENDING).tolist() == [False, False, True, True, False]
    assert p.pending().tolist() == [2, 3]
    assert p.flush() == 2 and p.flush() == 0
    assert p.available == 2 and p.take(2).tolist() == [2, 3]


@pytest.mark.parametrize("takes", [[2], [3], [1, 3], [1, 4], [5]])
def test_rewind_restores_window_released_and_states_even_across_a_merge(takes):
    p = pool(8)
    p.take(8)
    p.surrender(ids(6, 2, 7), defer=False)
    p.merge()
    p.surrender(ids(4, 1), defer=False)
    before = (p.window().tolist(), p.released().tolist(), p.state.tolist())
    mark = p.mark()
    taken = np.concatenate([p.take(n) for n in takes]).tolist()
    assert sorted(p.rewind(mark).tolist()) == sorted(taken)
    assert (p.window().tolist(), p.released().tolist(), p.state.tolist()) == before


def test_rewind_returns_exactly_the_new_units():
    p = pool(8)
    kept = p.take(3).copy()
    mark = p.mark()
    p.take(2)
    assert p.rewind(mark).tolist() == [4, 5]
    assert p.owned(kept, strict=True).tolist() == [1, 2, 3]


def test_reset_forgets_everything_and_starts_over():
    p = pool(4)
    p.take(3)
    p.surrender(ids(1), defer=True)
    p.reset()
    assert p.available == 4 and p.pending().size == 0 and p.take(4).tolist() == [1, 2, 3, 4]


def test_restore_sets_the_lists_and_keeps_pending():
    p = pool(6)
    p.take(5)
    p.surrender(ids(5), defer=True)
    p.restore(ids(2, 6), ids(1))
    assert p.state.tolist() == [RESERVED, FREE, FREE, ALLOCATED, ALLOCATED, PENDING, FREE]
    assert p.available == 3 and p.take(3).tolist() == [1, 2, 6]


def test_the_id_buffer_grows_and_keeps_order():
    buffer = IdBuffer()
    for start in range(0, 300, 30):
        buffer.append(span(start, start + 30))
    assert buffer.view().tolist() == list(range(300)) and buffer.size == 300
