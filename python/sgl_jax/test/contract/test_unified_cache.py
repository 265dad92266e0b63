"""UnifiedRadixCache: construction with mocks, return conventions, core rules, test-poked internals."""

from __future__ import annotations

import unittest
from unittest.mock import MagicMock

import jax.numpy as jnp
import numpy as np

from sgl_jax.srt.mem_cache.allocator import (
    PagedTokenToKVPoolAllocator,
    SWATokenToKVPoolAllocator,
    TokenToKVPoolAllocator,
)
from sgl_jax.srt.mem_cache.base_prefix_cache import (
    EvictParams,
    EvictResult,
    IncLockRefResult,
    InsertParams,
    InsertResult,
    MatchPrefixParams,
    MatchResult,
)
from sgl_jax.srt.mem_cache.cache_init_params import CacheInitParams
from sgl_jax.srt.mem_cache.memory_pool import ReqToTokenPool
from sgl_jax.srt.mem_cache.radix_cache import RadixKey
from sgl_jax.srt.mem_cache.unified_cache_components import ComponentType, FullComponent, SWAComponent
from sgl_jax.srt.mem_cache.unified_radix_cache import COMPONENT_REGISTRY, UnifiedRadixCache, UnifiedTreeNode
from sgl_jax.test.contract.kit import FULL, SWA, ids, swa_allocator, unified
from sgl_jax.test.test_utils import CustomTestCase


def plain(page=1, size=64, dp=1, **kw):
    """A FULL-only cache built the older way: no component_init_params."""
    if page == 1:
        allocator = TokenToKVPoolAllocator(size, None, dp_size=dp)
    else:
        allocator = PagedTokenToKVPoolAllocator(size, page, None, dp_size=dp)
    cache = UnifiedRadixCache(
        req_to_token_pool=ReqToTokenPool(8, 64), token_to_kv_pool_allocator=allocator, page_size=page, disable=False,
        kv_head_num=32, head_dim=128, layer_num=32, max_seq_len=4096, dtype=jnp.bfloat16, **kw,
    )  # fmt: skip
    return cache, allocator


def key(*tokens, rank=None):
    return RadixKey(list(tokens), None, rank)


class TestNode(CustomTestCase):
    def test_fields(self):
        a = UnifiedTreeNode((FULL,))
        b = UnifiedTreeNode(tree_components=(FULL, SWA))
        self.assertEqual(b.id, a.id + 1)
        self.assertEqual((a.tree_components, len(a.component_data), len(a.children)), ((FULL,), 3, 0))
        self.assertEqual((a.parent, a.hit_count), (None, 0))
        for data in b.component_data:
            self.assertEqual((data.value, data.lock_ref, data.host_value), (None, 0, None))
        self.assertIs(a.backuped, False)
        a.parent = b
        self.assertIs(a.evicted, True)
        a.component_data[FULL].value = ids(1)
        self.assertIs(a.evicted, False)
        a.component_data[FULL].host_value = np.array([1], np.int64)
        self.assertIs(a.backuped, True)
        a.last_access_time, b.last_access_time = 1.0, 2.0
        self.assertLess(a, b)
        self.assertGreater(UnifiedTreeNode.counter, b.id)
        self.assertEqual(len({a, b}), 2)

    def test_registry(self):
        self.assertIs(COMPONENT_REGISTRY[FULL], FullComponent)
        self.assertIs(COMPONENT_REGISTRY[SWA], SWAComponent)


class TestConstruction(CustomTestCase):
    def test_init_params_must_agree(self):
        allocator, pool = swa_allocator(), ReqToTokenPool(4, 16)
        good = {"req_to_token_pool": pool, "token_to_kv_pool_allocator": allocator, "page_size": 1,
                "sliding_window_size": 4}  # fmt: skip
        build = lambda params, **kw: UnifiedRadixCache(  # noqa: E731
            pool, allocator, tree_components=(FULL, SWA), component_init_params=params, **kw
        )
        self.assertIsInstance(build(CacheInitParams(**good)), UnifiedRadixCache)
        for wrong in (
            {"req_to_token_pool": ReqToTokenPool(4, 16)},
            {"token_to_kv_pool_allocator": swa_allocator()},
            {"page_size": 2},
            {"is_eagle": True},
            {"enable_recurrent_extra_buffer": True},
            {"recurrent_track_interval": 8},
        ):
            with self.subTest(wrong=wrong), self.assertRaises(ValueError):
                build(CacheInitParams(**{**good, **wrong}))
        with self.assertRaisesRegex(ValueError, "sliding_window_size"):
            build(CacheInitParams(**{**good, "sliding_window_size": None}))
        with self.assertRaisesRegex(ValueError, "sliding_window_size"):
            UnifiedRadixCache(pool, allocator, tree_components=(FULL, SWA))

    def test_without_params_they_are_synthesised(self):
        cache, allocator = plain(page=4)
        params = cache.component_init_params
        self.assertIsInstance(params, CacheInitParams)
        self.assertIs(params.token_to_kv_pool_allocator, allocator)
        self.assertEqual((params.page_size, params.sliding_window_size, params.is_eagle), (4, None, False))

    def test_a_mock_with_the_spec_of_the_dual_allocator(self):
        allocator = MagicMock(spec=SWATokenToKVPoolAllocator)
        cache = unified(allocator, page_size=1, window=4)
        self.assertEqual((cache.sliding_window_size, cache.supports_swa()), (4, True))
        self.assertEqual(cache.tree_components, (FULL, SWA))
        self.assertEqual(allocator.mock_calls, [])
        for name in ("free_full", "free_swa", "translate_full_to_swa", "transfer_swa_mapping", "count_swa_mapped",
                     "free_group_begin", "free_group_end", "swa_available_size", "full_available_size"):  # fmt: skip
            self.assertTrue(hasattr(allocator, name), name)

    def test_a_mocked_allocator_gets_the_calls(self):
        allocator = MagicMock(spec=SWATokenToKVPoolAllocator)
        allocator.translate_full_to_swa.side_effect = lambda x, **kw: np.asarray(x, np.int32) + 100
        cache = unified(allocator, page_size=1, window=4)
        cache.insert(InsertParams(key=key(1, 2, 3, 4, rank=0), value=ids(10, 11, 12, 13)))
        out = cache.evict(EvictParams(num_tokens=4, dp_rank=0))
        self.assertEqual((out.num_tokens_evicted, out.swa_num_tokens_evicted), (4, 4))
        names = [c[0] for c in allocator.mock_calls if c[0] in ("free", "free_full", "free_swa")]
        self.assertEqual(names, ["free_full", "free_swa"])
        self.assertEqual(allocator.free_swa.call_args.args[0].tolist(), [10, 11, 12, 13])

    def test_attributes(self):
        cache = unified(swa_allocator(dp_size=2))
        root = cache.root_node
        self.assertEqual((len(root.key), root.component_data[FULL].value, root.parent), (0, [], None))
        self.assertEqual([root.component_data[ct].lock_ref for ct in (FULL, SWA)], [1, 1])
        self.assertEqual((set(cache.components), cache.tree_components), ({FULL, SWA}, (FULL, SWA)))
        self.assertEqual(cache._components_tuple, (cache.components[FULL], cache.components[SWA]))
        for table in (cache.component_evictable_size_, cache.component_protected_size_):
            self.assertEqual((table[FULL][0], table[SWA][1]), (0, 0))
        self.assertEqual(len(cache.evictable_device_leaves), 0)
        self.assertNotIn(root, cache.evictable_device_leaves)
        self.assertNotIn(root, cache.aux_evictable_device_nodes[SWA])
        self.assertIs(cache.hicache_enabled, False)
        self.assertEqual((cache.page_size, cache.disable, cache.is_eagle), (1, False, False))
        self.assertTrue(callable(cache.get_child_key_fn))
        self.assertIs(cache.recurrent_extra_buffer_active(), False)
        self.assertIs(cache.supports_recurrent(), False)

    def test_plain_attributes(self):
        cache, _ = plain()
        self.assertEqual(
            (cache.tree_components, cache.sliding_window_size, cache.supports_swa()), ((FULL,), None, False)
        )
        self.assertEqual(
            (cache.swa_evictable_size(0), cache.swa_protected_size(0), cache.recurrent_evictable_size(0)),
            (0, 0, 0),
        )

    def test_new_without_init(self):
        bare = UnifiedRadixCache.__new__(UnifiedRadixCache)
        calls = []
        bare.evict_req_swa = lambda req, pre_len, dp_rank: calls.append((req, pre_len, dp_rank))
        bare.full_evictable_size = bare.full_protected_size = lambda dp_rank=0: 4
        bare.swa_evictable_size = bare.swa_protected_size = lambda dp_rank=0: 0
        bare.evictable_size = bare.protected_size = lambda dp_rank=0: 4
        bare.page_size, bare.disable, bare.tree_components = 4, False, (FULL, SWA)
        bare.sanity_check = bare.inc_lock_ref = bare.dec_lock_ref = bare.evict = lambda *a, **k: None
        bare.root_node = object()
        bare.evict_req_swa("r", 3, dp_rank=1)
        self.assertEqual(calls, [("r", 3, 1)])
        self.assertIs(bare.supports_swa(), True)


class TestFullOnly(CustomTestCase):
    def test_insert_and_match(self):
        cache, _ = plain()
        result = cache.insert(InsertParams(key=key(1, 2, 3), value=ids(100, 101, 102)))
        self.assertIsInstance(result, InsertResult)
        self.assertEqual(result.prefix_len, 0)
        result = cache.insert(InsertParams(key=key(1, 2, 3, 4), value=np.arange(200, 204, dtype=np.int32)))
        self.assertEqual(result.prefix_len, 3)
        match = cache.match_prefix(MatchPrefixParams(key=key(1, 2, 3, 4, 5)))
        self.assertIsInstance(match, MatchResult)
        self.assertEqual(
            (match.device_indices.tolist(), match.device_indices.dtype), ([100, 101, 102, 203], np.int32)
        )
        self.assertIs(match.last_device_node, match.best_match_node)
        self.assertEqual(match.host_hit_length, 0)
        self.assertEqual(
            (cache.total_size(), cache.evictable_size(), cache.full_evictable_size(0)), (4, 4, 4)
        )
        self.assertEqual(cache.full_lru_list_evictable_size(), 4)

    def test_value_none_means_the_ids(self):
        cache, _ = plain()
        cache.insert(InsertParams(key=key(7, 8)))
        self.assertEqual(cache.match_prefix(MatchPrefixParams(key=key(7, 8))).device_indices.tolist(), [7, 8])

    def test_a_single_component_leaves_duplicates_to_the_caller(self):
        cache, allocator = plain()
        first, second = allocator.alloc(4), allocator.alloc(4)
        cache.insert(InsertParams(key=key(1, 2, 3, 4), value=first))
        cache.insert(InsertParams(key=key(1, 2, 3, 4), value=second))
        self.assertEqual(allocator.available_size(), 56)

    def test_eviction_of_fabricated_slots(self):
        cache, allocator = plain()
        cache.insert(InsertParams(key=key(1, 2, 3), value=ids(100, 101, 102)))
        cache.insert(InsertParams(key=key(9, 10), value=ids(10, 11)))
        out = cache.evict(EvictParams(num_tokens=1))
        self.assertIsInstance(out, EvictResult)
        self.assertEqual((out.num_tokens_evicted, cache.total_size()), (3, 2))
        cache.evict(EvictParams(num_tokens=100, dp_rank=0))
        self.assertEqual((cache.total_size(), allocator.available_size()), (0, 64))

    def test_split_and_pages(self):
        cache, _ = plain(page=4)
        cache.insert(InsertParams(key=RadixKey(list(range(10))), value=np.arange(100, 110, dtype=np.int32)))
        match = cache.match_prefix(MatchPrefixParams(key=RadixKey([0, 1, 2, 3, 4, 5, 9, 9])))
        self.assertEqual(match.device_indices.tolist(), [100, 101, 102, 103])
        node = match.last_device_node
        self.assertEqual((len(node.key), len(node.children)), (4, 1))
        self.assertEqual(cache.total_size(), 8)

    def test_locks(self):
        cache, _ = plain()
        cache.insert(InsertParams(key=key(1, 2, 3), value=ids(10, 11, 12)))
        node = cache.match_prefix(MatchPrefixParams(key=key(1, 2, 3))).last_device_node
        self.assertIn(node, cache.evictable_device_leaves)
        result = cache.inc_lock_ref(node)
        self.assertIsInstance(result, IncLockRefResult)
        self.assertEqual((result.delta, node.component_data[FULL].lock_ref), (-3, 1))
        self.assertNotIn(node, cache.evictable_device_leaves)
        self.assertEqual(
            (cache.evictable_size(), cache.protected_size(), cache.full_protected_size(0)), (0, 3, 3)
        )
        self.assertEqual(cache.evict(EvictParams(num_tokens=3)).num_tokens_evicted, 0)
        self.assertEqual(cache.dec_lock_ref(node), 0)
        self.assertEqual((cache.evictable_size(), cache.protected_size()), (3, 0))
        self.assertEqual(cache.dec_lock_ref(cache.root_node), 0)

    def test_extra_keys_and_ranks_are_apart(self):
        cache, _ = plain(dp=2)
        for rank in (0, 1):
            cache.insert(InsertParams(key=key(1, 2, rank=rank), value=ids(10 + rank, 20 + rank)))
        cache.insert(InsertParams(key=RadixKey([1, 2], "x", 0), value=ids(30, 31)))
        got = cache.match_prefix(MatchPrefixParams(key=key(1, 2, rank=1))).device_indices.tolist()
        self.assertEqual(got, [11, 21])
        self.assertEqual((cache.evictable_size(0), cache.evictable_size(1)), (4, 2))
        cache.evict(EvictParams(num_tokens=10, dp_rank=1))
        self.assertEqual((cache.evictable_size(0), cache.evictable_size(1)), (4, 0))

    def test_full_cache_without_rank_is_rank_zero(self):
        cache, _ = plain(dp=2)
        cache.insert(InsertParams(key=key(1, 2), value=ids(10, 11)))
        self.assertEqual((cache.evictable_size(), cache.evictable_size(0)), (2, 2))

    def test_disabled(self):
        allocator = TokenToKVPoolAllocator(8, None)
        cache = UnifiedRadixCache(ReqToTokenPool(2, 8), allocator, disable=True)
        self.assertEqual(cache.insert(InsertParams(key=key(1), value=ids(1))).prefix_len, 0)
        match = cache.match_prefix(MatchPrefixParams(key=key(1)))
        self.assertEqual((len(match.device_indices), match.last_device_node), (0, cache.root_node))
        self.assertEqual(cache.inc_lock_ref(cache.root_node).delta, 0)
        self.assertEqual(cache.evict(EvictParams(num_tokens=1)), EvictResult())

    def test_reset(self):
        cache, _ = plain()
        cache.insert(InsertParams(key=key(1, 2), value=ids(10, 11)))
        cache.reset()
        self.assertEqual(
            (cache.total_size(), cache.evictable_size(), len(cache.root_node.children)), (0, 0, 0)
        )

    def test_eagle_keys_are_bigrams(self):
        cache, _ = plain(is_eagle=True)
        cache.insert(InsertParams(key=key(1, 2, 3, 4), value=ids(10, 11, 12)))
        got = cache.match_prefix(MatchPrefixParams(key=key(1, 2, 3, 4))).device_indices.tolist()
        self.assertEqual(got, [10, 11, 12])


class TestHybridCore(CustomTestCase):
    def build(self, page=1, window=4, dp=1):
        allocator = swa_allocator(64, 64, page, dp)
        return unified(allocator, page, window), allocator

    def put(self, cache, allocator, n, rank=0):
        k = RadixKey(list(range(n)), None, rank)
        return cache.insert(InsertParams(key=k, value=allocator.alloc(n, dp_rank=rank)))

    def match(self, cache, n, **kw):
        return cache.match_prefix(MatchPrefixParams(key=RadixKey(list(range(n)), None, 0), **kw))

    def test_an_auxiliary_miss_only_disqualifies_that_node(self):
        cache, allocator = self.build()
        self.put(cache, allocator, 12)
        a = next(iter(cache.root_node.children.values()))
        b = next(iter(a.children.values()))
        cache.components[SWA].evict_component(b)
        self.assertEqual(len(self.match(cache, 12).device_indices), 12)
        self.assertEqual(len(self.match(cache, 8).device_indices), 4)
        self.assertEqual(len(self.match(cache, 8, full_only=True).device_indices), 8)

    def test_sizes_per_pool(self):
        cache, allocator = self.build(dp=2)
        self.put(cache, allocator, 8, rank=1)
        self.assertEqual(
            (cache.evictable_size(1), cache.full_evictable_size(dp_rank=1), cache.swa_evictable_size(1)),
            (8, 8, 8),
        )
        self.assertEqual((cache.evictable_size(0), cache.swa_evictable_size(0)), (0, 0))
        self.assertEqual(
            (cache.total_size(), cache.full_lru_list_evictable_size(), cache.swa_lru_list_evictable_size()),
            (8, 8, 8),
        )
        self.assertIsInstance(cache.total_size(), int)

    def test_candidates(self):
        cache, allocator = self.build()
        self.put(cache, allocator, 8)
        a = next(iter(cache.root_node.children.values()))
        b = next(iter(a.children.values()))
        aux = cache.aux_evictable_device_nodes[SWA]
        self.assertTrue(a in aux and b in aux)
        self.assertEqual(cache.evictable_device_leaves, {b})
        result = cache.inc_lock_ref(b)
        self.assertIn(a, cache.aux_evictable_device_nodes[SWA])
        self.assertNotIn(b, cache.aux_evictable_device_nodes[SWA])
        cache._update_aux_evictable_node_sets(b)
        self.assertNotIn(b, cache.aux_evictable_device_nodes[SWA])
        cache.dec_lock_ref(b, result.to_dec_params())
        self.assertIn(b, cache.aux_evictable_device_nodes[SWA])

    def test_evict_both_pools(self):
        cache, allocator = self.build()
        self.put(cache, allocator, 12)
        out = cache.evict(EvictParams(num_tokens=4, swa_num_tokens=8, dp_rank=0))
        self.assertEqual(out.num_tokens_evicted % 4, 0)
        self.assertGreaterEqual(out.num_tokens_evicted, 4)
        self.assertGreaterEqual(out.swa_num_tokens_evicted, 8)
        self.assertEqual(allocator.swa_available_size(), 52 + out.swa_num_tokens_evicted)
        self.assertEqual(allocator.full_available_size(), 52 + out.num_tokens_evicted)

    def test_insert_asks_every_component_and_takes_the_minimum(self):
        cache, allocator = self.build()
        self.put(cache, allocator, 4)
        spy = MagicMock(wraps=cache.components[FULL].update_component_on_insert_overlap, return_value=4)
        cache.components[FULL].update_component_on_insert_overlap = spy
        self.put(cache, allocator, 4)
        self.assertEqual(spy.call_count, 1)
        self.assertEqual(allocator.full_available_size(), 60)

    def test_a_full_tombstone_takes_the_fresh_slots_and_recovers_once(self):
        cache, allocator = self.build()
        self.put(cache, allocator, 4)
        (node,) = cache.root_node.children.values()
        cache.components[SWA].evict_component(node)
        cache.components[FULL].evict_component(node)
        cache.accounts.set_value(node, FULL, None)
        spy = MagicMock(wraps=cache.components[SWA].recover_after_unevict)
        cache.components[SWA].recover_after_unevict = spy
        fresh = allocator.alloc(4)
        result = cache.insert(InsertParams(key=RadixKey(list(range(4)), None, 0), value=fresh))
        self.assertEqual((result.prefix_len, spy.call_count), (4, 1))
        self.assertEqual(node.component_data[FULL].value.tolist(), fresh.tolist())
        swa = allocator.translate_full_to_swa(fresh, dp_rank=0)
        self.assertEqual(node.component_data[SWA].value.tolist(), swa.tolist())
        self.assertEqual((cache.full_evictable_size(), cache.swa_evictable_size()), (4, 4))

    def test_a_full_miss_freezes_the_prefix(self):
        cache, allocator = self.build()
        self.put(cache, allocator, 4)
        self.put(cache, allocator, 8)
        (node,) = cache.root_node.children.values()
        cache.accounts.set_value(node, FULL, None)
        self.assertEqual(len(self.match(cache, 8).device_indices), 0)
        self.assertEqual(len(self.match(cache, 8, full_only=True).device_indices), 0)

    def test_poked_ages_decide_the_full_order(self):
        cache, allocator = self.build()
        for start in (0, 100, 200):
            k = RadixKey(list(range(start, start + 4)), None, 0)
            cache.insert(InsertParams(key=k, value=allocator.alloc(4)))
        nodes = list(cache.root_node.children.values())
        for node, at in zip(nodes, (3.0, 1.0, 2.0), strict=True):
            node.last_access_time = at
        cache.evict(EvictParams(num_tokens=1, dp_rank=0))
        self.assertEqual(list(cache.root_node.children.values()), [nodes[0], nodes[2]])

    def test_reset_keeps_working(self):
        cache, allocator = self.build()
        self.put(cache, allocator, 8)
        cache.reset()
        allocator.clear()
        self.assertEqual((cache.evictable_size(), cache.swa_evictable_size()), (0, 0))
        self.put(cache, allocator, 8)
        self.assertEqual(cache.total_size(), 8)
        self.assertEqual(set(ComponentType), {FULL, SWA, ComponentType.RECURRENT})


if __name__ == "__main__":
    unittest.main()
