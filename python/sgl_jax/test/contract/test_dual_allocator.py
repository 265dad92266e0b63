"""The dual allocator as upstream's tests poke it: mapping read, copied, written; sub-allocators replaced; groups."""

from __future__ import annotations

import unittest
from unittest.mock import MagicMock

import numpy as np

from sgl_jax.srt.mem_cache.allocator import (
    PagedTokenToKVPoolAllocator,
    SWATokenToKVPoolAllocator,
    TokenToKVPoolAllocator,
)
from sgl_jax.srt.mem_cache.memory_pool import SWAKVPool
from sgl_jax.test.contract.kit import ids, swa_allocator
from sgl_jax.test.test_utils import CustomTestCase


class TestShape(CustomTestCase):
    def test_asserts_a_swa_pool(self):
        with self.assertRaises(AssertionError):
            SWATokenToKVPoolAllocator(8, 8, MagicMock())

    def test_a_pool_made_without_init_is_enough(self):
        pool = SWAKVPool.__new__(SWAKVPool)
        a = SWATokenToKVPoolAllocator(8, 4, pool)
        self.assertIs(pool.full_to_swa_index_mapping, a.full_to_swa_index_mapping)

    def test_a_mocked_pool_with_the_spec_is_enough(self):
        pool = MagicMock(spec=SWAKVPool)
        a = SWATokenToKVPoolAllocator(8, 4, pool)
        self.assertIs(pool.full_to_swa_index_mapping, a.full_to_swa_index_mapping)

    def test_sub_allocators_and_sizes(self):
        a = swa_allocator(64, 32)
        self.assertIsInstance(a.full_attn_allocator, TokenToKVPoolAllocator)
        self.assertIsInstance(a.swa_attn_allocator, TokenToKVPoolAllocator)
        self.assertEqual((a.size, a.size_full, a.size_swa, a.page_size), (64, 64, 32, 1))
        self.assertEqual((a.full_attn_allocator.size, a.swa_attn_allocator.size_per_rank), (64, 32))
        self.assertEqual(len(a.swa_attn_allocator.free_slots[0]), 32)
        self.assertEqual((a.available_size(), a.full_available_size(), a.swa_available_size()), (32, 64, 32))
        p = swa_allocator(64, 32, page_size=4, dp_size=2)
        self.assertIsInstance(p.swa_attn_allocator, PagedTokenToKVPoolAllocator)
        self.assertEqual(p.swa_attn_allocator.page_size, 4)
        self.assertEqual([len(x) for x in p.swa_attn_allocator.free_pages], [4, 4])
        self.assertEqual([len(x) for x in p.full_attn_allocator.release_pages], [0, 0])
        with self.assertRaises(NotImplementedError):
            a.backup_state()
        with self.assertRaises(NotImplementedError):
            a.restore_state(None)

    def test_mapping_shape_and_alias(self):
        a = swa_allocator(64, 32, page_size=4)
        self.assertIsInstance(a.full_to_swa_index_mapping, np.ndarray)
        self.assertEqual(a.full_to_swa_index_mapping.shape, (68,))
        self.assertEqual(a.full_to_swa_index_mapping.dtype, np.int32)
        self.assertFalse(a.full_to_swa_index_mapping.any())
        self.assertIs(a.get_kvcache().full_to_swa_index_mapping, a.full_to_swa_index_mapping)
        b = swa_allocator(64, 32, page_size=4, dp_size=2)
        self.assertIsInstance(b.full_to_swa_index_mapping, list)
        self.assertEqual([m.shape for m in b.full_to_swa_index_mapping], [(36,), (36,)])
        self.assertIs(b.get_kvcache().full_to_swa_index_mapping, b.full_to_swa_index_mapping)


class TestAlloc(CustomTestCase):
    def test_alloc_maps_and_keeps_offsets(self):
        a = swa_allocator(64, 32, page_size=4)
        full = a.alloc(8)
        self.assertEqual(full.dtype, np.int32)
        swa = a.full_to_swa_index_mapping[full]
        self.assertTrue((swa > 0).all())
        self.assertEqual((swa % 4).tolist(), [0, 1, 2, 3, 0, 1, 2, 3])
        self.assertEqual(a.full_to_swa_index_mapping[full][::4].tolist(), [4, 8])

    def test_swa_failure_by_lambda_leaves_everything_as_before(self):
        for page in (1, 4):
            with self.subTest(page=page):
                a = swa_allocator(64, 32, page_size=page)
                a.alloc(8)
                mapping = a.full_to_swa_index_mapping.copy()
                full_before = a.full_available_size()
                real = a.swa_attn_allocator.alloc
                a.swa_attn_allocator.alloc = lambda *args, **kwargs: None
                self.assertIsNone(a.alloc(4))
                self.assertEqual(a.full_available_size(), full_before)
                np.testing.assert_array_equal(a.full_to_swa_index_mapping, mapping)
                a.swa_attn_allocator.alloc = real
                self.assertEqual(a.alloc(4).tolist()[0], 9 if page == 1 else 12)

    def test_swa_failure_with_the_exact_lambda_signature(self):
        a = swa_allocator(64, 32, dp_size=2)
        a.swa_attn_allocator.alloc = lambda need_size, dp_rank=0: None
        self.assertIsNone(a.alloc(4, dp_rank=1))
        self.assertEqual(a.full_available_size(dp_rank=1), 32)

    def test_swa_short_is_none(self):
        a = swa_allocator(64, 8)
        self.assertIsNone(a.alloc(9))
        self.assertEqual((a.full_available_size(), a.swa_available_size()), (64, 8))
        self.assertIsNotNone(a.alloc(8))

    def test_extend_and_decode(self):
        a = swa_allocator(64, 32, page_size=4)
        first = a.alloc_extend(ids(0), ids(6), ids(-1), 6)
        self.assertEqual(first.tolist(), [4, 5, 6, 7, 8, 9])
        more = a.alloc_extend([6], [9], [9], 3)
        self.assertEqual(more.tolist(), [10, 11, 12])
        self.assertEqual(a.full_to_swa_index_mapping[more].tolist(), [10, 11, 12])
        self.assertEqual(a.alloc_decode(ids(10), ids(12)).tolist(), [13])
        self.assertEqual(a.count_swa_mapped(ids(4, 13, 14)), 2)

    def test_extend_rollback_keeps_live_pages(self):
        a = swa_allocator(64, 16, page_size=4)
        first = a.alloc_extend([0], [6], [-1], 6)
        mapping = a.full_to_swa_index_mapping.copy()
        self.assertIsNone(a.alloc_extend([6], [30], [9], 24))
        np.testing.assert_array_equal(a.full_to_swa_index_mapping, mapping)
        self.assertEqual((a.full_available_size(), a.swa_available_size()), (56, 8))
        self.assertEqual(a.count_swa_mapped(first), 6)

    def test_decode_rollback(self):
        a = swa_allocator(64, 8, page_size=4)
        a.alloc_extend([0], [8], [-1], 8)
        self.assertIsNone(a.alloc_decode(ids(9), ids(11)))
        self.assertEqual((a.full_available_size(), a.swa_available_size()), (56, 0))

    def test_ranks_are_equal_and_local(self):
        a = swa_allocator(64, 32, page_size=4, dp_size=2)
        r0, r1 = a.alloc(8, dp_rank=0), a.alloc(8, dp_rank=1)
        self.assertEqual(r0.tolist(), r1.tolist())
        a.free(r1, dp_rank=1)
        self.assertTrue((a.full_to_swa_index_mapping[0][r0] > 0).all())
        self.assertFalse(a.full_to_swa_index_mapping[1][r1].any())


class TestTranslateAndFree(CustomTestCase):
    def test_translate_is_a_copy(self):
        a = swa_allocator()
        full = a.alloc(4)
        swa = a.translate_full_to_swa(full, dp_rank=0)
        self.assertEqual((swa.dtype, swa.tolist()), (np.int32, [1, 2, 3, 4]))
        swa[:] = 0
        self.assertEqual(a.full_to_swa_index_mapping[full].tolist(), [1, 2, 3, 4])
        empty = np.empty((0,), np.int32)
        out = a.translate_full_to_swa(empty, dp_rank=0)
        self.assertEqual((out.dtype, out.shape), (np.int32, (0,)))
        self.assertIsNot(out, empty)

    def test_unmapped_raises_with_rank_and_index(self):
        a = swa_allocator()
        a.alloc(4)
        a.free_swa(ids(3))
        with self.assertRaisesRegex(ValueError, r"dp_rank=0.*3"):
            a.translate_full_to_swa(ids(2, 3), dp_rank=0)
        out = a.translate_full_to_swa(ids(2, 3), dp_rank=0, require_mapped=False)
        self.assertEqual(out.tolist(), [2, 0])

    def test_free_full_leaves_swa_and_mapping(self):
        for page in (1, 4):
            with self.subTest(page=page):
                a = swa_allocator(64, 32, page_size=page)
                full = a.alloc(8)
                a.free_full(full, dp_rank=0)
                self.assertEqual((a.full_available_size(), a.swa_available_size()), (64, 24))
                self.assertEqual(a.count_swa_mapped(full), 8)
                a.free_swa(full)
                self.assertEqual(a.swa_available_size(), 32)

    def test_free_swa_takes_full_indices_and_repeats(self):
        a = swa_allocator(64, 32, page_size=4)
        full = a.alloc(8)
        a.free_swa(full[:4])
        self.assertFalse(a.full_to_swa_index_mapping[full[:4]].any())
        self.assertEqual((a.full_available_size(), a.swa_available_size()), (56, 28))
        a.free_swa(full[:4])
        self.assertEqual(a.swa_available_size(), 28)
        a.free(full)
        self.assertEqual((a.full_available_size(), a.swa_available_size()), (64, 32))

    def test_composite_free_of_nothing(self):
        a = swa_allocator()
        a.free(np.empty((0,), np.int32))
        self.assertEqual((a.full_available_size(), a.swa_available_size()), (64, 32))

    def test_transfer(self):
        a = swa_allocator()
        source, target = a.alloc(4), a.alloc(4)
        a.free_swa(target)
        swa = a.translate_full_to_swa(source, dp_rank=0)
        a.transfer_swa_mapping(source, target, dp_rank=0)
        np.testing.assert_array_equal(a.full_to_swa_index_mapping[target], swa)
        self.assertFalse(a.full_to_swa_index_mapping[source].any())
        self.assertEqual((a.full_available_size(), a.swa_available_size()), (60, 28))

    def test_transfer_refuses_by_value_error(self):
        a = swa_allocator()
        source, target = a.alloc(4), a.alloc(4)
        with self.assertRaises(ValueError):
            a.transfer_swa_mapping(source, target[:3], dp_rank=0)
        with self.assertRaises(ValueError):
            a.transfer_swa_mapping(source, target, dp_rank=0)
        a.free_swa(target)
        a.free_swa(source[:1])
        with self.assertRaises(ValueError):
            a.transfer_swa_mapping(source, target, dp_rank=0)
        self.assertEqual(a.full_available_size(), 56)

    def test_an_omitted_rank_raises_only_above_dp_one(self):
        a = swa_allocator(64, 32, dp_size=2)
        got = a.alloc(2, dp_rank=1)
        for call in (a.free, a.free_swa, a.free_full, a.count_swa_mapped, a.translate_full_to_swa):
            with self.assertRaises(ValueError):
                call(got)

    def test_a_written_mapping_is_what_calls_see(self):
        a = swa_allocator()
        full = a.alloc(4)
        a.full_to_swa_index_mapping[full[1]] = 0
        self.assertEqual(a.count_swa_mapped(full), 3)
        with self.assertRaisesRegex(ValueError, r"dp_rank=0.*2"):
            a.translate_full_to_swa(full, dp_rank=0)
        a.full_to_swa_index_mapping[full[1]] = 2
        a.free(full)
        self.assertEqual((a.full_available_size(), a.swa_available_size()), (64, 32))


class TestGroupsAndClear(CustomTestCase):
    def test_three_kinds_of_frees_share_dedup(self):
        for page in (1, 4):
            with self.subTest(page=page):
                a = swa_allocator(64, 32, page_size=page)
                full = a.alloc(8)
                a.free_group_begin()
                self.assertIs(a.is_not_in_free_group, False)
                a.free_swa(full[:4])
                a.free_full(full[:4], dp_rank=0)
                a.free(full)
                a.free(full)
                self.assertFalse(a.full_to_swa_index_mapping[full].any())
                self.assertEqual((a.full_available_size(), a.swa_available_size()), (56, 24))
                a.free_group_begin()
                a.free_group_end()
                self.assertIs(a.is_not_in_free_group, True)
                self.assertEqual((a.full_available_size(), a.swa_available_size()), (64, 32))
                for sub, count in ((a.full_attn_allocator, 64), (a.swa_attn_allocator, 32)):
                    if page == 1:
                        self.assertEqual(sorted(sub.free_slots[0].tolist()), list(range(1, count + 1)))
                    else:
                        pages = np.concatenate((sub.free_pages[0], sub.release_pages[0]))
                        self.assertEqual(sorted(pages.tolist()), list(range(1, count // 4 + 1)))

    def test_alloc_fails_until_the_end(self):
        a = swa_allocator(8, 8)
        full = a.alloc(8)
        a.free_group_begin()
        a.free(full)
        self.assertIsNone(a.alloc(1))
        a.free_group_end()
        self.assertEqual(sorted(a.alloc(8).tolist()), list(range(1, 9)))

    def test_free_group_aliases_the_full_queue(self):
        a = swa_allocator(64, 32, page_size=4, dp_size=2)
        full = a.alloc(8, dp_rank=1)
        a.free_group_begin()
        a.free(full, dp_rank=1)
        self.assertIs(a.free_group, a.full_attn_allocator.free_group)
        self.assertEqual([len(q) for q in a.free_group], [0, 1])
        a.free_group_end()
        self.assertEqual(a.free_group, [[], []])

    def test_clear_all(self):
        a = swa_allocator(64, 32, page_size=4, dp_size=2)
        first = a.alloc(8, dp_rank=1)
        a.free_group_begin()
        a.free(first, dp_rank=1)
        a.clear()
        self.assertIs(a.is_not_in_free_group, True)
        self.assertFalse(any(m.any() for m in a.full_to_swa_index_mapping))
        self.assertEqual(a.alloc(8, dp_rank=1).tolist(), first.tolist())

    def test_rank_local_clear_keeps_group_and_other_queues(self):
        a = swa_allocator(64, 32, page_size=4, dp_size=2)
        zero, one = a.alloc(8, dp_rank=0), a.alloc(8, dp_rank=1)
        a.free_group_begin()
        a.free(zero, dp_rank=0)
        a.free(one, dp_rank=1)
        a.clear(dp_rank=1)
        self.assertIs(a.is_not_in_free_group, False)
        self.assertEqual([len(q) for q in a.free_group], [1, 0])
        self.assertEqual((a.full_available_size(dp_rank=1), a.full_available_size(dp_rank=0)), (32, 24))
        again = a.alloc(8, dp_rank=1)
        self.assertEqual(again.tolist(), one.tolist())
        a.free_group_end()
        self.assertEqual((a.full_available_size(dp_rank=0), a.swa_available_size(dp_rank=0)), (32, 16))
        self.assertEqual((a.full_available_size(dp_rank=1), a.swa_available_size(dp_rank=1)), (24, 8))
        self.assertTrue((a.full_to_swa_index_mapping[1][again] > 0).all())


if __name__ == "__main__":
    unittest.main()
