"""Token and paged allocators as upstream's tests use them: free structures read as arrays, slots freed that nobody had."""

from __future__ import annotations

import unittest
from types import SimpleNamespace

import numpy as np

from sgl_jax.srt.mem_cache.allocator import (
    BaseTokenToKVPoolAllocator,
    PagedTokenToKVPoolAllocator,
    TokenToKVPoolAllocator,
)
from sgl_jax.test.contract.kit import ids
from sgl_jax.test.test_utils import CustomTestCase

KV = SimpleNamespace()


class Minimal(BaseTokenToKVPoolAllocator):
    """What a test double brings: the three abstract methods."""

    def clear(self, dp_rank=None): ...
    def alloc(self, need_size, dp_rank=0):
        return np.arange(1, need_size + 1, dtype=np.int32)

    def free(self, free_index, dp_rank=0): ...


class TestBase(CustomTestCase):
    def test_three_abstract_methods(self):
        a = Minimal(8, 1, KV, dp_size=2)
        self.assertEqual((a.size, a.page_size, a.size_per_rank, a.dp_size), (8, 1, 4, 2))
        self.assertIs(a.is_not_in_free_group, True)
        self.assertIs(a.get_kvcache(), KV)
        self.assertEqual(a.alloc(2).tolist(), [1, 2])
        for call in (a.backup_state, a.available_size, a.free_group_begin):
            with self.assertRaises(NotImplementedError):
                call()
        with self.assertRaises(TypeError):
            BaseTokenToKVPoolAllocator(8, 1, KV)


class TestTokenAllocator(CustomTestCase):
    def test_attributes_and_ascending_int32_ids_from_slot_one(self):
        a = TokenToKVPoolAllocator(8, KV)
        self.assertIsInstance(a, BaseTokenToKVPoolAllocator)
        self.assertEqual((a.size, a.page_size, a.dp_size, a.size_per_rank, a.origin_size), (8, 1, 1, 8, 8))
        self.assertIs(a.get_kvcache(), KV)
        self.assertIs(a._kvcache, KV)
        self.assertIs(a.is_not_in_free_group, True)
        self.assertIsInstance(a.debug_print(), str)
        out = a.alloc(3)
        self.assertEqual(out.dtype, np.int32)
        self.assertEqual(out.tolist(), [1, 2, 3])
        self.assertEqual(a.available_size(), 5)
        self.assertIsNone(a.alloc(6))
        self.assertEqual(a.available_size(), 5)
        empty = a.alloc(0)
        self.assertEqual((empty.dtype, empty.shape), (np.int32, (0,)))

    def test_free_slots_is_a_list_per_rank_of_int32_arrays(self):
        a = TokenToKVPoolAllocator(16, KV, dp_size=2)
        self.assertIsInstance(a.free_slots, list)
        self.assertEqual(len(a.free_slots), 2)
        self.assertEqual([len(s) for s in a.free_slots], [8, 8])
        self.assertEqual([int(x) for x in a.free_slots[1]], list(range(1, 9)))
        self.assertEqual(a.free_slots[0].dtype, np.int32)
        r0, r1 = a.alloc(3, dp_rank=0), a.alloc(3, dp_rank=1)
        self.assertEqual(r0.tolist(), r1.tolist())
        a.free(r1, dp_rank=1)
        self.assertEqual((a.available_size(dp_rank=0), a.available_size(dp_rank=1)), (5, 8))

    def test_rank_local_clear_gives_the_same_ids_again(self):
        a = TokenToKVPoolAllocator(16, KV, dp_size=2)
        first = a.alloc(4, dp_rank=1)
        a.alloc(4, dp_rank=0)
        a.free(ids(2), dp_rank=1)
        a.clear(dp_rank=1)
        self.assertEqual(a.alloc(4, dp_rank=1).tolist(), first.tolist())
        self.assertEqual(a.available_size(dp_rank=0), 4)

    def test_the_signature_default_rank_is_accepted(self):
        """Plain pools only: `dp_rank=0` is the seam's default; the dual allocator alone insists on a rank."""
        a = TokenToKVPoolAllocator(16, KV, dp_size=2)
        self.assertEqual(a.available_size(), 8)
        got = a.alloc(2)
        self.assertEqual(a.available_size(dp_rank=0), 6)
        a.free(got)
        self.assertEqual(a.available_size(dp_rank=0), 8)

    def test_slots_that_were_never_allocated_or_do_not_exist_are_ignored(self):
        a = TokenToKVPoolAllocator(8, KV)
        a.free(np.arange(100, 108, dtype=np.int32))
        a.free(ids(3, 4))
        a.free(np.empty((0,), np.int32))
        self.assertEqual(a.available_size(), 8)
        got = a.alloc(8)
        a.free(ids(5, 2))
        a.free(ids(2))
        self.assertEqual(a.available_size(), 2)
        self.assertEqual(sorted(got.tolist()), list(range(1, 9)))

    def test_group(self):
        a = TokenToKVPoolAllocator(8, KV)
        got = a.alloc(8)
        a.free_group_begin()
        self.assertIs(a.is_not_in_free_group, False)
        a.free(got[:2])
        a.free_group_begin()
        a.free(got[2:5])
        self.assertEqual(len(a.free_group[0]), 2)
        self.assertEqual(a.available_size(), 0)
        self.assertIsNone(a.alloc(1))
        a.free_group_end()
        self.assertIs(a.is_not_in_free_group, True)
        self.assertEqual(a.available_size(), 5)
        self.assertEqual(a.free_group, [[]])

    def test_clear_of_one_rank_leaves_group_mode(self):
        a = TokenToKVPoolAllocator(8, KV, dp_size=2)
        zero, one = a.alloc(4, dp_rank=0), a.alloc(4, dp_rank=1)
        a.free_group_begin()
        a.free(zero, dp_rank=0)
        a.free(one, dp_rank=1)
        a.clear(dp_rank=1)
        self.assertIs(a.is_not_in_free_group, True)
        self.assertEqual((a.available_size(dp_rank=0), a.available_size(dp_rank=1)), (4, 4))
        self.assertEqual(a.check(), [])

    def test_backup_and_restore(self):
        a = TokenToKVPoolAllocator(8, KV)
        a.alloc(2)
        state = a.backup_state()
        self.assertIsInstance(state, tuple)
        self.assertEqual(len(state), 2)
        a.alloc(3)
        a.restore_state(state)
        self.assertEqual(a.available_size(), 6)
        self.assertEqual(a.alloc(1).tolist(), [3])
        with self.assertRaises(AssertionError):
            a.restore_state((1, 2, 3))

    def test_what_only_paged_pools_do(self):
        a = TokenToKVPoolAllocator(8, KV)
        with self.assertRaises(NotImplementedError):
            a.alloc_extend([0], [1], [-1], 1)
        with self.assertRaises(NotImplementedError):
            a.alloc_decode([1], [-1])
        with self.assertRaises(NotImplementedError):
            a.get_cpu_copy(ids(1))
        with self.assertRaises(NotImplementedError):
            a.load_cpu_copy(None, ids(1))


class TestPagedAllocator(CustomTestCase):
    def test_pages_per_rank_floors(self):
        a = PagedTokenToKVPoolAllocator(64 * 4, 4, KV, dp_size=3)
        self.assertEqual((a.num_pages, a.pages_per_rank), (64, 21))
        self.assertEqual([len(a.free_pages[r]) for r in range(3)], [21, 21, 21])
        self.assertEqual(a.free_pages[2].tolist(), list(range(1, 22)))
        self.assertEqual([len(r) for r in a.release_pages], [0, 0, 0])
        self.assertEqual(a.available_size(), 84)
        self.assertIs(a.debug_mode, False)

    def test_alloc_is_page_contiguous_and_aligned(self):
        a = PagedTokenToKVPoolAllocator(16, 4, KV)
        out = a.alloc(8)
        self.assertEqual(out.tolist(), [4, 5, 6, 7, 8, 9, 10, 11])
        self.assertEqual(out.dtype, np.int32)
        with self.assertRaises(AssertionError):
            a.alloc(6)
        self.assertEqual(a.alloc(8).tolist()[-1], 16 + 4 - 1)
        self.assertIsNone(a.alloc(4))

    def test_freed_pages_wait_in_release_pages(self):
        a = PagedTokenToKVPoolAllocator(32, 4, KV)
        out = a.alloc(16)
        before = len(a.free_pages[0])
        a.free(out[8:16])
        a.free(out[0:4])
        self.assertEqual(len(a.free_pages[0]), before)
        both = np.concatenate((a.free_pages[0], a.release_pages[0]))
        self.assertEqual(sorted(both.tolist()), [1, 3, 4, 5, 6, 7, 8])
        self.assertEqual(a.available_size(), 28)
        a.merge_and_sort_free(dp_rank=0)
        self.assertEqual(a.free_pages[0].tolist(), [1, 3, 4, 5, 6, 7, 8])
        self.assertEqual(len(a.release_pages[0]), 0)

    def test_alloc_merges_only_when_short(self):
        a = PagedTokenToKVPoolAllocator(16, 4, KV)
        out = a.alloc(12)
        a.free(out)
        self.assertEqual(a.alloc(4).tolist(), [16, 17, 18, 19])
        self.assertEqual(len(a.release_pages[0]), 3)
        self.assertEqual(a.alloc(8).tolist(), [4, 5, 6, 7, 8, 9, 10, 11])

    def test_a_token_names_its_page_and_repeats_are_ignored(self):
        a = PagedTokenToKVPoolAllocator(16, 4, KV)
        out = a.alloc(8)
        a.free(out[:1])
        self.assertEqual(a.available_size(), 12)
        a.free(out[:4])
        a.free(ids(4, 5, 6, 7, 4))
        self.assertEqual(a.available_size(), 12)

    def test_extend_fills_the_page_then_whole_then_partial(self):
        a = PagedTokenToKVPoolAllocator(64, 4, KV)
        self.assertEqual(a.alloc_extend([0], [6], [-1], 6).tolist(), [4, 5, 6, 7, 8, 9])
        out = a.alloc_extend(ids(6, 0), ids(13, 3), ids(9, -1), 10)
        self.assertEqual(out.dtype, np.int32)
        self.assertEqual(out.tolist(), [10, 11, 12, 13, 14, 15, 16, 20, 21, 22])
        self.assertEqual(a.available_size(), 64 - 5 * 4)

    def test_extend_returns_none_when_short(self):
        a = PagedTokenToKVPoolAllocator(8, 4, KV)
        self.assertIsNone(a.alloc_extend([0], [9], [-1], 9, dp_rank=0))
        self.assertEqual(a.available_size(), 8)

    def test_decode_takes_a_page_only_at_a_page_start(self):
        a = PagedTokenToKVPoolAllocator(16, 4, KV)
        a.alloc_extend([0], [4], [-1], 4)
        self.assertEqual(a.alloc_decode(ids(5), ids(7)).tolist(), [8])
        self.assertEqual(a.alloc_decode(ids(6), ids(8)).tolist(), [9])
        self.assertEqual(a.available_size(), 8)
        a.alloc(8)
        self.assertIsNone(a.alloc_decode(ids(9), ids(11)))

    def test_debug_mode_asserts_last_loc(self):
        a = PagedTokenToKVPoolAllocator(16, 4, KV, debug_mode=True)
        a.alloc_extend([0], [6], [-1], 6)
        with self.assertRaises(AssertionError):
            a.alloc_extend([6], [7], [8], 1)

    def test_group_counts_one_entry_per_call(self):
        a = PagedTokenToKVPoolAllocator(32, 4, KV, dp_size=2)
        out = a.alloc(12, dp_rank=1)
        a.free_group_begin()
        self.assertIsInstance(a.free_group, list)
        self.assertEqual(a.free_group, [[], []])
        for i in range(3):
            a.free(out[4 * i : 4 * i + 4], dp_rank=1)
        self.assertEqual((len(a.free_group[0]), len(a.free_group[1])), (0, 3))
        self.assertEqual(a.available_size(dp_rank=1), 4)
        a.free_group_end()
        self.assertEqual(a.free_group, [[], []])
        self.assertEqual(a.available_size(dp_rank=1), 16)
        self.assertEqual(a.available_size(dp_rank=0), 16)

    def test_backup_is_a_tuple_of_per_rank_copies(self):
        a = PagedTokenToKVPoolAllocator(32, 4, KV, dp_size=2)
        a.free(a.alloc(8, dp_rank=1)[:4], dp_rank=1)
        free, released = a.backup_state()
        self.assertEqual([len(f) for f in free], [4, 2])
        self.assertEqual([r.tolist() for r in released], [[], [1]])
        a.alloc(8, dp_rank=1)
        a.restore_state((free, released))
        self.assertEqual(a.available_size(dp_rank=1), 12)

    def test_the_newer_dcp_size_is_accepted(self):
        self.assertEqual(PagedTokenToKVPoolAllocator(16, 4, KV, False, 1, dcp_size=1).available_size(), 16)


if __name__ == "__main__":
    unittest.main()
