"""TokenToKVPoolAllocator: the seam at page size 1."""

from __future__ import annotations

import numpy as np
import pytest

from sgl_jax.srt.mem_cache.allocator import TokenToKVPoolAllocator, free_group
from sgl_jax.srt.mem_cache.errors import DoubleFreeError, SlotRangeError
from sgl_jax.test.mem_cache.allocator.build import ids


def test_alloc_copies_out_ascending_int32_slots_from_one():
    a = TokenToKVPoolAllocator(8, kvcache="pool")
    got = a.alloc(3)
    assert got.dtype == np.int32 and got.tolist() == [1, 2, 3]
    got[:] = 77  # a caller's array is its own
    assert a.alloc(2).tolist() == [4, 5] and a.get_kvcache() == "pool"
    assert a.alloc(4) is None and a.available_size() == 3
    assert a.alloc(0).dtype == np.int32


def test_ranks_return_equal_local_ids_and_do_not_see_each_other():
    """D49: equal integers on two ranks are different slots."""
    a = TokenToKVPoolAllocator(8, None, dp_size=2)
    assert a.size_per_rank == 4 and a.origin_size == 8
    assert a.alloc(4, dp_rank=0).tolist() == a.alloc(4, dp_rank=1).tolist() == [1, 2, 3, 4]
    a.free(ids(2, 3), dp_rank=1)
    assert (a.available_size(0), a.available_size(1)) == (0, 2)
    a.clear(dp_rank=0)
    assert a.alloc(2, dp_rank=0).tolist() == [1, 2] and a.available_size(1) == 2


def test_free_slots_lists_every_free_slot_per_rank():
    a = TokenToKVPoolAllocator(5, None)
    a.alloc(3)
    a.free(ids(2))
    assert sorted(a.free_slots[0].tolist()) == [2, 4, 5] and len(a.free_slots) == 1
    assert a.free_pages[0].tolist() == [4, 5] and a.release_pages[0].tolist() == [2]
    a.merge_and_sort_free()
    assert a.free_pages[0].tolist() == [2, 4, 5] and a.release_pages[0].size == 0


def test_freeing_a_slot_twice_hands_it_out_once():
    """Fault 4: at page size 1 a second free of a FULL slot is ignored."""
    a = TokenToKVPoolAllocator(3, None)
    a.alloc(3)
    a.free(ids(2, 2))
    a.free(ids(2))
    assert a.available_size() == 1 and a.alloc(1).tolist() == [2] and a.alloc(1) is None
    assert a.check() == []


def test_slots_that_were_never_allocated_are_ignored_by_default():
    a = TokenToKVPoolAllocator(16, None)
    a.free(np.arange(100, 108))
    a.free([3, 4])
    assert a.available_size() == 16 and a.alloc(2).tolist() == [1, 2] and a.check() == []


def test_strict_mode_raises_instead():
    a = TokenToKVPoolAllocator(4, None, strict=True)
    a.alloc(2)
    with pytest.raises(DoubleFreeError, match=r"dp_rank=0 pool=full: slots \[4\] are already free"):
        a.free(ids(1, 4))
    with pytest.raises(SlotRangeError, match=r"slots \[5\] are outside 1\.\.4"):
        a.free(ids(1, 5))
    assert a.available_size() == 2


def test_a_group_defers_and_survives_a_second_begin():
    a = TokenToKVPoolAllocator(4, None)
    a.alloc(4)
    a.free_group_begin()
    a.free(ids(1))
    a.free_group_begin()
    a.free(ids(1, 3))
    assert not a.is_not_in_free_group and a.available_size() == 0 and a.alloc(1) is None
    assert [len(q) for q in a.free_group] == [2]
    a.free_group_end()
    assert a.is_not_in_free_group and a.free_group == [[]] and a.alloc(2).tolist() == [1, 3]


def test_clear_leaves_group_mode_and_drops_the_queue():
    a = TokenToKVPoolAllocator(4, None)
    a.alloc(2)
    a.free_group_begin()
    a.free(ids(1))
    a.clear()
    assert a.is_not_in_free_group and a.free_group == [[]]
    a.free_group_end()
    assert a.available_size() == 4 and a.check() == []


def test_a_rank_local_clear_leaves_group_mode_and_loses_nobodys_queue():
    a = TokenToKVPoolAllocator(8, None, dp_size=2)
    for rank in (0, 1):
        a.alloc(4, dp_rank=rank)
    a.free_group_begin()
    for rank in (0, 1):
        a.free(ids(1), dp_rank=rank)
    a.clear(dp_rank=0)
    assert a.is_not_in_free_group and a.free_group == [[], []]
    assert (a.available_size(0), a.available_size(1)) == (4, 1) and a.check() == []


def test_an_omitted_rank_is_the_seams_default_and_an_error_in_strict_mode():
    a = TokenToKVPoolAllocator(8, None, dp_size=2)
    a.alloc(3)
    assert (a.available_size(0), a.available_size(1)) == (1, 4)
    a.strict = True
    with pytest.raises(ValueError, match="dp_rank was omitted"):
        a.alloc(1)


def test_backup_and_restore_undo_an_allocation():
    a = TokenToKVPoolAllocator(6, None)
    a.alloc(3)
    a.free(ids(2))
    state = a.backup_state()
    assert isinstance(state, tuple) and len(state) == 2
    a.alloc(4)
    a.restore_state(state)
    assert a.available_size() == 4 and a.free_pages[0].tolist() == [4, 5, 6] and a.check() == []
    with pytest.raises(AssertionError, match="pair"):
        a.restore_state((state[0],))


def test_bad_arguments_name_the_limit():
    with pytest.raises(ValueError, match="dp_size=0 must be at least 1"):
        TokenToKVPoolAllocator(4, None, dp_size=0)
    with pytest.raises(ValueError, match="size=-1"):
        TokenToKVPoolAllocator(-1, None)
    a = TokenToKVPoolAllocator(4, None)
    with pytest.raises(ValueError, match="need_size=-1"):
        a.alloc(-1)
    with pytest.raises(NotImplementedError, match="not paged"):
        a.alloc_extend([0], [1], [-1], 1)
    with pytest.raises(NotImplementedError, match="not paged"):
        a.alloc_decode([1], [-1])
    for copy in (a.get_cpu_copy, a.load_cpu_copy):
        with pytest.raises(NotImplementedError, match="host"):
            copy(ids(1))


def test_debug_print_shows_every_rank():
    a = TokenToKVPoolAllocator(8, None, dp_size=2)
    a.alloc(1, dp_rank=1)
    assert "dp=0: 4" in a.debug_print() and "dp=1: 3" in a.debug_print()


def test_the_context_manager_joins_an_open_group_and_flushes_on_errors():
    """DECISIONS 8: only the outermost group flushes."""
    a = TokenToKVPoolAllocator(4, None)
    a.alloc(4)
    with free_group(a):
        with free_group(a):
            a.free(ids(1))
        assert a.available_size() == 0
    assert a.available_size() == 1
    with pytest.raises(RuntimeError, match="boom"), free_group(a):
        a.free(ids(2))
        raise RuntimeError("boom")
    assert a.available_size() == 2 and a.is_not_in_free_group
