"""Request lifecycle of the unified cache with fakes: receipts, rows, caps, reclaim."""

from __future__ import annotations

import unittest

import numpy as np

from sgl_jax.srt.mem_cache.allocator import TokenToKVPoolAllocator
from sgl_jax.srt.mem_cache.base_prefix_cache import DecLockRefParams, InsertParams, MatchPrefixParams
from sgl_jax.srt.mem_cache.memory_pool import ReqToTokenPool
from sgl_jax.srt.mem_cache.radix_cache import RadixKey
from sgl_jax.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sgl_jax.test.contract.kit import SWA, fake_req, swa_allocator, unified, without
from sgl_jax.test.test_utils import CustomTestCase


class Base(CustomTestCase):
    def build(self, page=1, window=4, dp=1, **kw):
        self.allocator = swa_allocator(64, 64, page, dp)
        self.pool = ReqToTokenPool(8, 64)
        self.cache = unified(self.allocator, page, window, self.pool, **kw)

    def request(self, n, row=0, rank=0, start=0, **fields):
        tokens = list(range(start, start + n))
        req = fake_req(
            origin_input_ids=tokens, fill_ids=list(tokens), req_pool_idx=row, dp_rank=rank,
            last_node=self.cache.root_node, kv_committed_len=n, kv_allocated_len=n, **fields,
        )  # fmt: skip
        page = self.allocator.page_size
        if page == 1:
            slots = self.allocator.alloc(n, dp_rank=rank)
        else:
            slots = self.allocator.alloc_extend([0], [n], [-1], n, dp_rank=rank)
        self.pool.req_to_token[row, :n] = slots
        return req

    def free(self, rank=0):
        return self.allocator.full_available_size(rank), self.allocator.swa_available_size(rank)

    def sums(self, rank=0):
        c = self.cache
        return (
            c.full_evictable_size(rank),
            c.full_protected_size(rank),
            c.swa_evictable_size(rank),
            c.swa_protected_size(rank),
        )


class TestFinished(Base):
    def test_insert(self):
        self.build(page=4)
        req = self.request(10)
        self.cache.cache_finished_req(req)
        self.assertEqual((self.sums(), self.free()), ((8, 0, 8, 0), (56, 56)))
        self.assertEqual((req.cache_lock_params, req.swa_uuid_for_lock), (None, None))

    def test_without_insert(self):
        self.build(page=4)
        req = self.request(10)
        self.cache.cache_finished_req(req, is_insert=False)
        self.assertEqual((self.sums(), self.free()), ((0, 0, 0, 0), (64, 64)))

    def test_without_insert_frees_from_the_protected_length_only(self):
        self.build()
        req = self.request(8)
        self.cache.cache_unfinished_req(req)
        more = self.allocator.alloc(4)
        self.pool.req_to_token[0, 8:12] = more
        req.kv_committed_len = req.kv_allocated_len = 12
        req.output_ids = [50, 51, 52, 53]
        self.cache.cache_finished_req(req, is_insert=False)
        self.assertEqual((self.sums(), self.free()), ((8, 0, 8, 0), (56, 56)))

    def test_duplicates_are_freed(self):
        self.build()
        self.cache.cache_finished_req(self.request(8))
        self.cache.cache_finished_req(self.request(8, row=1))
        self.assertEqual((self.sums(), self.free()), ((8, 0, 8, 0), (56, 56)))

    def test_the_receipt_is_released_and_cleared(self):
        self.build()
        self.cache.cache_finished_req(self.request(8))
        match = self.cache.match_prefix(MatchPrefixParams(key=RadixKey(list(range(8)), None, 0)))
        result = self.cache.inc_lock_ref(match.last_device_node)
        req = fake_req(
            origin_input_ids=list(range(8)), fill_ids=list(range(8)), req_pool_idx=1, last_node=match.last_device_node,
            kv_committed_len=8, kv_allocated_len=8, cache_protected_len=8, cache_lock_params=result.to_dec_params(),
            swa_uuid_for_lock=result.swa_uuid_for_lock,
        )  # fmt: skip
        self.pool.req_to_token[1, :8] = match.device_indices
        self.assertEqual(self.sums(), (0, 8, 4, 4))
        self.cache.cache_finished_req(req)
        self.assertEqual((self.sums(), self.free()), ((8, 0, 8, 0), (56, 56)))
        self.assertEqual((req.cache_lock_params, req.swa_uuid_for_lock), (None, None))

    def test_the_cursor_travels(self):
        self.build()
        req = self.request(12)
        self.allocator.free_swa(self.pool.req_to_token[0, :6])
        req.swa_evicted_seqlen = 6
        self.cache.cache_finished_req(req)
        self.assertEqual((self.sums(), self.free()), ((12, 0, 6, 0), (52, 58)))

    def test_disabled_drops_zero_entries(self):
        self.build(disable=True)
        req = self.request(6, cache_lock_params=DecLockRefParams(), swa_uuid_for_lock=3)
        self.pool.req_to_token[0, 2] = 0
        self.cache.cache_finished_req(req)
        self.assertEqual(self.free(), (63, 63))
        self.assertEqual((req.cache_lock_params, req.swa_uuid_for_lock), (None, None))

    def test_fakes_without_the_newer_fields(self):
        self.build()
        req = without(self.request(6), "cache_lock_params", "swa_uuid_for_lock", "swa_evicted_seqlen", "rid",
                      "last_matched_prefix_len", "kv_allocated_len", "prefix_indices")  # fmt: skip
        self.cache.cache_finished_req(req)
        self.assertEqual(self.sums(), (6, 0, 6, 0))

    def test_full_only_tree_with_an_old_fake(self):
        allocator, pool = TokenToKVPoolAllocator(32, None), ReqToTokenPool(4, 32)
        cache = UnifiedRadixCache(pool, allocator)
        for row in (0, 1):
            req = fake_req(origin_input_ids=[1, 2, 3], fill_ids=[1, 2, 3], req_pool_idx=row, last_node=cache.root_node,
                           kv_committed_len=3)  # fmt: skip
            without(
                req,
                "cache_lock_params",
                "swa_uuid_for_lock",
                "swa_evicted_seqlen",
                "dp_rank",
                "kv_allocated_len",
            )
            pool.req_to_token[row, :3] = allocator.alloc(3)
            cache.cache_unfinished_req(req)
            cache.cache_finished_req(req)
        self.assertEqual(
            (cache.evictable_size(), cache.protected_size(), allocator.available_size()), (3, 0, 29)
        )


class TestUnfinished(Base):
    def test_row_lengths_and_receipt(self):
        self.build(page=4)
        req = self.request(10)
        self.cache.cache_unfinished_req(req)
        self.assertEqual((req.cache_protected_len, req.last_matched_prefix_len), (8, 8))
        self.assertEqual(req.prefix_indices.tolist(), self.pool.req_to_token[0, :10].tolist())
        self.assertEqual(req.prefix_indices.dtype, np.int32)
        self.assertIsNot(req.last_node, self.cache.root_node)
        self.assertEqual(req.swa_uuid_for_lock, req.cache_lock_params.swa_uuid_for_lock)
        self.assertIsNotNone(req.swa_uuid_for_lock)
        self.assertEqual(self.sums(), (0, 8, 4, 4))

    def test_the_tree_wins_and_duplicates_go(self):
        self.build(page=4)
        self.cache.cache_finished_req(self.request(8))
        req = self.request(10, row=1)
        before = self.pool.req_to_token[1, :10].copy()
        self.cache.cache_unfinished_req(req)
        self.assertEqual(self.pool.req_to_token[1, :8].tolist(), list(range(4, 12)))
        self.assertEqual(self.pool.req_to_token[1, 8:10].tolist(), before[8:].tolist())
        self.assertEqual(req.prefix_indices.tolist(), [*range(4, 12), *before[8:].tolist()])
        self.assertEqual(self.free(), (52, 52))

    def test_a_new_receipt_each_time(self):
        self.build()
        req = self.request(4)
        self.cache.cache_unfinished_req(req)
        old = req.cache_lock_params
        self.pool.req_to_token[0, 4:8] = self.allocator.alloc(4)
        req.origin_input_ids = req.fill_ids = list(range(8))
        req.kv_committed_len = req.kv_allocated_len = 8
        self.cache.cache_unfinished_req(req)
        self.assertIsNot(req.cache_lock_params, old)
        self.assertEqual((req.cache_protected_len, self.sums()), (8, (0, 8, 4, 4)))
        self.cache.cache_finished_req(req)
        self.assertEqual(self.sums(), (8, 0, 8, 0))

    def test_a_cap_of_zero_changes_nothing(self):
        self.build()
        req = self.request(6)
        self.cache.components[SWA].prepare_for_caching_req = lambda *a, **k: 0
        self.cache.cache_unfinished_req(req)
        self.assertEqual(req.prefix_indices.tolist(), self.pool.req_to_token[0, :6].tolist())
        self.assertFalse(np.shares_memory(req.prefix_indices, self.pool.req_to_token))
        self.assertEqual((self.sums(), req.last_node), ((0, 0, 0, 0), self.cache.root_node))

    def test_a_cap_limits_the_insert(self):
        self.build()
        req = self.request(6)
        self.cache.components[SWA].prepare_for_caching_req = lambda *a, **k: 4
        self.cache.cache_unfinished_req(req)
        self.assertEqual(
            (self.sums(), len(req.prefix_indices), req.cache_protected_len), ((0, 4, 0, 4), 6, 4)
        )

    def test_disabled_refreshes_the_receipt(self):
        self.build(disable=True)
        req = self.request(6, swa_uuid_for_lock=3)
        self.cache.cache_unfinished_req(req)
        self.assertEqual(req.prefix_indices.tolist(), self.pool.req_to_token[0, :6].tolist())
        self.assertIsNotNone(req.cache_lock_params)
        self.assertIsNone(req.swa_uuid_for_lock)

    def test_a_tail_shorter_than_a_page(self):
        self.build(page=4)
        req = self.request(3)
        self.cache.cache_unfinished_req(req)
        self.assertEqual(req.prefix_indices.tolist(), self.pool.req_to_token[0, :3].tolist())
        self.assertEqual((req.cache_protected_len, self.sums()), (0, (0, 0, 0, 0)))

    def test_fakes_without_the_newer_fields(self):
        self.build()
        req = without(self.request(6), "cache_lock_params", "swa_uuid_for_lock", "swa_evicted_seqlen", "rid",
                      "last_matched_prefix_len", "kv_allocated_len", "prefix_indices")  # fmt: skip
        self.cache.cache_unfinished_req(req)
        self.assertEqual((self.sums(), len(req.prefix_indices)), ((0, 6, 2, 4), 6))

    def test_ranks(self):
        self.build(dp=2)
        req = self.request(6, rank=1)
        self.cache.cache_unfinished_req(req)
        self.assertEqual((self.sums(0), self.sums(1)), ((0, 0, 0, 0), (0, 6, 2, 4)))
        self.cache.cache_finished_req(req)
        self.assertEqual((self.free(0), self.free(1)), ((32, 32), (26, 26)))


class TestReclaim(Base):
    def node(self, n):
        self.cache.insert(InsertParams(key=RadixKey(list(range(n)), None, 0), value=self.allocator.alloc(n)))
        return self.cache.match_prefix(MatchPrefixParams(key=RadixKey(list(range(n)), None, 0)))

    def test_the_numbers(self):
        """Page 4, window 8, tree 8, pre_len 24 -> 12."""
        self.build(page=4, window=8)
        match = self.node(8)
        own = self.allocator.alloc(16)
        self.pool.req_to_token[0, :24] = np.concatenate((match.device_indices, own))
        req = fake_req(last_node=match.last_device_node, cache_protected_len=8, kv_allocated_len=24)
        self.cache.evict_req_swa(req, 24, dp_rank=0)
        self.assertEqual(req.swa_evicted_seqlen, 12)
        self.assertEqual(self.allocator.count_swa_mapped(match.device_indices), 8)
        self.assertEqual(
            (self.allocator.count_swa_mapped(own[:4]), self.allocator.count_swa_mapped(own[4:])), (0, 12)
        )
        self.assertEqual(self.free(), (40, 44))
        self.cache.evict_req_swa(req, 20)
        self.assertEqual((req.swa_evicted_seqlen, self.free()), (12, (40, 44)))
        self.cache.evict_req_swa(req, 28)
        self.assertEqual((req.swa_evicted_seqlen, self.free()), (16, (40, 48)))

    def test_the_protected_length_is_the_path_of_last_node(self):
        """Fakes carry last_node, not necessarily cache_protected_len."""
        self.build(page=4, window=8)
        match = self.node(8)
        own = self.allocator.alloc(16)
        self.pool.req_to_token[0, :24] = np.concatenate((match.device_indices, own))
        req = without(
            fake_req(last_node=match.last_device_node), "cache_protected_len", "rid", "cache_lock_params"
        )
        self.cache.evict_req_swa(req, 24, dp_rank=0)
        self.assertEqual((req.swa_evicted_seqlen, self.free()), (12, (40, 44)))

    def test_root_and_short(self):
        self.build(page=4, window=8)
        self.pool.req_to_token[0, :24] = self.allocator.alloc(24)
        req = fake_req(last_node=self.cache.root_node)
        self.cache.evict_req_swa(req, 12, dp_rank=0)
        self.assertEqual((req.swa_evicted_seqlen, self.free()), (0, (40, 40)))
        self.cache.evict_req_swa(req, 24, dp_rank=0)
        self.assertEqual((req.swa_evicted_seqlen, self.free()), (12, (40, 52)))


if __name__ == "__main__":
    unittest.main()
