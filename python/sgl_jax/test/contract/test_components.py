"""Component vocabulary and SWAComponent facts, with the hooks called directly on the components of a real tree."""

from __future__ import annotations

import types
import unittest
from unittest.mock import MagicMock

import numpy as np

from sgl_jax.srt.mem_cache import unified_cache_components as ucc
from sgl_jax.srt.mem_cache.base_prefix_cache import (
    DecLockRefParams,
    EvictParams,
    IncLockRefResult,
    InsertParams,
    MatchPrefixParams,
)
from sgl_jax.srt.mem_cache.cache_init_params import CacheInitParams
from sgl_jax.srt.mem_cache.radix_cache import RadixKey
from sgl_jax.srt.mem_cache.unified_cache_components import (
    _NUM_COMPONENT_TYPES,
    BASE_COMPONENT_TYPE,
    CacheTransferPhase,
    ComponentData,
    ComponentType,
    EvictLayer,
    FullComponent,
    LRURefreshPhase,
    SWAComponent,
    TreeComponent,
    get_and_increase_time_counter,
    next_component_uuid,
)
from sgl_jax.srt.mem_cache.unified_radix_cache import UnifiedTreeNode
from sgl_jax.test.contract.kit import FULL, SWA, fake_req, ids, swa_allocator, unified
from sgl_jax.test.test_utils import CustomTestCase


class Tree:
    """A unified tree over a real dual allocator, with the walks a test needs."""

    def __init__(self, page=1, window=4, dp=1, size=64, size_swa=64):
        self.allocator = swa_allocator(size, size_swa, page, dp)
        self.cache = unified(self.allocator, page, window)
        self.swa, self.full = self.cache.components[SWA], self.cache.components[FULL]

    def key(self, n, rank=0):
        return RadixKey(list(range(n)), dp_rank=rank)

    def insert(self, n, cursor=0, prev=0, value=None, rank=0):
        value = self.allocator.alloc(n, dp_rank=rank) if value is None else value
        if cursor:
            self.allocator.free_swa(value[:cursor], dp_rank=rank)
        result = self.cache.insert(
            InsertParams(key=self.key(n, rank), value=value, prev_prefix_len=prev, swa_evicted_seqlen=cursor)
        )
        return result, value

    def chain(self):
        """Nodes of the only branch, root excluded, from the top."""
        nodes, node = [], self.cache.root_node
        while node.children:
            (node,) = node.children.values()
            nodes.append(node)
        return nodes

    def shape(self):
        return [(len(n.key), n.component_data[SWA].value is not None) for n in self.chain()]

    def sizes(self):
        c = self.cache
        return (
            c.component_evictable_size_[FULL][0], c.component_protected_size_[FULL][0],
            c.component_evictable_size_[SWA][0], c.component_protected_size_[SWA][0],
        )  # fmt: skip

    def free(self):
        return self.allocator.full_available_size(), self.allocator.swa_available_size()


class TestVocabulary(CustomTestCase):
    def test_types(self):
        self.assertEqual((ComponentType.FULL, ComponentType.SWA, ComponentType.RECURRENT), (0, 1, 2))
        self.assertEqual([str(c) for c in ComponentType], ["full", "swa", "recurrent"])
        self.assertTrue(
            FULL.is_full and SWA.is_swa and ComponentType.RECURRENT.is_recurrent and not FULL.is_swa
        )
        self.assertIs(BASE_COMPONENT_TYPE, FULL)
        self.assertEqual(_NUM_COMPONENT_TYPES, 3)
        self.assertEqual((EvictLayer.DEVICE, EvictLayer.HOST, EvictLayer.ALL), (1, 2, 3))
        self.assertEqual(EvictLayer.DEVICE | EvictLayer.HOST, EvictLayer.ALL)
        self.assertEqual(
            {str(p) for p in CacheTransferPhase}, {"backup_host", "load_back", "backup_storage", "prefetch"}
        )
        self.assertEqual((LRURefreshPhase.WALKDOWN, LRURefreshPhase.MATCH_END), ("walkdown", "match_end"))
        self.assertEqual(LRURefreshPhase.INSERT_END, "insert_end")

    def test_component_data(self):
        a, b = ComponentData(), ComponentData()
        self.assertEqual(
            (a.value, a.lock_ref, a.host_value, a.host_lock_ref, a.metadata), (None, 0, None, 0, {})
        )
        a.metadata["component_uuid"] = 3
        self.assertEqual(b.metadata, {})

    def test_counters(self):
        self.assertLess(get_and_increase_time_counter(), get_and_increase_time_counter())
        self.assertLess(next_component_uuid(), next_component_uuid())

    def test_exports(self):
        for name in ("BASE_COMPONENT_TYPE", "CacheTransferPhase", "ComponentData", "ComponentType", "EvictLayer",
                     "FullComponent", "InsertResult", "LRURefreshPhase", "SWAComponent", "TreeComponent"):  # fmt: skip
            self.assertTrue(hasattr(ucc, name), name)
        self.assertTrue(issubclass(SWAComponent, TreeComponent) and issubclass(FullComponent, TreeComponent))


class TestConstruction(CustomTestCase):
    def test_needs_a_positive_window(self):
        for window in (None, 0, -4):
            with self.assertRaisesRegex(ValueError, "sliding_window_size"):
                SWAComponent(MagicMock(), CacheInitParams(None, None, 1, sliding_window_size=window))
            with self.assertRaisesRegex(ValueError, "sliding_window_size"):
                unified(swa_allocator(), 1, window)
        made = SWAComponent(types.SimpleNamespace(), CacheInitParams(None, None, 1, sliding_window_size=4))
        self.assertEqual(made.sliding_window_size, 4)

    def test_eviction_priorities(self):
        t = Tree()
        self.assertEqual([t.full.eviction_priority(x) for x in (True, False)], [0, 2])
        self.assertEqual([t.swa.eviction_priority(x) for x in (True, False)], [0, 1])


class TestLeaves(CustomTestCase):
    def test_a_new_leaf_is_cut_from_the_end(self):
        for page, window, n, expected in (
            (1, 4, 8, [4, 4]),
            (256, 128, 512, [256, 256]),
            (2, 4, 12, [4, 4, 4]),
        ):
            with self.subTest(page=page):
                t = Tree(page, window, size=2 * n, size_swa=2 * n)
                result, value = t.insert(n)
                self.assertEqual(result.prefix_len, 0)
                self.assertEqual(t.shape(), [(size, True) for size in expected])
                got = np.concatenate([x.component_data[FULL].value for x in t.chain()])
                np.testing.assert_array_equal(got, value)
                for node in t.chain():
                    data = node.component_data
                    self.assertEqual(len(data), 3)
                    expect = t.allocator.translate_full_to_swa(data[FULL].value, dp_rank=0)
                    np.testing.assert_array_equal(data[SWA].value, expect)
                    self.assertIsNone(data[ComponentType.RECURRENT].value)
                self.assertEqual(t.sizes(), (n, 0, n, 0))

    def test_value_is_a_copy(self):
        t = Tree()
        t.insert(4)
        node = t.chain()[0]
        t.allocator.full_to_swa_index_mapping[node.component_data[FULL].value] = 0
        self.assertTrue((node.component_data[SWA].value > 0).all())

    def test_a_leaf_below_the_cursor_is_not_created(self):
        t = Tree()
        result, _ = t.insert(4, cursor=4)
        self.assertEqual((result.prefix_len, t.chain(), t.free()), (0, [], (64, 64)))

    def test_a_leaf_across_the_cursor(self):
        t = Tree(page=2)
        t.insert(12, cursor=6)
        self.assertEqual(t.shape(), [(6, False), (2, True), (4, True)])
        self.assertEqual(t.sizes(), (12, 0, 6, 0))
        t = Tree()
        t.insert(12, cursor=7)
        self.assertEqual(t.shape(), [(7, False), (1, True), (4, True)])

    def test_should_skip(self):
        t = Tree()
        self.assertIs(t.swa.should_skip_leaf_creation(0, 4, InsertParams(swa_evicted_seqlen=4)), True)
        self.assertIs(t.swa.should_skip_leaf_creation(0, 4, InsertParams(swa_evicted_seqlen=3)), False)
        self.assertIs(t.full.should_skip_leaf_creation(0, 4, InsertParams(swa_evicted_seqlen=4)), False)


class TestValidator(CustomTestCase):
    def test_it_keeps_state_from_the_root(self):
        t = Tree()
        t.insert(12)
        a, b, c = t.chain()
        valid = t.swa.create_match_validator()
        self.assertEqual([valid(a), valid(b), valid(c)], [True, True, True])
        t.swa.evict_component(b)
        valid = t.swa.create_match_validator()
        self.assertEqual([valid(a), valid(b), valid(c)], [True, False, True])
        t2 = Tree(window=8)
        t2.insert(8)
        t2.insert(12)
        a, b = t2.chain()
        t2.swa.evict_component(a)
        valid = t2.swa.create_match_validator()
        self.assertEqual([valid(a), valid(b)], [False, False])

    def test_full_needs_a_value(self):
        t = Tree()
        t.insert(4)
        (node,) = t.chain()
        valid = t.full.create_match_validator(match_device_only=True)
        self.assertIs(valid(node), True)
        bare = UnifiedTreeNode((FULL, SWA))
        self.assertIs(valid(bare), False)
        bare.component_data[FULL].host_value = ids(1)
        self.assertIs(valid(bare), False)

    def test_presence(self):
        t = Tree()
        t.insert(4)
        (node,) = t.chain()
        self.assertIs(t.swa.node_has_component_data(node, EvictLayer.DEVICE), True)
        self.assertIs(t.swa.node_has_component_data(node, EvictLayer.HOST), False)
        self.assertEqual((t.swa.value_len(node), t.full.value_len(node)), (4, 4))
        t.swa.evict_component(node)
        self.assertIs(t.swa.node_has_component_data(node, target=EvictLayer.DEVICE), False)
        self.assertEqual(t.swa.value_len(node), 0)


class TestHealing(CustomTestCase):
    """Overlap of a tombstone [0, 4) with fresh slots; the hook called positionally, as a test does."""

    def tombstone(self, page=1, window=4):
        t = Tree(page, window)
        _, value = t.insert(4)
        (node,) = t.chain()
        t.swa.evict_component(node)
        return t, node, value, t.allocator.alloc(4)

    def test_adopt_all(self):
        t, node, old, fresh = self.tombstone()
        params = InsertParams(key=t.key(4), value=fresh)
        self.assertEqual(t.swa.update_component_on_insert_overlap(node, 4, 0, fresh, params), 0)
        np.testing.assert_array_equal(node.component_data[FULL].value, fresh)
        np.testing.assert_array_equal(
            node.component_data[SWA].value, t.allocator.translate_full_to_swa(fresh, dp_rank=0)
        )
        self.assertEqual(t.free(), (60, 60))
        self.assertEqual(sorted(t.allocator.alloc(60).tolist())[:4], old.tolist())

    def test_adopt_under_a_full_lock_moves_the_mapping(self):
        t, node, old, fresh = self.tombstone()
        t.full.acquire_component_lock(node, IncLockRefResult())
        swa = t.allocator.translate_full_to_swa(fresh, dp_rank=0)
        params = InsertParams(key=t.key(4), value=fresh)
        self.assertEqual(t.swa.update_component_on_insert_overlap(node, 4, 0, fresh, params), 0)
        np.testing.assert_array_equal(node.component_data[FULL].value, old)
        np.testing.assert_array_equal(t.allocator.full_to_swa_index_mapping[old], swa)
        np.testing.assert_array_equal(node.component_data[SWA].value, swa)
        self.assertFalse(t.allocator.full_to_swa_index_mapping[fresh].any())
        self.assertEqual(t.free(), (60, 60))

    def test_inside(self):
        t, node, old, fresh = self.tombstone(page=2)
        t.allocator.free_swa(fresh[:2])
        params = InsertParams(key=t.key(4), value=fresh, swa_evicted_seqlen=2)
        self.assertEqual(t.swa.update_component_on_insert_overlap(node, 4, 0, fresh, params), 2)
        self.assertEqual(node.key.token_ids, [2, 3])
        self.assertEqual(node.parent.key.token_ids, [0, 1])
        self.assertIsNone(node.parent.component_data[SWA].value)
        self.assertIs(node.parent.parent, t.cache.root_node)
        np.testing.assert_array_equal(node.parent.component_data[FULL].value, old[:2])
        np.testing.assert_array_equal(node.component_data[FULL].value, fresh[2:])

    def test_beyond_and_live_take_nothing(self):
        t, node, old, fresh = self.tombstone()
        for params in (
            InsertParams(key=t.key(4), value=fresh, swa_evicted_seqlen=4),
            InsertParams(key=t.key(4), value=fresh, prev_prefix_len=4),
        ):
            self.assertEqual(t.swa.update_component_on_insert_overlap(node, 4, 0, fresh, params), 4)
        self.assertIsNone(node.component_data[SWA].value)
        np.testing.assert_array_equal(node.component_data[FULL].value, old)
        live = Tree()
        live.insert(4)
        fresh = live.allocator.alloc(4)
        got = live.swa.update_component_on_insert_overlap(
            live.chain()[0], 4, 0, fresh, InsertParams(key=live.key(4), value=fresh)
        )
        self.assertEqual((got, live.free()), (4, (56, 56)))

    def test_keyword_call(self):
        t, node, _, fresh = self.tombstone()
        got = t.swa.update_component_on_insert_overlap(
            node=node,
            prefix_len=4,
            total_prefix_len=0,
            value_slice=fresh,
            params=InsertParams(key=t.key(4), value=fresh),
        )
        self.assertEqual(got, 0)

    def test_the_core_frees_the_duplicates_once(self):
        t = Tree()
        t.insert(4)
        result, _ = t.insert(8)
        self.assertEqual((result.prefix_len, t.free()), (4, (56, 56)))
        result, _ = t.insert(
            8, prev=4, value=np.concatenate((t.chain()[0].component_data[FULL].value, t.allocator.alloc(4)))
        )
        self.assertEqual((result.prefix_len, t.free()), (8, (56, 56)))


class TestEviction(CustomTestCase):
    def test_internal(self):
        t = Tree()
        t.insert(8)
        a, b = t.chain()
        full = a.component_data[FULL].value.copy()
        self.assertEqual(t.swa.evict_component(a), (4, 0))
        self.assertIsNone(a.component_data[SWA].value)
        np.testing.assert_array_equal(a.component_data[FULL].value, full)
        self.assertEqual((t.sizes(), t.free()), ((8, 0, 4, 0), (56, 60)))
        self.assertFalse(t.allocator.full_to_swa_index_mapping[full].any())
        self.assertIn(b, t.cache.aux_evictable_device_nodes[SWA])
        self.assertNotIn(a, t.cache.aux_evictable_device_nodes[SWA])
        self.assertEqual(t.swa.evict_component(a), (0, 0))

    def test_a_leaf_goes_whole_and_both_counts_are_exact(self):
        t = Tree()
        t.insert(4)
        (leaf,) = t.chain()
        out = t.cache.evict(EvictParams(swa_num_tokens=4, dp_rank=0))
        self.assertEqual((out.num_tokens_evicted, out.swa_num_tokens_evicted), (4, 4))
        self.assertIsNone(leaf.component_data[FULL].value)
        self.assertIsNone(leaf.component_data[SWA].value)
        self.assertEqual((t.chain(), t.free()), ([], (64, 64)))

    def test_a_request_smaller_than_a_node(self):
        t = Tree(page=256, window=128, size=512, size_swa=512)
        t.insert(256)
        out = t.cache.evict(EvictParams(num_tokens=128, dp_rank=0))
        self.assertEqual((out.num_tokens_evicted, out.swa_num_tokens_evicted), (256, 256))
        t.insert(256)
        out = t.cache.evict(EvictParams(swa_num_tokens=128, dp_rank=0))
        self.assertEqual(out.swa_num_tokens_evicted, 256)

    def test_full_does_not_clear_its_value(self):
        t = Tree()
        t.insert(4)
        (leaf,) = t.chain()
        self.assertEqual(t.full.evict_component(leaf), (4, 0))
        self.assertIsNotNone(leaf.component_data[FULL].value)
        self.assertEqual(t.free(), (64, 60))

    def test_evict_device_leaf_with_a_tracker(self):
        t = Tree()
        t.insert(4)
        tracker = dict.fromkeys(ComponentType, 0)
        t.cache._evict_device_leaf(t.chain()[0], tracker)
        self.assertEqual((tracker[FULL], tracker[SWA], t.chain()), (4, 4, []))

    def test_swa_lru_internal_first_when_it_is_older(self):
        t = Tree()
        t.insert(8)
        a, b = t.chain()
        a.component_data[SWA].metadata["last_access_time"] = 1.0
        b.component_data[SWA].metadata["last_access_time"] = 2.0
        t.cache.evict(EvictParams(swa_num_tokens=1, dp_rank=0))
        self.assertEqual(t.shape(), [(4, False), (4, True)])


class TestLocks(CustomTestCase):
    def test_window_uuid_and_protected_whole_nodes(self):
        t = Tree()
        t.insert(12)
        a, b, c = t.chain()
        result = t.swa.acquire_component_lock(c, IncLockRefResult())
        uuid = c.component_data[SWA].metadata["component_uuid"]
        self.assertEqual(result.swa_uuid_for_lock, uuid)
        self.assertEqual(result.skip_lock_node_ids[SWA], [])
        self.assertIsInstance(result.skip_lock_node_ids[SWA], list)
        self.assertEqual([n.component_data[SWA].lock_ref for n in (a, b, c)], [0, 0, 1])
        self.assertEqual(t.sizes(), (12, 0, 8, 4))
        again = t.swa.acquire_component_lock(c, IncLockRefResult())
        self.assertEqual(again.swa_uuid_for_lock, uuid)
        t.swa.release_component_lock(c, result.to_dec_params())
        t.swa.release_component_lock(c, again.to_dec_params())
        self.assertEqual(c.component_data[SWA].metadata["component_uuid"], uuid)
        self.assertEqual(t.sizes(), (12, 0, 12, 0))

    def test_tombstones_are_passed_and_listed(self):
        t = Tree()
        t.insert(12)
        a, b, c = t.chain()
        t.swa.evict_component(c)
        result = t.cache.inc_lock_ref(c)
        self.assertIn(c.id, result.skip_lock_node_ids[SWA])
        self.assertEqual(result.swa_uuid_for_lock, b.component_data[SWA].metadata["component_uuid"])
        self.assertEqual([n.component_data[SWA].lock_ref for n in (a, b, c)], [0, 1, 0])
        self.assertEqual([n.component_data[FULL].lock_ref for n in (a, b, c)], [1, 1, 1])
        t.cache.dec_lock_ref(c, result.to_dec_params())
        self.assertEqual(t.cache.swa_protected_size(0), 0)

    def test_the_root_ends_a_short_path_without_uuid(self):
        t = Tree(window=8)
        t.insert(4)
        (node,) = t.chain()
        result = t.cache.inc_lock_ref(node)
        self.assertEqual((result.swa_uuid_for_lock, result.delta), (None, -4))
        self.assertEqual(t.sizes(), (0, 4, 0, 4))
        self.assertEqual(t.cache.dec_lock_ref(node, result.to_dec_params()), 0)
        self.assertEqual(t.sizes(), (4, 0, 4, 0))

    def test_hand_built_receipt(self):
        t = Tree()
        t.insert(8)
        b = t.chain()[1]
        result = t.cache.inc_lock_ref(b)
        params = DecLockRefParams(
            swa_uuid_for_lock=result.swa_uuid_for_lock, skip_lock_node_ids=result.skip_lock_node_ids
        )
        t.cache.dec_lock_ref(b, params)
        self.assertEqual(t.sizes(), (8, 0, 8, 0))

    def test_full_locks_to_the_root(self):
        t = Tree()
        t.insert(8)
        a, b = t.chain()
        result = t.full.acquire_component_lock(b, IncLockRefResult())
        self.assertEqual(
            (a.component_data[FULL].lock_ref, b.component_data[FULL].lock_ref, result.delta), (1, 1, -8)
        )
        t.full.release_component_lock(b, DecLockRefParams())
        self.assertEqual(t.sizes()[:2], (8, 0))

    def test_a_split_copies_the_lock_and_moves_the_uuid(self):
        t = Tree(page=2)
        t.insert(4)
        (child,) = t.chain()
        result = t.cache.inc_lock_ref(child)
        uuid = result.swa_uuid_for_lock
        parent = t.cache._split_node(child.key, child, 2)
        self.assertIs(child.parent, parent)
        up, down = parent.component_data[SWA], child.component_data[SWA]
        self.assertEqual((up.lock_ref, down.lock_ref), (1, 1))
        self.assertEqual(
            (up.metadata.get("component_uuid"), down.metadata.get("component_uuid")), (uuid, None)
        )
        self.assertIsNot(up.metadata, down.metadata)
        self.assertEqual(parent.component_data[FULL].lock_ref, 1)
        self.assertEqual((len(up.value), len(down.value)), (2, 2))
        t.cache.dec_lock_ref(child, result.to_dec_params())
        self.assertEqual(t.sizes(), (4, 0, 4, 0))

    def test_split_derives_both_halves(self):
        t = Tree(page=2)
        t.insert(4)
        (child,) = t.chain()
        parent = t.cache._split_node(child.key, child, 2)
        for node in (parent, child):
            np.testing.assert_array_equal(
                node.component_data[SWA].value,
                t.allocator.translate_full_to_swa(node.component_data[FULL].value, dp_rank=0),
            )
        self.assertEqual((parent.key.token_ids, child.key.token_ids), ([0, 1], [2, 3]))


class TestRefresh(CustomTestCase):
    def stamp(self, nodes, *times):
        for node, at in zip(nodes, times, strict=True):
            node.component_data[SWA].metadata["last_access_time"] = at

    def times(self, nodes):
        return [n.component_data[SWA].metadata["last_access_time"] for n in nodes]

    def test_descending_upward_over_window_plus_page(self):
        t = Tree(page=2)
        t.insert(12)
        a, b, c = t.chain()
        self.stamp((a, b, c), 1.0, 2.0, 3.0)
        t.swa.refresh_lru(LRURefreshPhase.MATCH_END, c, t.cache.root_node)
        ta, tb, tc = self.times((a, b, c))
        self.assertEqual(ta, 1.0)
        self.assertGreater(tb, 3.0)
        self.assertGreater(tc, tb)

    def test_nodes_below_the_endpoint_and_the_walk_down(self):
        t = Tree(page=2)
        t.insert(12)
        a, b, c = t.chain()
        self.stamp((a, b, c), 1.0, 2.0, 3.0)
        t.swa.refresh_lru(LRURefreshPhase.WALKDOWN, c, t.cache.root_node)
        self.assertEqual(self.times((a, b, c)), [1.0, 2.0, 3.0])
        t.swa.refresh_lru(LRURefreshPhase.MATCH_END, b, t.cache.root_node)
        ta, tb, tc = self.times((a, b, c))
        self.assertGreater(ta, 3.0)
        self.assertGreater(tb, ta)
        self.assertEqual(tc, 3.0)

    def test_tombstones_use_budget_and_get_no_stamp(self):
        t = Tree(page=2)
        t.insert(12)
        a, b, c = t.chain()
        t.swa.evict_component(b)
        self.stamp((a, b, c), 1.0, 2.0, 3.0)
        t.swa.refresh_lru(LRURefreshPhase.MATCH_END, c, t.cache.root_node)
        ta, tb, tc = self.times((a, b, c))
        self.assertEqual((ta, tb), (1.0, 2.0))
        self.assertGreater(tc, 3.0)

    def test_match_refreshes(self):
        t = Tree(page=2)
        t.insert(8)
        a, b = t.chain()
        self.stamp((a, b), 1.0, 2.0)
        t.cache.match_prefix(MatchPrefixParams(key=t.key(8)))
        self.assertTrue(all(at > 2.0 for at in self.times((a, b))))


class TestRequestsAndRanks(CustomTestCase):
    def test_prepare_copies_the_cursor(self):
        t = Tree()
        params = InsertParams()
        self.assertIsNone(t.swa.prepare_for_caching_req(fake_req(swa_evicted_seqlen=6), params, 10, False))
        self.assertEqual(params.swa_evicted_seqlen, 6)
        self.assertIsNone(t.swa.prepare_for_caching_req(
            req=fake_req(), insert_params=params, token_ids_len=1, is_finished=True))  # fmt: skip
        self.assertIsNone(
            t.swa.cleanup_after_caching_req(fake_req(), True, insert_result=None, insert_params=params)
        )

    def test_a_node_without_rank_above_dp_one(self):
        t = Tree(dp=2)
        node = UnifiedTreeNode((FULL, SWA))
        node.key = RadixKey([1, 2])
        node.parent = t.cache.root_node
        node.component_data[FULL].value = ids(1, 2)
        node.component_data[SWA].value = ids(1, 2)
        with self.assertRaisesRegex(ValueError, "dp_rank"):
            t.swa.evict_component(node)
        with self.assertRaisesRegex(ValueError, "dp_rank"):
            t.cache.insert(InsertParams(key=RadixKey([1, 2]), value=ids(1, 2)))
        with self.assertRaisesRegex(ValueError, "dp_rank"):
            t.cache.match_prefix(MatchPrefixParams(key=RadixKey([1, 2])))


if __name__ == "__main__":
    unittest.main()
