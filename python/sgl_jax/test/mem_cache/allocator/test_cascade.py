"""``free_full`` then ``free_swa`` of one read-only array: the pages are looked at once, and nothing else is different."""

from __future__ import annotations

import numpy as np
import pytest

from sgl_jax.srt.mem_cache.allocator import free_group
from sgl_jax.srt.mem_cache.errors import DoubleFreeError, PartialPageError, SlotRangeError
from sgl_jax.test.mem_cache.allocator.build import dual, image, mapping_of, matrix, sizes, span


def frozen(slots):
    """A read-only copy."""
    copy = np.array(slots, np.int32)
    copy.flags.writeable = False
    return copy


@matrix
def test_each_half_leaves_in_its_own_call(page, dp):
    a = dual(page, 4, 4, dp)
    rank = dp - 1
    slots = frozen(a.alloc(3 * page, dp_rank=rank))
    before = mapping_of(a, rank).copy()
    a.free_full(slots, dp_rank=rank)
    assert sizes(a, rank) == (4 * page, page) and (mapping_of(a, rank) == before).all()
    a.free_swa(slots, dp_rank=rank)
    assert sizes(a, rank) == (4 * page, 4 * page) and not mapping_of(a, rank).any() and a.check() == []
    a.free_swa(slots, dp_rank=rank)
    assert sizes(a, rank) == (4 * page, 4 * page)


def test_pages_in_any_order_come_back_once():
    a = dual(4, 4, 4)
    slots = a.alloc(12)
    mixed = frozen(np.concatenate((slots[8:], slots[:8])))
    a.free_full(mixed, dp_rank=0)
    a.free_swa(mixed)
    assert sizes(a) == (16, 16) and a.check() == []


def test_in_a_group_both_halves_wait_for_its_end():
    a = dual(4, 4, 4)
    slots = frozen(a.alloc(8))
    with free_group(a):
        a.free_full(slots, dp_rank=0)
        a.free_swa(slots)
        assert sizes(a) == (8, 8) and not mapping_of(a).any()
    assert sizes(a) == (16, 16) and a.check() == []


def test_tombstones_of_a_cascade_have_no_swa_to_give():
    a = dual(4, 4, 4)
    slots = frozen(a.alloc(12))
    a.free_swa(slots[4:8])
    assert sizes(a) == (4, 8)
    a.free_full(slots, dp_rank=0)
    a.free_swa(slots)
    assert sizes(a) == (16, 16) and a.check() == []


def test_pages_that_were_handed_out_in_between_are_judged_anew():
    """The second half names a page of a new owner, who loses its SWA half and keeps two FULL slots: a page of two tokens."""
    a = dual(4, 2, 4)
    slots = frozen(a.alloc(8))  # FULL pages 1, 2 on SWA pages 1, 2
    a.free_full(slots, dp_rank=0)
    assert a.alloc_extend([0], [2], [-1], 2).tolist() == [4, 5]  # FULL page 1 again, on SWA page 3
    assert mapping_of(a)[4:8].tolist() == [12, 13, 0, 0]
    a.free_swa(slots)
    assert sizes(a) == (4, 12) and not mapping_of(a).any()
    assert [v.kind for v in a.check()] == ["swa_unmapped"]  # SWA page 1, by this caller's fault
    a.free_full(slots[:2], dp_rank=0)
    assert sizes(a) == (8, 12)


def test_only_the_array_that_was_given_last_is_known():
    a = dual(4, 4, 4)
    first, second = frozen(a.alloc(4)), frozen(a.alloc(4))
    a.free_full(first, dp_rank=0)
    a.free_full(second, dp_rank=0)
    a.free_swa(first)
    assert mapping_of(a)[4:12].tolist() == [0, 0, 0, 0, 8, 9, 10, 11]
    a.free_swa(second)
    assert sizes(a) == (16, 16) and a.check() == []


def test_the_same_ids_on_another_rank_are_other_pages():
    """On rank 1 page 1 belongs to a request of two tokens, which keeps its FULL half."""
    a = dual(4, 4, 4, 2)
    slots = frozen(a.alloc(4, dp_rank=0))
    assert a.alloc_extend([0], [2], [-1], 2, dp_rank=1).tolist() == slots[:2].tolist()
    a.free_full(slots, dp_rank=0)
    a.free_swa(slots, dp_rank=1)
    assert (sizes(a, 0), sizes(a, 1)) == ((16, 12), (12, 16))
    assert mapping_of(a, 0)[4:8].tolist() == [4, 5, 6, 7] and not mapping_of(a, 1).any()
    a.free_full(slots[:2], dp_rank=1)
    assert sizes(a, 1) == (16, 16)


def test_an_array_that_can_change_is_read_twice():
    a = dual(4, 4, 4)
    slots = a.alloc(8)
    named = slots[:4].copy()
    a.free_full(named, dp_rank=0)
    named[:] = slots[4:]
    a.free_swa(named)
    assert sizes(a) == (12, 12) and mapping_of(a)[4:12].tolist() == [4, 5, 6, 7, 0, 0, 0, 0]


def test_wrong_slots_are_named_in_strict_mode_and_ignored_without():
    a = dual(4, 4, 4)
    slots = a.alloc(8)
    before = image(a)
    with pytest.raises(PartialPageError, match=r"pages \[2\]"):
        a.free_full(frozen(slots[:6]), dp_rank=0)
    with pytest.raises(SlotRangeError, match=r"99"):
        a.free_full(frozen(span(396, 400)), dp_rank=0)
    with pytest.raises(SlotRangeError, match=r"reserved"):
        a.free_full(frozen(span(0, 4)), dp_rank=0)
    with pytest.raises(DoubleFreeError, match=r"pages \[3\]"):
        a.free_full(frozen(np.concatenate((slots[:4], span(12, 16)))), dp_rank=0)
    assert image(a) == before
    a.strict = False
    a.free_full(frozen(span(396, 400)), dp_rank=0)
    a.free_full(frozen(slots[:3]), dp_rank=0)
    assert image(a) == before
    twice = frozen(np.concatenate((slots, slots[:4], span(12, 16))))
    a.free_full(twice, dp_rank=0)
    a.free_swa(twice)
    assert sizes(a) == (16, 16) and a.check() == []
