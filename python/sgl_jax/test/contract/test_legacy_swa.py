"""SWARadixCache: node fields, dict counters against a walk, tombstones, locks, requests."""

from __future__ import annotations

import unittest

import numpy as np

from sgl_jax.srt.mem_cache.allocator import TokenToKVPoolAllocator
from sgl_jax.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sgl_jax.srt.mem_cache.memory_pool import ReqToTokenPool
from sgl_jax.srt.mem_cache.radix_cache import RadixKey
from sgl_jax.srt.mem_cache.swa_radix_cache import SWARadixCache
from sgl_jax.test.contract.kit import fake_req, ids, swa_allocator, without
from sgl_jax.test.test_utils import CustomTestCase


class TestSWARadixCache(CustomTestCase):
    def build(self, page=1, window=4, dp=1, size=64, size_swa=64):
        allocator = swa_allocator(size, size_swa, page, dp)
        pool = ReqToTokenPool(8, 64)
        cache = SWARadixCache(
            req_to_token_pool=pool, token_to_kv_pool_allocator=allocator, sliding_window_size=window,
            page_size=page, disable=False,
        )  # fmt: skip
        return cache, allocator, pool

    def put(self, cache, allocator, tokens, rank=0, **kw):
        value = allocator.alloc(len(tokens), dp_rank=rank)
        return cache.insert(InsertParams(key=RadixKey(tokens, None, rank), value=value, **kw)), value

    def walk(self, cache):
        totals = {"fe": 0, "fp": 0, "se": 0, "sp": 0}
        stack = list(cache.root_node.children.values())
        while stack:
            node = stack.pop()
            size = len(node.value)
            totals["fp" if node.full_lock_ref > 0 else "fe"] += size
            if not node.swa_tombstone:
                totals["sp" if node.swa_lock_ref > 0 else "se"] += size
            stack.extend(node.children.values())
        return tuple(totals.values())

    def counters(self, cache):
        dicts = (
            cache.full_evictable_size_, cache.full_protected_size_, cache.swa_evictable_size_, cache.swa_protected_size_,
        )  # fmt: skip
        return tuple(sum(d.values()) for d in dicts)

    def test_asserts_a_swa_allocator(self):
        with self.assertRaises(AssertionError):
            SWARadixCache(ReqToTokenPool(2, 8), TokenToKVPoolAllocator(8, None), 4, 1)

    def test_insert_is_an_int_and_sizes_add_up(self):
        cache, allocator, _ = self.build()
        first, value = self.put(cache, allocator, [1, 2, 3, 4, 5, 6])
        again, _ = self.put(cache, allocator, [1, 2, 3, 4, 5, 6, 7, 8])
        self.assertEqual((first, again), (0, 6))
        self.assertIsInstance(again, int)
        self.assertEqual(cache.total_size(), (8, 8))
        self.assertEqual(self.walk(cache), self.counters(cache))
        self.assertEqual(
            (cache.full_evictable_size(), cache.swa_evictable_size(), cache.evictable_size()), (8, 8, 8)
        )
        self.assertEqual((cache.full_lru_list_evictable_size(), cache.swa_lru_list_evictable_size()), (8, 8))
        self.assertEqual(allocator.full_available_size(), 56)
        match = cache.match_prefix(MatchPrefixParams(key=RadixKey([1, 2, 3, 4, 5, 6], None, 0)))
        self.assertEqual(match.device_indices.tolist(), value.tolist())
        with self.assertRaises(NotImplementedError):
            cache.protected_size()
        cache.sanity_check()
        cache.pretty_print()

    def test_empty_match_is_int64(self):
        cache, *_ = self.build()
        match = cache.match_prefix(MatchPrefixParams(key=RadixKey([1], None, 0)))
        self.assertEqual((match.device_indices.dtype, len(match.device_indices)), (np.int64, 0))
        self.assertIs(match.last_device_node, cache.root_node)

    def test_root_and_node_fields(self):
        cache, allocator, _ = self.build()
        self.put(cache, allocator, [1, 2, 3, 4])
        node = cache.root_node.children[cache.get_child_key_fn(RadixKey([1, 2, 3, 4], None, 0))]
        self.assertEqual((node.key.token_ids, node.parent), ([1, 2, 3, 4], cache.root_node))
        self.assertEqual(
            (node.swa_tombstone, node.full_lock_ref, node.swa_lock_ref, node.swa_uuid), (False, 0, 0, None)
        )

    def test_swa_eviction_makes_a_tombstone_of_an_internal_node(self):
        cache, allocator, _ = self.build()
        self.put(cache, allocator, [1, 2, 3, 4])
        self.put(cache, allocator, [1, 2, 3, 4, 5, 6, 7, 8])
        cache.match_prefix(MatchPrefixParams(key=RadixKey([1, 2, 3, 4, 5, 6, 7, 8], None, 0)))
        out = cache.evict(EvictParams(num_tokens=0, swa_num_tokens=1, dp_rank=0))
        self.assertEqual((out.num_tokens_evicted, out.swa_num_tokens_evicted), (0, 4))
        top = next(iter(cache.root_node.children.values()))
        self.assertIs(top.swa_tombstone, True)
        self.assertEqual(cache.total_size(), (8, 4))
        self.assertEqual(self.walk(cache), self.counters(cache))
        full = cache.match_prefix(MatchPrefixParams(key=RadixKey(list(range(1, 9)), None, 0)))
        self.assertEqual(len(full.device_indices), 8)
        short = cache.match_prefix(MatchPrefixParams(key=RadixKey(list(range(1, 7)), None, 0)))
        self.assertEqual(len(short.device_indices), 0)

    def test_leaf_eviction_cascades_over_tombstones(self):
        cache, allocator, _ = self.build()
        self.put(cache, allocator, [1, 2, 3, 4])
        self.put(cache, allocator, [1, 2, 3, 4, 5, 6, 7, 8])
        cache.match_prefix(MatchPrefixParams(key=RadixKey([1, 2, 3, 4, 5, 6, 7, 8], None, 0)))
        cache.evict(EvictParams(swa_num_tokens=1, dp_rank=0))
        out = cache.evict(EvictParams(swa_num_tokens=1, dp_rank=0))
        self.assertEqual(out.swa_num_tokens_evicted, 4)
        self.assertEqual(cache.total_size(), (0, 0))
        self.assertEqual((allocator.full_available_size(), allocator.swa_available_size()), (64, 64))

    def test_locks_to_the_root_and_over_the_window(self):
        cache, allocator, _ = self.build()
        for n in (4, 8, 12):
            self.put(cache, allocator, list(range(n)))
        leaf = cache.match_prefix(MatchPrefixParams(key=RadixKey(list(range(12)), None, 0))).last_device_node
        result = cache.inc_lock_ref(leaf)
        self.assertEqual((result.delta, leaf.full_lock_ref, leaf.parent.full_lock_ref), (-12, 1, 1))
        self.assertEqual((leaf.swa_lock_ref, leaf.parent.swa_lock_ref), (1, 0))
        self.assertEqual(result.swa_uuid_for_lock, leaf.swa_uuid)
        self.assertIsNotNone(leaf.swa_uuid)
        self.assertEqual((cache.full_protected_size(), cache.swa_protected_size()), (12, 4))
        self.assertEqual(self.walk(cache), self.counters(cache))
        cache.dec_lock_ref(leaf, result.to_dec_params())
        self.assertEqual((cache.full_protected_size(), cache.swa_protected_size()), (0, 0))

    def test_a_tombstone_in_the_window_asserts(self):
        cache, allocator, _ = self.build(window=8)
        self.put(cache, allocator, list(range(4)))
        self.put(cache, allocator, list(range(8)))
        cache.evict(EvictParams(swa_num_tokens=1, dp_rank=0))
        leaf = cache.root_node
        while leaf.children:
            leaf = next(iter(leaf.children.values()))
        with self.assertRaises(AssertionError):
            cache.inc_lock_ref(leaf)

    def test_requests(self):
        cache, allocator, pool = self.build(page=4)
        tokens = list(range(10))
        req = fake_req(
            origin_input_ids=tokens, fill_ids=tokens, last_node=cache.root_node, kv_committed_len=10, kv_allocated_len=10,
        )  # fmt: skip
        pool.req_to_token[0, :10] = allocator.alloc_extend([0], [10], [-1], 10)
        cache.cache_unfinished_req(req, chunked=True)
        self.assertEqual(req.prefix_indices.tolist(), pool.req_to_token[0, :10].tolist())
        self.assertEqual((cache.full_protected_size(), req.cache_protected_len), (8, 8))
        self.assertIsNotNone(req.cache_lock_params)
        cache.cache_finished_req(req)
        self.assertEqual((cache.full_evictable_size(), cache.full_protected_size()), (8, 0))
        self.assertEqual((req.cache_lock_params, req.swa_uuid_for_lock), (None, None))
        self.assertEqual((allocator.full_available_size(), allocator.swa_available_size()), (56, 56))

    def test_requests_without_the_newer_fields(self):
        cache, allocator, pool = self.build()
        tokens = list(range(6))
        req = fake_req(
            origin_input_ids=tokens, fill_ids=tokens, last_node=cache.root_node, kv_committed_len=6, kv_allocated_len=6,
        )  # fmt: skip
        without(
            req, "cache_lock_params", "last_matched_prefix_len", "swa_evicted_seqlen", "cache_protected_len"
        )
        pool.req_to_token[0, :6] = allocator.alloc(6)
        cache.cache_unfinished_req(req)
        self.assertEqual(cache.full_protected_size(), 6)
        cache.cache_finished_req(req)
        self.assertEqual((cache.full_protected_size(), cache.full_evictable_size()), (0, 6))

    def test_evict_req_swa(self):
        cache, allocator, pool = self.build(page=4, window=8)
        full = allocator.alloc(24)
        pool.req_to_token[0, :24] = full
        req = fake_req(last_node=cache.root_node, kv_committed_len=24, kv_allocated_len=24)
        cache.evict_req_swa(req, 24)
        self.assertEqual(req.swa_evicted_seqlen, 12)
        self.assertEqual(
            (allocator.count_swa_mapped(full[:12]), allocator.count_swa_mapped(full[12:])), (0, 12)
        )

    def test_ranks(self):
        cache, allocator, _ = self.build(dp=2)
        self.put(cache, allocator, [1, 2, 3, 4], rank=0)
        self.put(cache, allocator, [1, 2, 3, 4], rank=1)
        cache.evict(EvictParams(num_tokens=4, dp_rank=1))
        self.assertEqual((cache.full_evictable_size(0), cache.full_evictable_size(1)), (4, 0))
        self.assertEqual(allocator.full_available_size(dp_rank=1), 32)

    def test_fabricated_values(self):
        cache, allocator, _ = self.build()
        cache.insert(InsertParams(key=RadixKey([1, 2, 3, 4], None, 0), value=ids(50, 51, 52, 53)))
        out = cache.evict(EvictParams(num_tokens=4, dp_rank=0))
        self.assertEqual(out.num_tokens_evicted, 4)
        self.assertEqual(cache.total_size(), (0, 0))
        cache.insert(
            InsertParams(key=RadixKey([1, 2, 3], None, 0), value=np.arange(100, 103, dtype=np.int32))
        )
        cache.evict(EvictParams(swa_num_tokens=3, dp_rank=0))
        self.assertEqual(allocator.full_available_size(), 64)


if __name__ == "__main__":
    unittest.main()
