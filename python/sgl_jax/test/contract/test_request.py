"""The request object behind the caches, with and without its constructor, driven through a real cache."""

from __future__ import annotations

import unittest

import numpy as np

from sgl_jax.srt.managers.io_struct import SamplingParams
from sgl_jax.srt.managers.request import Req
from sgl_jax.srt.mem_cache.base_prefix_cache import DecLockRefParams, EvictParams
from sgl_jax.srt.mem_cache.common import release_kv_cache
from sgl_jax.srt.mem_cache.memory_pool import ReqToTokenPool
from sgl_jax.test.contract.kit import swa_allocator, unified
from sgl_jax.test.test_utils import CustomTestCase

ZEROED = (
    "cache_protected_len", "last_matched_prefix_len", "kv_committed_len", "kv_allocated_len", "swa_evicted_seqlen",
    "extend_batch_idx", "decode_batch_idx", "extend_input_len", "host_hit_length",
)  # fmt: skip


class TestReq(CustomTestCase):
    def build(self, n=6, **kw):
        return Req("r", "", list(range(n)), SamplingParams(max_new_tokens=4), **kw)

    def test_fields(self):
        req = self.build(extra_key="x", dp_rank=1, eos_token_ids={5}, vocab_size=32)
        for name in ZEROED:
            self.assertEqual(getattr(req, name), 0, name)
        for name in ("req_pool_idx", "last_node", "last_host_node", "swa_uuid_for_lock", "cache_lock_params"):
            self.assertIsNone(getattr(req, name), name)
        self.assertEqual((req.output_ids, req.fill_ids, len(req.prefix_indices)), ([], [], 0))
        self.assertEqual((req.extra_key, req.dp_rank, req.vocab_size, req.seqlen), ("x", 1, 32, 6))
        self.assertEqual((req.is_chunked, req.is_retracted, req.finished()), (0, False, False))
        self.assertEqual((req.kv_committed_freed, req.kv_overallocated_freed), (False, False))
        self.assertEqual(req.radix_input_ids, req.origin_input_ids)

    def test_pops_are_idempotent(self):
        req = self.build()
        req.kv_committed_len, req.kv_allocated_len = 4, 6
        self.assertEqual(req.pop_committed_kv_cache(), 4)
        self.assertEqual(req.pop_committed_kv_cache(), 0)
        start, end = req.pop_overallocated_kv_cache()
        self.assertEqual((start, end), (4, 6))
        start, end = req.pop_overallocated_kv_cache()
        self.assertEqual(start, end)

    def test_reset_on_a_bare_object(self):
        req = Req.__new__(Req)
        req.cache_lock_params, req.swa_uuid_for_lock = DecLockRefParams(7), 7
        req.swa_evicted_seqlen, req.kv_committed_len, req.decode_batch_idx = 8, 8, 3
        req.reset_for_retract()
        for name in ZEROED:
            self.assertEqual(getattr(req, name), 0, name)
        self.assertEqual((req.cache_lock_params, req.swa_uuid_for_lock, req.last_node), (None, None, None))
        self.assertIs(req.is_retracted, True)

    def test_next_round_and_release_through_a_cache(self):
        allocator, pool = swa_allocator(64, 64), ReqToTokenPool(4, 32)
        cache = unified(allocator, pool=pool)
        first = self.build(8, dp_rank=0)
        first.init_next_round_input(cache)
        self.assertEqual(
            (len(first.prefix_indices), first.extend_input_len, first.last_node), (0, 8, cache.root_node)
        )
        pool.alloc([first])
        pool.req_to_token[first.req_pool_idx, :8] = allocator.alloc(8)
        first.kv_committed_len = first.kv_allocated_len = 8
        release_kv_cache(first, cache)
        self.assertIsNone(first.req_pool_idx)
        second = self.build(8, dp_rank=0)
        second.init_next_round_input(cache)
        self.assertEqual(second.adjust_max_prefix_ids(), 7)
        self.assertEqual(
            (second.prefix_indices.tolist(), second.extend_input_len), ([1, 2, 3, 4, 5, 6, 7], 1)
        )
        self.assertEqual(second.prefix_indices.dtype, np.int32)
        self.assertEqual(second.last_matched_prefix_len, 7)
        result = cache.inc_lock_ref(second.last_node)
        second.cache_lock_params, second.swa_uuid_for_lock = result.to_dec_params(), result.swa_uuid_for_lock
        second.cache_protected_len = 7
        pool.alloc([second])
        pool.req_to_token[second.req_pool_idx, :7] = second.prefix_indices
        pool.req_to_token[second.req_pool_idx, 7] = allocator.alloc(1)[0]
        second.kv_committed_len = second.kv_allocated_len = 8
        release_kv_cache(second, cache, is_insert=False)
        self.assertIsNone(second.cache_lock_params)
        second.reset_for_retract()
        cache.evict(EvictParams(num_tokens=64, swa_num_tokens=64, dp_rank=0))
        self.assertEqual((allocator.full_available_size(), allocator.swa_available_size()), (64, 64))


if __name__ == "__main__":
    unittest.main()
