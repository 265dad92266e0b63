"""Parameter and result classes, the abstract base, RadixKey, RadixCache and the chunk caches."""

from __future__ import annotations

import types
import unittest
from unittest.mock import MagicMock

import numpy as np

from sgl_jax.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
from sgl_jax.srt.mem_cache.base_prefix_cache import (
    BasePrefixCache,
    DecLockRefParams,
    EvictParams,
    EvictResult,
    IncLockRefResult,
    InsertParams,
    InsertResult,
    MatchPrefixParams,
    MatchResult,
)
from sgl_jax.srt.mem_cache.chunk_cache import ChunkCache, SWAChunkCache
from sgl_jax.srt.mem_cache.memory_pool import ReqToTokenPool
from sgl_jax.srt.mem_cache.radix_cache import (
    RadixCache,
    RadixKey,
    TreeNode,
    _convert_to_bigram_key,
    _key_match_page_size1,
    _key_match_paged,
    build_radix_key,
    get_child_key,
)
from sgl_jax.srt.mem_cache.swa_radix_cache import SWARadixCache
from sgl_jax.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sgl_jax.test.contract.kit import fake_req, ids, swa_allocator, without
from sgl_jax.test.test_utils import CustomTestCase


class Bare(BasePrefixCache):
    def reset(self): ...
    def match_prefix(self, params): ...
    def cache_finished_req(self, req, **kw): ...
    def cache_unfinished_req(self, req, **kw): ...
    def evict(self, params): ...
    def inc_lock_ref(self, node): ...
    def dec_lock_ref(self, node, params=None): ...


class TestBase(CustomTestCase):
    def test_defaults_of_parameters_and_results(self):
        m = MatchPrefixParams(key=RadixKey([1]))
        self.assertEqual((m.cow_recurrent, m.req, m.full_only), (False, None, False))
        i = InsertParams()
        self.assertEqual((i.key, i.value, i.prev_prefix_len, i.swa_evicted_seqlen), (None, None, 0, 0))
        self.assertIsNone(i.recurrent_value)
        r = InsertResult()
        self.assertEqual((r.prefix_len, r.recurrent_exist, r.recurrent_committed), (0, False, False))
        e = EvictParams()
        self.assertEqual((e.num_tokens, e.swa_num_tokens, e.dp_rank, e.recurrent_num), (0, 0, None, 0))
        self.assertEqual(EvictResult(), EvictResult(0, 0, 0))
        self.assertEqual(EvictResult(num_tokens_evicted=1, swa_num_tokens_evicted=2).recurrent_num_evicted, 0)
        d = DecLockRefParams()
        self.assertEqual((d.swa_uuid_for_lock, d.skip_lock_node_ids), (None, {}))
        self.assertIsNot(DecLockRefParams().skip_lock_node_ids, d.skip_lock_node_ids)
        inc = IncLockRefResult()
        self.assertEqual((inc.delta, inc.swa_uuid_for_lock, inc.skip_lock_node_ids), (None, None, {}))
        out = IncLockRefResult(swa_uuid_for_lock=7, skip_lock_node_ids={1: [3]}).to_dec_params()
        self.assertEqual((out.swa_uuid_for_lock, out.skip_lock_node_ids), (7, {1: [3]}))
        self.assertIsInstance(out, DecLockRefParams)

    def test_match_result_is_a_tuple(self):
        result = MatchResult(
            device_indices=ids(), last_device_node="d", last_host_node="h", best_match_node="b"
        )
        self.assertEqual(
            (result[1], result.host_hit_length, result.recurrent_branching_seqlen), ("d", 0, None)
        )
        self.assertEqual(
            result._fields[:4], ("device_indices", "last_device_node", "last_host_node", "best_match_node")
        )
        self.assertEqual(result._replace(host_hit_length=3).host_hit_length, 3)

    def test_base_defaults(self):
        with self.assertRaises(TypeError):
            BasePrefixCache()
        cache = Bare()
        for name in ("evictable_size", "full_evictable_size", "swa_evictable_size", "protected_size",
                     "full_protected_size", "swa_protected_size"):  # fmt: skip
            self.assertEqual(
                (getattr(cache, name)(), getattr(cache, name)(1), getattr(cache, name)(dp_rank=1)), (0, 0, 0)
            )
        self.assertEqual(
            (cache.supports_swa(), cache.supports_recurrent(), cache.recurrent_extra_buffer_active()),
            (False, False, False),
        )
        self.assertEqual(cache.take_events(), [])
        for call in (
            lambda: cache.init_load_back(None, 0),
            cache.ready_to_load_host_cache,
            cache.check_hicache_events,
            lambda: cache.cache_ledger_snapshot(0, []),
        ):
            with self.assertRaises(NotImplementedError):
                call()

    def test_who_supports_swa(self):
        self.assertIs(BasePrefixCache.supports_swa(BasePrefixCache), False)
        self.assertIs(SWAChunkCache.supports_swa(SWAChunkCache), True)
        self.assertIs(SWARadixCache.supports_swa(SWARadixCache), True)
        self.assertIs(ChunkCache.supports_swa(ChunkCache), False)
        self.assertIs(RadixCache.supports_swa(RadixCache), False)
        bare = UnifiedRadixCache.__new__(UnifiedRadixCache)
        self.assertIs(bare.supports_swa(), False)


class TestRadixKey(CustomTestCase):
    def test_behaves_like_a_list(self):
        key = RadixKey([1, 2, 3, 4], extra_key="x", dp_rank=1)
        self.assertEqual((len(key), list(key), key.token_ids), (4, [1, 2, 3, 4], [1, 2, 3, 4]))
        self.assertEqual((key[1:3].token_ids, key[1:3].extra_key, key[1:3].dp_rank), ([2, 3], "x", 1))
        one = key[0]
        self.assertIsInstance(one, RadixKey)
        self.assertEqual((one.token_ids, one.dp_rank, key[-1].token_ids), ([1], 1, [4]))
        self.assertEqual(
            (RadixKey([]).token_ids, RadixKey([1]).extra_key, RadixKey([1]).dp_rank), ([], None, None)
        )

    def test_repr_previews_ten(self):
        text = repr(RadixKey(list(range(20)), None, 0))
        self.assertIn("9", text)
        self.assertNotIn("11", text)

    def test_match_functions(self):
        a, b = RadixKey([1, 2, 3, 4, 5]), RadixKey([1, 2, 3, 9])
        self.assertEqual((_key_match_page_size1(a, b), _key_match_paged(a, b, 2)), (3, 2))
        for other in (RadixKey([1], extra_key="y"), RadixKey([1], dp_rank=1)):
            with self.assertRaises(ValueError):
                _key_match_page_size1(a, other)
            with self.assertRaises(ValueError):
                _key_match_paged(a, other, 1)

    def test_child_keys(self):
        self.assertEqual(get_child_key(RadixKey([5, 6, 7])), 5)
        self.assertEqual(get_child_key(RadixKey([5, 6, 7]), page_size=2), (5, 6))
        self.assertEqual(get_child_key(RadixKey([5, 6], extra_key="x"), 2), ("x", (5, 6)))
        self.assertEqual(get_child_key(RadixKey([5, 6], dp_rank=1)), (1, 5))
        self.assertEqual(get_child_key(RadixKey([5], extra_key="x", dp_rank=0)), (("x", 0), 5))
        self.assertEqual(_convert_to_bigram_key([1, 2, 3]), [(1, 2), (2, 3)])

    def test_build_radix_key_sources(self):
        req = types.SimpleNamespace(origin_input_ids=[1, 2], output_ids=[3], extra_key="x", dp_rank=1)
        key = build_radix_key(req, 3)
        self.assertEqual((key.token_ids, key.extra_key, key.dp_rank), ([1, 2, 3], "x", 1))
        self.assertEqual(build_radix_key(req, 2).token_ids, [1, 2])
        req.radix_input_ids = [8, 9]
        self.assertEqual(build_radix_key(req, 3).token_ids, [8, 9, 3])
        old = types.SimpleNamespace(origin_input_ids=[1, 2], output_ids=[], fill_ids=[1, 2, 3, 4])
        self.assertEqual(build_radix_key(old, 4).token_ids, [1, 2, 3, 4])
        self.assertEqual((build_radix_key(old, 4).extra_key, build_radix_key(old, 4).dp_rank), (None, None))
        self.assertEqual(build_radix_key(types.SimpleNamespace(fill_ids=[4, 5]), 2).token_ids, [4, 5])

    def test_build_radix_key_of_a_mock(self):
        req = MagicMock()
        req.origin_input_ids, req.output_ids = [1, 2, 3], [4]
        req.extra_key = req.dp_rank = None
        self.assertEqual(build_radix_key(req, 4).token_ids, [1, 2, 3, 4])


class TestTreeNode(CustomTestCase):
    def test_fields(self):
        before = TreeNode.counter
        a, b = TreeNode(), TreeNode(id=77)
        self.assertEqual((a.id, b.id), (before, 77))
        self.assertEqual((len(a.children), a.parent, a.value, a.lock_ref, a.hit_count), (0, None, None, 0, 0))
        self.assertEqual((a.host_value, a.evicted, a.backuped), (None, True, False))
        a.last_access_time, b.last_access_time = 1.0, 2.0
        self.assertLess(a, b)
        a.value, a.host_value = ids(1), ids(1)
        self.assertEqual((a.evicted, a.backuped), (False, True))


class TestRadixCache(CustomTestCase):
    def build(self, page=1, size=64, dp=1, **kw):
        if page == 1:
            allocator = TokenToKVPoolAllocator(size, None, dp_size=dp)
        else:
            allocator = PagedTokenToKVPoolAllocator(size, page, None, dp_size=dp)
        pool = ReqToTokenPool(8, 64)
        cache = RadixCache(
            req_to_token_pool=pool, token_to_kv_pool_allocator=allocator, page_size=page,
            disable=kw.pop("disable", False), kv_head_num=32, head_dim=128, layer_num=32, max_seq_len=4096, **kw,
        )  # fmt: skip
        return cache, allocator, pool

    def test_insert_match_with_fabricated_values(self):
        cache, allocator, _ = self.build()
        self.assertEqual(cache.insert(InsertParams(key=RadixKey([1, 2, 3]), value=ids(100, 101, 102))), 0)
        got = cache.insert(
            InsertParams(key=RadixKey([1, 2, 3, 4]), value=np.arange(200, 204, dtype=np.int32))
        )
        self.assertEqual(got, 3)
        self.assertIsInstance(got, int)
        match = cache.match_prefix(MatchPrefixParams(key=RadixKey([1, 2, 3, 4, 5])))
        self.assertEqual(match.device_indices.tolist(), [100, 101, 102, 203])
        self.assertEqual(match.device_indices.dtype, np.int32)
        self.assertEqual((cache.total_size(), cache.evictable_size(), cache.protected_size()), (4, 4, 0))
        out = cache.evict(EvictParams(num_tokens=4, dp_rank=0))
        self.assertEqual((out.num_tokens_evicted, cache.total_size()), (4, 0))
        self.assertEqual(allocator.available_size(), 64)

    def test_list_keys_and_no_value(self):
        cache, *_ = self.build()
        self.assertEqual(cache.insert(InsertParams(key=[1, 2, 3])), 0)
        match = cache.match_prefix(MatchPrefixParams(key=[1, 2, 3]))
        self.assertEqual(match.device_indices.tolist(), [1, 2, 3])

    def test_split_and_locks(self):
        cache, *_ = self.build()
        cache.insert(InsertParams(key=RadixKey([1, 2, 3, 4]), value=ids(10, 11, 12, 13)))
        node = cache.match_prefix(MatchPrefixParams(key=RadixKey([1, 2, 9]))).last_device_node
        self.assertEqual(node.value.tolist(), [10, 11])
        leaf = cache.match_prefix(MatchPrefixParams(key=RadixKey([1, 2, 3, 4]))).last_device_node
        result = cache.inc_lock_ref(leaf)
        self.assertIsInstance(result, IncLockRefResult)
        self.assertEqual((result.delta, leaf.lock_ref, node.lock_ref), (-4, 1, 1))
        self.assertEqual((cache.evictable_size(), cache.protected_size()), (0, 4))
        self.assertEqual(cache.evict(EvictParams(num_tokens=4)).num_tokens_evicted, 0)
        self.assertEqual(cache.dec_lock_ref(leaf), 4)
        self.assertEqual(cache.root_node.lock_ref, 1)

    def test_pages(self):
        cache, *_ = self.build(page=4)
        cache.insert(InsertParams(key=RadixKey(list(range(10))), value=np.arange(100, 110, dtype=np.int32)))
        match = cache.match_prefix(MatchPrefixParams(key=RadixKey(list(range(7)))))
        self.assertEqual(match.device_indices.tolist(), [100, 101, 102, 103])
        self.assertEqual(cache.total_size(), 8)

    def test_lru_leaf_goes_first_and_ranks_are_apart(self):
        cache, *_ = self.build(dp=2)
        for rank in (0, 1):
            for start in (1, 10):
                value = np.arange(100 * start, 100 * start + 3, dtype=np.int32)
                cache.insert(
                    InsertParams(key=RadixKey([start, start + 1, start + 2], dp_rank=rank), value=value)
                )
        cache.match_prefix(MatchPrefixParams(key=RadixKey([1, 2, 3], dp_rank=1)))
        self.assertEqual(cache.evict(EvictParams(num_tokens=2, dp_rank=1)).num_tokens_evicted, 3)
        found = cache.match_prefix(MatchPrefixParams(key=RadixKey([1, 2, 3], dp_rank=1)))
        self.assertEqual(len(found.device_indices), 3)
        self.assertEqual((cache.evictable_size(0), cache.evictable_size(1)), (6, 3))

    def test_disabled(self):
        cache, allocator, pool = self.build(disable=True)
        self.assertEqual(cache.insert(InsertParams(key=RadixKey([1]), value=ids(1))), 0)
        match = cache.match_prefix(MatchPrefixParams(key=RadixKey([1])))
        self.assertEqual((len(match.device_indices), match.last_device_node), (0, cache.root_node))
        self.assertEqual(cache.evict(EvictParams(num_tokens=3)), EvictResult())
        pool.req_to_token[0, :4] = allocator.alloc(4)
        cache.cache_finished_req(
            fake_req(origin_input_ids=[1, 2, 3, 4], kv_committed_len=4, kv_allocated_len=4)
        )
        self.assertEqual(allocator.available_size(), 64)

    def test_requests(self):
        cache, allocator, pool = self.build(page=4)
        req = fake_req(
            origin_input_ids=list(range(10)), fill_ids=list(range(10)), last_node=cache.root_node,
            kv_committed_len=10, kv_allocated_len=10,
        )  # fmt: skip
        pool.req_to_token[0, :10] = allocator.alloc_extend([0], [10], [-1], 10)
        cache.cache_unfinished_req(req)
        self.assertEqual(req.prefix_indices.tolist(), pool.req_to_token[0, :10].tolist())
        self.assertEqual((cache.protected_size(), req.cache_protected_len), (8, 8))
        cache.cache_finished_req(req)
        self.assertEqual(
            (cache.evictable_size(), cache.protected_size(), allocator.available_size()), (8, 0, 56)
        )

    def test_requests_of_the_older_generation(self):
        """No receipt fields, no protected length; ids grow in fill_ids only."""
        cache, allocator, pool = self.build()
        req = fake_req(
            origin_input_ids=[1, 2, 3], fill_ids=[1, 2, 3, 4], last_node=cache.root_node, kv_committed_len=4
        )
        without(req, "cache_lock_params", "swa_uuid_for_lock", "cache_protected_len", "kv_allocated_len",
                "last_matched_prefix_len", "swa_evicted_seqlen")  # fmt: skip
        pool.req_to_token[0, :4] = allocator.alloc(4)
        cache.cache_unfinished_req(req)
        self.assertEqual(cache.protected_size(), 4)
        cache.cache_finished_req(req)
        self.assertEqual((cache.evictable_size(), cache.protected_size()), (4, 0))

    def test_eagle_uses_bigrams(self):
        cache, *_ = self.build(is_eagle=True)
        cache.insert(InsertParams(key=RadixKey([1, 2, 3, 4]), value=ids(10, 11, 12)))
        match = cache.match_prefix(MatchPrefixParams(key=RadixKey([1, 2, 3, 4])))
        self.assertEqual(match.device_indices.tolist(), [10, 11, 12])


class TestChunkCaches(CustomTestCase):
    def test_chunk_cache(self):
        allocator, pool = TokenToKVPoolAllocator(32, None), ReqToTokenPool(4, 32)
        cache = ChunkCache(pool, allocator, 1)
        match = cache.match_prefix(MatchPrefixParams(key=RadixKey([1, 2])))
        self.assertEqual(
            (len(match.device_indices), match.last_device_node, match.last_host_node), (0, None, None)
        )
        self.assertFalse(hasattr(cache, "root_node"))
        pool.req_to_token[2, :6] = allocator.alloc(6)
        req = fake_req(req_pool_idx=2, fill_ids=[1] * 5, kv_committed_len=6, kv_allocated_len=6)
        cache.cache_unfinished_req(req)
        self.assertEqual(req.prefix_indices.tolist(), [1, 2, 3, 4, 5])
        req.prefix_indices[:] = 0
        self.assertEqual(pool.req_to_token[2, :5].tolist(), [1, 2, 3, 4, 5])
        self.assertEqual(cache.evict(EvictParams(num_tokens=3)), EvictResult())
        self.assertEqual(
            (cache.inc_lock_ref(None).delta, cache.dec_lock_ref(None), cache.pretty_print()), (0, 0, "")
        )
        cache.cache_finished_req(req, is_insert=False)
        self.assertEqual(allocator.available_size(), 32)

    def test_swa_chunk_cache_sizes_and_reclaim(self):
        allocator, pool = swa_allocator(64, 32), ReqToTokenPool(4, 32)
        cache = SWAChunkCache(pool, allocator, 1, 4)
        self.assertEqual(cache.sliding_window_size, 4)
        for name in (
            "full_evictable_size",
            "swa_evictable_size",
            "full_protected_size",
            "swa_protected_size",
        ):
            self.assertEqual(getattr(cache, name)(0), 0)
        full = allocator.alloc(16)
        pool.req_to_token[0, :16] = full
        req = fake_req(kv_committed_len=16, kv_allocated_len=16)
        cache.evict_req_swa(req, 16, dp_rank=0)
        self.assertEqual(req.swa_evicted_seqlen, 11)
        self.assertEqual(allocator.count_swa_mapped(full[:11]), 0)
        self.assertEqual(allocator.count_swa_mapped(full[11:]), 5)
        cache.evict_req_swa(req, 12)
        self.assertEqual(req.swa_evicted_seqlen, 11)
        cache.cache_finished_req(req)
        self.assertEqual((allocator.full_available_size(), allocator.swa_available_size()), (64, 32))

    def test_swa_chunk_cache_exchanges_receipts(self):
        cache = SWAChunkCache(ReqToTokenPool(4, 32), swa_allocator(64, 32), 1, 4)
        old, new = DecLockRefParams(swa_uuid_for_lock=5), IncLockRefResult(delta=0, swa_uuid_for_lock=9)
        cache.dec_lock_ref = MagicMock(return_value=0)
        cache.inc_lock_ref = MagicMock(return_value=new)
        req = fake_req(fill_ids=[1, 2], cache_lock_params=old, swa_uuid_for_lock=5, last_node=None)
        cache.cache_unfinished_req(req)
        self.assertIs(cache.dec_lock_ref.call_args.args[1], old)
        self.assertEqual((req.cache_lock_params.swa_uuid_for_lock, req.swa_uuid_for_lock), (9, 9))
        receipt = req.cache_lock_params
        cache.cache_finished_req(req)
        self.assertIs(cache.dec_lock_ref.call_args.args[1], receipt)
        self.assertEqual((req.cache_lock_params, req.swa_uuid_for_lock), (None, None))


if __name__ == "__main__":
    unittest.main()
