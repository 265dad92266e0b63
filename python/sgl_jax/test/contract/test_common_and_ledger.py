"""Allocation helpers, the release path and the ledger of every SWA-capable cache, mapping poked by hand."""

from __future__ import annotations

import types
import unittest
from unittest.mock import MagicMock

import numpy as np

from sgl_jax.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
from sgl_jax.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sgl_jax.srt.mem_cache.chunk_cache import ChunkCache, SWAChunkCache
from sgl_jax.srt.mem_cache.common import (
    alloc_paged_token_slots_extend,
    alloc_token_slots,
    available_and_evictable_str,
    evict_from_tree_cache,
    release_kv_cache,
)
from sgl_jax.srt.mem_cache.ledger import validate_swa_cache_ledger
from sgl_jax.srt.mem_cache.memory_pool import ReqToTokenPool
from sgl_jax.srt.mem_cache.radix_cache import RadixKey
from sgl_jax.srt.mem_cache.swa_radix_cache import SWARadixCache
from sgl_jax.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sgl_jax.test.contract.kit import SWA, fake_req, ids, swa_allocator, unified
from sgl_jax.test.test_utils import CustomTestCase


class TestAllocation(CustomTestCase):
    def cache(self, size=8, page=1):
        made = (
            TokenToKVPoolAllocator(size, None) if page == 1 else PagedTokenToKVPoolAllocator(size, page, None)
        )
        return UnifiedRadixCache(ReqToTokenPool(4, 16), made, page_size=page), made

    def test_token_slots_evict_then_fail(self):
        cache, _ = self.cache()
        self.assertEqual(alloc_token_slots(cache, 3).tolist(), [1, 2, 3])
        cache.insert(InsertParams(key=RadixKey([1, 2, 3], None, 0), value=ids(1, 2, 3)))
        slots, state = alloc_token_slots(cache, 5, backup_state=True)
        self.assertEqual((len(slots), len(state)), (5, 2))
        self.assertEqual(sorted(alloc_token_slots(cache, 3, dp_rank=0).tolist()), [1, 2, 3])
        with self.assertRaisesRegex(RuntimeError, "Out of memory"):
            alloc_token_slots(cache, 1)

    def test_paged_extend(self):
        cache, _ = self.cache(16, 4)
        out = alloc_paged_token_slots_extend(cache, [0], [6], [-1], 6)
        self.assertEqual(out.tolist(), [4, 5, 6, 7, 8, 9])
        out, state = alloc_paged_token_slots_extend(
            cache, ids(6), ids(9), ids(9), 3, backup_state=True, dp_rank=0
        )
        self.assertEqual((out.tolist(), len(state)), ([10, 11, 12], 2))
        with self.assertRaisesRegex(RuntimeError, "Prefill out of memory"):
            alloc_paged_token_slots_extend(cache, [0], [16], [-1], 16)

    def test_dual_pool(self):
        allocator = swa_allocator(16, 8)
        cache = unified(allocator)
        self.assertEqual(len(alloc_token_slots(cache, 8)), 8)
        with self.assertRaisesRegex(RuntimeError, "Out of memory"):
            alloc_token_slots(cache, 1)
        text = available_and_evictable_str(cache, 0)
        self.assertIsInstance(text, str)
        self.assertIn("swa", text)
        self.assertIsInstance(available_and_evictable_str(self.cache()[0]), str)

    def test_shortfalls_per_pool(self):
        allocator = swa_allocator(16, 8)
        cache = unified(allocator)
        allocator.alloc(6)
        cache.evict = MagicMock()
        evict_from_tree_cache(cache, 12, dp_rank=0)
        cache.evict.assert_called_once_with(EvictParams(num_tokens=2, swa_num_tokens=10, dp_rank=0))
        cache.evict.reset_mock()
        evict_from_tree_cache(cache, 2)
        cache.evict.assert_not_called()

    def test_no_cache_and_chunk_cache(self):
        evict_from_tree_cache(None, 100)
        chunk = ChunkCache(ReqToTokenPool(2, 8), TokenToKVPoolAllocator(8, None), 1)
        evict_from_tree_cache(chunk, 100, dp_rank=0)
        evict_from_tree_cache(SWAChunkCache(ReqToTokenPool(2, 8), swa_allocator(16, 8), 1, 4), 100)


class TestRelease(CustomTestCase):
    def test_no_row_is_a_no_op(self):
        cache = MagicMock()
        release_kv_cache(fake_req(req_pool_idx=None), cache)
        cache.cache_finished_req.assert_not_called()

    def test_order_with_a_mocked_cache(self):
        for is_insert in (True, False):
            cache, req = MagicMock(), fake_req(kv_committed_len=4, kv_allocated_len=4)
            release_kv_cache(req, cache, is_insert=is_insert)
            cache.cache_finished_req.assert_called_once_with(req, is_insert=is_insert)
            cache.req_to_token_pool.free.assert_called_once_with(req)
            names = [
                c[0] for c in cache.mock_calls if c[0] in ("cache_finished_req", "req_to_token_pool.free")
            ]
            self.assertEqual(names, ["cache_finished_req", "req_to_token_pool.free"])
            cache.token_to_kv_pool_allocator.free.assert_not_called()

    def world(self):
        allocator, pool = PagedTokenToKVPoolAllocator(32, 4, None), ReqToTokenPool(2, 32)
        cache = UnifiedRadixCache(pool, allocator, page_size=4)
        pool.req_to_token[0, :16] = allocator.alloc(16)
        pool.free_slots = [1]
        req = fake_req(
            origin_input_ids=list(range(10)),
            last_node=cache.root_node,
            kv_committed_len=10,
            kv_allocated_len=16,
        )
        return cache, allocator, pool, req

    def test_the_over_allocated_tail_is_freed_from_the_next_page_on(self):
        cache, allocator, pool, req = self.world()
        release_kv_cache(req, cache, allow_overallocated=True)
        self.assertEqual((allocator.available_size(), cache.evictable_size()), (24, 8))
        self.assertIsNone(req.req_pool_idx)
        self.assertEqual(pool.available_size(), 2)

    def test_over_allocation_asserts_otherwise(self):
        cache, _, _, req = self.world()
        with self.assertRaises(AssertionError):
            release_kv_cache(req, cache, is_insert=False)


KEYS = {
    "dp_rank",
    *(
        f"{p}_{n}"
        for p in ("full", "swa")
        for n in (
            "capacity", "available", "tree_evictable", "tree_protected", "request_owned", "reserved_page_slack",
            "duplicate_tree_owner_count", "tree_bucket_overlap_count", "duplicate_request_owner_count",
            "request_tree_overlap_count", "evicted_total",
        )
    ),
    "mapping_nonzero_count", "mapping_invalid_count", "mapping_duplicate_count", "mapping_source_mismatch_count",
    "mapping_owner_mismatch_count", "mapping_pair_mismatch_count", "tombstone_created_total", "tombstone_healed_total",
}  # fmt: skip


class TestLedger(CustomTestCase):
    def build(self, kind="unified", page=1, dp=1):
        self.allocator = swa_allocator(64, 64, page, dp)
        self.pool = ReqToTokenPool(8, 64)
        if kind == "unified":
            self.cache = unified(self.allocator, page, 4, self.pool)
        elif kind == "legacy":
            self.cache = SWARadixCache(self.pool, self.allocator, 4, page)
        else:
            self.cache = SWAChunkCache(self.pool, self.allocator, page, 4)
        return self.cache

    def live(self, row, allocated, protected=0, cursor=0, rank=0):
        """The only fields a ledger fake carries."""
        return types.SimpleNamespace(
            dp_rank=rank, req_pool_idx=row, cache_protected_len=protected, kv_allocated_len=allocated,
            swa_evicted_seqlen=cursor,
        )  # fmt: skip

    def insert(self, n, rank=0):
        value = self.allocator.alloc(n, dp_rank=rank)
        self.cache.insert(InsertParams(key=RadixKey(list(range(n)), None, rank), value=value))
        return value

    def test_keys_and_balance_of_all_three(self):
        for kind in ("unified", "legacy", "chunk"):
            with self.subTest(kind=kind):
                cache = self.build(kind)
                if kind != "chunk":
                    self.insert(8)
                self.pool.req_to_token[0, :6] = self.allocator.alloc(6)
                self.allocator.free_swa(self.pool.req_to_token[0, :2])
                snap = cache.cache_ledger_snapshot(0, [self.live(0, 6, cursor=2)])
                self.assertEqual(set(snap), KEYS)
                self.assertEqual(len(snap), 31)
                self.assertTrue(all(type(v) is int for v in snap.values()))
                tree = 0 if kind == "chunk" else 8
                got = [
                    snap[f"full_{n}"] for n in ("capacity", "available", "tree_evictable", "request_owned")
                ]
                self.assertEqual(got, [64, 58 - tree, tree, 6])
                got = [snap[f"swa_{n}"] for n in ("capacity", "available", "tree_evictable", "request_owned")]
                self.assertEqual(got, [64, 60 - tree, tree, 4])
                self.assertEqual(snap["mapping_nonzero_count"], tree + 4)
                self.assertIsNone(validate_swa_cache_ledger(snap, require_idle=False))
                with self.assertRaises(ValueError):
                    validate_swa_cache_ledger(snap, require_idle=True)

    def test_slack_of_a_partly_used_page(self):
        cache = self.build(page=4)
        self.pool.req_to_token[0, :6] = self.allocator.alloc_extend([0], [6], [-1], 6)
        snap = cache.cache_ledger_snapshot(0, [self.live(0, 6)])
        self.assertEqual((snap["full_reserved_page_slack"], snap["swa_reserved_page_slack"]), (2, 2))
        validate_swa_cache_ledger(snap, require_idle=False)

    def test_ranks(self):
        cache = self.build(dp=2)
        self.insert(8, rank=1)
        zero, one = (cache.cache_ledger_snapshot(r, []) for r in (0, 1))
        self.assertEqual((zero["dp_rank"], zero["full_tree_evictable"], zero["full_capacity"]), (0, 0, 32))
        self.assertEqual(
            (one["dp_rank"], one["full_tree_evictable"], one["mapping_nonzero_count"]), (1, 8, 8)
        )
        for snap in (zero, one):
            validate_swa_cache_ledger(snap, require_idle=True)

    def test_two_rows_repeating_one_slot_twice_each_is_three(self):
        cache = self.build("chunk")
        slot = int(self.allocator.alloc(1)[0])
        self.pool.req_to_token[0, :2] = self.pool.req_to_token[1, :2] = slot
        snap = cache.cache_ledger_snapshot(0, [self.live(0, 2), self.live(1, 2)])
        self.assertEqual(snap["full_duplicate_request_owner_count"], 3)
        self.assertEqual(snap["swa_duplicate_request_owner_count"], 3)
        with self.assertRaisesRegex(ValueError, "full_duplicate_request_owner_count"):
            validate_swa_cache_ledger(snap, require_idle=False)

    def test_request_tree_overlap(self):
        cache = self.build()
        value = self.insert(4)
        self.pool.req_to_token[0, :4] = value
        snap = cache.cache_ledger_snapshot(0, [self.live(0, 4)])
        self.assertEqual(
            (snap["full_request_tree_overlap_count"], snap["swa_request_tree_overlap_count"]), (4, 4)
        )
        self.assertEqual(
            cache.cache_ledger_snapshot(0, [self.live(0, 4, protected=4)])["full_request_tree_overlap_count"],
            0,
        )

    def test_a_lost_mapping(self):
        cache = self.build()
        value = self.insert(4)
        self.allocator.full_to_swa_index_mapping[value[1]] = 0
        snap = cache.cache_ledger_snapshot(0, [])
        self.assertEqual(
            (snap["mapping_source_mismatch_count"], snap["mapping_owner_mismatch_count"]), (1, 1)
        )
        self.assertEqual((snap["mapping_pair_mismatch_count"], snap["mapping_nonzero_count"]), (1, 3))
        with self.assertRaisesRegex(ValueError, "mapping_"):
            validate_swa_cache_ledger(snap, require_idle=True)

    def test_a_mapping_nobody_owns(self):
        cache = self.build()
        self.insert(4)
        self.allocator.full_to_swa_index_mapping[40] = 41
        snap = cache.cache_ledger_snapshot(0, [])
        self.assertEqual(
            (snap["mapping_source_mismatch_count"], snap["mapping_owner_mismatch_count"]), (1, 1)
        )
        self.assertEqual((snap["mapping_invalid_count"], snap["mapping_nonzero_count"]), (0, 5))

    def test_invalid_and_duplicate_targets(self):
        cache = self.build()
        value = self.insert(4)
        mapping = self.allocator.full_to_swa_index_mapping
        mapping[value[0]] = 1000
        self.assertEqual(cache.cache_ledger_snapshot(0, [])["mapping_invalid_count"], 1)
        mapping[value[0]] = mapping[value[1]]
        snap = cache.cache_ledger_snapshot(0, [])
        self.assertEqual(snap["mapping_invalid_count"], 0)
        self.assertGreater(snap["mapping_duplicate_count"], 0)
        mapping[0] = 3
        self.assertEqual(cache.cache_ledger_snapshot(0, [])["mapping_invalid_count"], 1)

    def test_swapped_targets_are_a_pair_mismatch_only(self):
        cache = self.build()
        value = self.insert(4)
        mapping = self.allocator.full_to_swa_index_mapping
        mapping[value[0]], mapping[value[1]] = int(mapping[value[1]]), int(mapping[value[0]])
        snap = cache.cache_ledger_snapshot(0, [])
        got = [
            snap[f"mapping_{n}_count"]
            for n in ("invalid", "duplicate", "source_mismatch", "owner_mismatch", "pair_mismatch")
        ]
        self.assertEqual(got, [0, 0, 0, 0, 2])

    def test_totals_count_events_and_a_snapshot_creates_no_key(self):
        cache = self.build()
        before = {k: dict(v) for k, v in cache._ledger_event_totals.items()}
        cache.cache_ledger_snapshot(0, [])
        self.assertEqual({k: dict(v) for k, v in cache._ledger_event_totals.items()}, before)
        self.insert(8)
        cache.match_prefix(MatchPrefixParams(key=RadixKey(list(range(8)), None, 0)))
        top = next(iter(cache.root_node.children.values()))
        leaf = next(iter(top.children.values()))
        top.component_data[SWA].metadata["last_access_time"] = 1.0
        cache.evict(EvictParams(swa_num_tokens=4, dp_rank=0))
        snap = cache.cache_ledger_snapshot(0, [])
        self.assertEqual((snap["swa_evicted_total"], snap["full_evicted_total"]), (4, 0))
        self.assertEqual((snap["tombstone_created_total"], snap["tombstone_healed_total"]), (1, 0))
        self.assertIn(0, cache._ledger_event_totals)
        self.insert(8)
        self.assertEqual(cache.cache_ledger_snapshot(0, [])["tombstone_healed_total"], 1)
        self.assertIsNotNone(leaf)

    def test_validate(self):
        snap = self.build().cache_ledger_snapshot(0, [])
        validate_swa_cache_ledger(snap, require_idle=True)
        with self.assertRaisesRegex(ValueError, r"\[full\] balance mismatch"):
            validate_swa_cache_ledger({**snap, "full_available": 63}, require_idle=False)
        with self.assertRaisesRegex(ValueError, "swa.*balance"):
            validate_swa_cache_ledger({**snap, "swa_available": 65}, require_idle=False)
        for name in KEYS:
            if name.endswith("_count") and name != "mapping_nonzero_count":
                with self.subTest(name=name), self.assertRaisesRegex(ValueError, name):
                    validate_swa_cache_ledger({**snap, name: 1}, require_idle=False)
        with self.assertRaisesRegex(ValueError, "mapping_nonzero"):
            validate_swa_cache_ledger({**snap, "mapping_nonzero_count": 1}, require_idle=False)

    def test_an_older_snapshot_still_validates(self):
        snap = self.build().cache_ledger_snapshot(0, [])
        for name in ("full_tree_bucket_overlap_count", "swa_tree_bucket_overlap_count", "mapping_source_mismatch_count",
                     "mapping_owner_mismatch_count", "mapping_pair_mismatch_count", "mapping_duplicate_count"):  # fmt: skip
            del snap[name]
        validate_swa_cache_ledger(snap, require_idle=True)

    def test_a_bad_rank_and_arrays_are_left_alone(self):
        cache = self.build(page=4)
        self.insert(8)
        mapping = self.allocator.full_to_swa_index_mapping.copy()
        cache.cache_ledger_snapshot(0, [])
        np.testing.assert_array_equal(self.allocator.full_to_swa_index_mapping, mapping)


if __name__ == "__main__":
    unittest.main()
