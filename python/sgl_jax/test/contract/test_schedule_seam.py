"""sglang-jax's scheduler names: batches as bare namespaces, adders over caches that have little, unbound calls."""

from __future__ import annotations

import types
import unittest
from unittest.mock import MagicMock, patch

import numpy as np

from sgl_jax.srt.managers import schedule_batch
from sgl_jax.srt.managers.io_struct import SamplingParams
from sgl_jax.srt.managers.schedule_batch import (
    FINISH_ABORT,
    Req,
    ScheduleBatch,
    ScheduleReqsInfo,
    get_last_loc,
    global_server_args_dict,
    swa_eviction_interval,
    swa_eviction_peak_tokens,
)
from sgl_jax.srt.managers.schedule_policy import AddReqResult, PrefillAdder
from sgl_jax.srt.managers.scheduler import Scheduler
from sgl_jax.srt.managers.scheduler_output_processor_mixin import SchedulerOutputProcessorMixin
from sgl_jax.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, SWATokenToKVPoolAllocator
from sgl_jax.srt.mem_cache.base_prefix_cache import IncLockRefResult
from sgl_jax.srt.mem_cache.chunk_cache import ChunkCache, SWAChunkCache
from sgl_jax.srt.mem_cache.memory_pool import ReqToTokenPool
from sgl_jax.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sgl_jax.test.contract.kit import fake_req, ids, swa_allocator, unified
from sgl_jax.test.test_utils import CustomTestCase


def mode(name):
    return types.SimpleNamespace(is_decode=lambda: name == "decode", is_extend=lambda: name == "extend")


class TestPureFunctions(CustomTestCase):
    def test_interval_and_peak(self):
        self.assertEqual(
            [swa_eviction_interval(8, 4), swa_eviction_interval(10, 4), swa_eviction_interval(2, 4)],
            [8, 8, 4],
        )
        self.assertEqual(swa_eviction_interval(128, 1), 128)
        self.assertEqual(swa_eviction_peak_tokens(8, 4), 8 + 8 + 8)

    def test_last_loc(self):
        table = np.arange(24, dtype=np.int32).reshape(2, 12)
        self.assertEqual(get_last_loc(table, ids(0, 1, 1), ids(3, 0, 2)).tolist(), [2, -1, 13])

    def test_names(self):
        self.assertIsInstance(global_server_args_dict, dict)
        self.assertIn("chunked_prefill_size", global_server_args_dict)
        self.assertIsNotNone(FINISH_ABORT("why"))


class TestMaybeEvictSwa(CustomTestCase):
    """Unbound on a namespace that has only what the contract lists; window 8, page 4, so the interval is 8."""

    def run_batch(self, cache, name, reqs, prefix_lens=None, overlap=False, hybrid=True, window=8):
        direct = []
        batch = types.SimpleNamespace(
            is_hybrid=hybrid,
            model_config=types.SimpleNamespace(sliding_window=window),
            token_to_kv_pool_allocator=types.SimpleNamespace(page_size=4),
            forward_mode=mode(name),
            reqs_info=[types.SimpleNamespace(reqs=reqs, prefix_lens=prefix_lens)],
            tree_cache=cache,
            enable_overlap=overlap,
            _evict_swa=lambda req, pre_len, *a, **kw: direct.append((req, pre_len)),
            req_to_token_pool=None,
        )
        ScheduleBatch.maybe_evict_swa(batch)
        return direct

    def unified(self):
        cache = UnifiedRadixCache.__new__(UnifiedRadixCache)
        cache.calls = []
        cache.evict_req_swa = lambda req, pre_len, dp_rank: cache.calls.append((pre_len, dp_rank))
        return cache

    def steps(self, cache, overlap=False):
        """Decode indices 0..17 at which something is reclaimed."""
        hit = []
        for idx in range(18):
            before = len(getattr(cache, "calls", ()))
            direct = self.run_batch(
                cache, "decode", [types.SimpleNamespace(decode_batch_idx=idx, seqlen=100)], overlap=overlap
            )
            if direct or len(getattr(cache, "calls", ())) > before:
                hit.append(idx)
        return hit

    def test_decode_unified(self):
        cache = self.unified()
        self.assertEqual(self.steps(cache), [0, 8, 16])
        self.assertEqual(cache.calls[0], (99, 0))
        self.assertEqual(self.steps(self.unified(), overlap=True), [1, 9, 17])

    def test_decode_without_a_cache(self):
        self.assertEqual(self.steps(None), [1, 9, 17])

    def test_decode_chunk_caches(self):
        for cache in (ChunkCache.__new__(ChunkCache), SWAChunkCache.__new__(SWAChunkCache)):
            cache.evict_calls = []
            if hasattr(cache, "evict_req_swa"):
                cache.calls = []
                cache.evict_req_swa = lambda req, pre_len, dp_rank=0, c=cache: c.calls.append(pre_len)
            self.assertEqual(self.steps(cache), [0, 8, 16])
            self.assertEqual(self.steps(cache, overlap=True), [0, 8, 16])

    def test_extend(self):
        cache = self.unified()
        reqs = [types.SimpleNamespace(extend_batch_idx=1), types.SimpleNamespace(extend_batch_idx=2)]
        self.run_batch(cache, "extend", reqs, [64, 96])
        self.assertEqual(cache.calls, [(64, 0), (96, 0)])
        cache = self.unified()
        with patch.dict(global_server_args_dict, {"chunked_prefill_size": 32}):
            self.run_batch(cache, "extend", reqs, [64, 96], overlap=True)
        self.assertEqual(cache.calls, [(64, 0)])
        self.assertEqual(self.run_batch(None, "extend", reqs, [64, 96]), [])

    def test_only_hybrid_with_a_positive_window(self):
        for kw in ({"hybrid": False}, {"window": None}, {"window": 0}):
            cache = self.unified()
            self.run_batch(cache, "decode", [types.SimpleNamespace(decode_batch_idx=0, seqlen=9)], **kw)
            self.assertEqual(cache.calls, [])

    def test_evict_swa_delegates_or_frees(self):
        cache = types.SimpleNamespace(supports_swa=lambda: True, evict_req_swa=MagicMock())
        ScheduleBatch._evict_swa(types.SimpleNamespace(tree_cache=cache), "req", 30, 8, 4, dp_rank=1)
        self.assertEqual(
            (cache.evict_req_swa.call_args.args, cache.evict_req_swa.call_args.kwargs),
            (("req", 30), {"dp_rank": 1}),
        )
        allocator, pool = swa_allocator(64, 64, page_size=4), ReqToTokenPool(2, 32)
        pool.req_to_token[0, :24] = allocator.alloc(24)
        for cache in (None, ChunkCache(pool, allocator, 4)):
            req = fake_req()
            batch = types.SimpleNamespace(
                tree_cache=cache, token_to_kv_pool_allocator=allocator, req_to_token_pool=pool
            )
            ScheduleBatch._evict_swa(batch, req, 24, 8, 4)
            self.assertEqual((req.swa_evicted_seqlen, allocator.swa_available_size()), (12, 52))


class TestBatch(CustomTestCase):
    def build(self, page=4):
        self.allocator, self.pool = swa_allocator(64, 64, page), ReqToTokenPool(4, 64)
        self.cache = unified(self.allocator, page, 4, self.pool)
        return self.batch([])

    def batch(self, reqs):
        return ScheduleBatch.init_new(
            reqs, self.pool, self.allocator, self.cache, types.SimpleNamespace(sliding_window=4), False, 1,
        )  # fmt: skip

    def req(self, rid, n):
        req = Req(rid, "", list(range(n)), SamplingParams(max_new_tokens=4), dp_rank=0)
        req.init_next_round_input(self.cache)
        result = self.cache.inc_lock_ref(req.last_node)
        req.cache_lock_params, req.swa_uuid_for_lock = result.to_dec_params(), result.swa_uuid_for_lock
        return req

    def test_extend_decode_release(self):
        self.build()
        req = self.req("a", 6)
        batch = self.batch([req])
        self.assertIs(batch.is_hybrid, True)
        batch.prepare_for_extend()
        self.assertEqual((req.kv_committed_len, req.kv_allocated_len, req.extend_batch_idx), (6, 6, 1))
        self.assertEqual(self.pool.req_to_token[req.req_pool_idx, :6].tolist(), [4, 5, 6, 7, 8, 9])
        req.output_ids.append(50)
        batch.prepare_for_decode()
        self.assertEqual((req.kv_committed_len, req.kv_allocated_len, req.decode_batch_idx), (7, 7, 1))
        self.assertEqual(self.pool.req_to_token[req.req_pool_idx, 6], 10)
        self.assertEqual(batch.reqs, [req])
        batch.release_req(0, 0, 0, None)
        self.assertEqual((req.req_pool_idx, req.cache_lock_params, req.is_retracted), (None, None, True))
        self.assertEqual(
            (self.allocator.full_available_size(), self.allocator.swa_available_size()), (64, 64)
        )

    def test_hybrid_needs_a_capable_cache(self):
        self.build()
        self.cache = ChunkCache(self.pool, self.allocator, 4)
        with self.assertRaises((AssertionError, ValueError)):
            self.batch([])
        self.cache = None
        self.assertIs(self.batch([]).is_hybrid, True)

    def test_out_of_memory_texts(self):
        batch = self.build()
        self.allocator.alloc(64)
        with self.assertRaisesRegex(RuntimeError, "Decode out of memory"):
            batch.alloc_paged_token_slots_decode(ids(5), ids(7))
        self.cache.full_lru_list_evictable_size = MagicMock(side_effect=ValueError("no"))
        with self.assertRaisesRegex(RuntimeError, r"(?s)Decode out of memory.*unavailable \(ValueError\)"):
            batch.alloc_paged_token_slots_decode(ids(5), ids(7))
        batch.tree_cache = SWAChunkCache(self.pool, self.allocator, 4, 4)
        with self.assertRaisesRegex(RuntimeError, "Decode out of memory"):
            batch.alloc_paged_token_slots_decode(ids(5), ids(7))

    def test_plain(self):
        allocator, pool = PagedTokenToKVPoolAllocator(64, 4, None), ReqToTokenPool(4, 64)
        cache = UnifiedRadixCache(pool, allocator, page_size=4)
        batch = ScheduleBatch.init_new([], pool, allocator, cache, None, False, 1)
        self.assertIs(batch.is_hybrid, False)
        self.assertIs(batch._is_available_size_sufficient({0: 64}), True)
        self.assertIs(batch._is_available_size_sufficient({0: 65}), False)
        self.assertIsInstance(batch.reqs_info[0], ScheduleReqsInfo)


class BareAllocator(SWATokenToKVPoolAllocator):
    def __init__(self):
        pass


class TestPrefillAdder(CustomTestCase):
    def test_swa_budget_with_a_cache_that_has_only_a_window(self):
        adder = PrefillAdder(
            page_size=4, tree_cache=types.SimpleNamespace(sliding_window_size=8), token_to_kv_pool_allocator=BareAllocator(),
            running_batch=None, new_token_ratio=0.5, rem_input_tokens=100, rem_chunk_tokens=64,
        )  # fmt: skip
        self.assertEqual([adder._swa_budget_for_req(n, 0) for n in (1, 30, 100, 10**6)], [24, 32, 64, 64])
        self.assertEqual(adder.rem_swa_token_offset, [0])
        self.assertEqual(adder.can_run_list, {0: []})

    def plain(self, size=64, chunk=None):
        allocator = types.SimpleNamespace(available_size=lambda dp_rank=0: size, page_size=1)
        cache = types.SimpleNamespace(
            disable=False, hicache_enabled=False, inc_lock_ref=lambda node: IncLockRefResult(delta=0),
            dec_lock_ref=MagicMock(return_value=0), recurrent_extra_buffer_active=lambda: False,
            evictable_size=lambda dp_rank=0: 0,
        )  # fmt: skip
        return cache, PrefillAdder(1, cache, allocator, None, 1.0, 1000, chunk)

    def admitted(self, n):
        req = Req("a", "", list(range(n)), SamplingParams(max_new_tokens=4), dp_rank=0)
        req.fill_ids, req.extend_input_len, req.last_node = list(range(n)), n, "node"
        return req

    def test_add_one_req_over_a_cache_with_few_attributes(self):
        cache, adder = self.plain()
        req = self.admitted(10)
        self.assertIs(adder.add_one_req(req), AddReqResult.CONTINUE)
        self.assertEqual(adder.can_run_list[0], [req])
        self.assertIsNotNone(req.cache_lock_params)
        self.assertEqual(len(cache.dec_lock_ref.call_args.args), 2)
        self.assertIs(self.plain(8)[1].add_one_req(self.admitted(10)), AddReqResult.NO_TOKEN)

    def test_chunks(self):
        _, adder = self.plain(chunk=4)
        req = self.admitted(10)
        self.assertIs(adder.add_one_req(req), AddReqResult.OTHER)
        self.assertEqual((req.extend_input_len, len(req.fill_ids), adder.new_chunked_reqs[0]), (4, 4, req))
        _, adder = self.plain(chunk=4)
        req = self.admitted(6)
        self.assertIs(adder.add_chunked_req(req), req)
        req = self.admitted(3)
        _, adder = self.plain(chunk=4)
        self.assertIsNone(adder.add_chunked_req(req))
        self.assertEqual(adder.can_run_list[0], [req])

    def test_no_swa_budget_trims_fill_ids_back(self):
        allocator, pool = swa_allocator(64, 16, page_size=4), ReqToTokenPool(4, 64)
        cache = unified(allocator, 4, 8, pool)
        allocator.alloc(16)
        adder = PrefillAdder(4, cache, allocator, None, 1.0, 1000, 8)
        req = self.admitted(12)
        req.prefix_indices = ids(4, 5, 6, 7)
        req.extend_input_len = 8
        self.assertIs(adder.add_chunked_req(req), req)
        self.assertEqual((len(req.fill_ids), adder.can_run_list[0]), (4, []))

    def test_hybrid_add(self):
        allocator, pool = swa_allocator(64, 32, page_size=4), ReqToTokenPool(4, 64)
        cache = unified(allocator, 4, 8, pool)
        adder = PrefillAdder(4, cache, allocator, None, 1.0, 1000, 16)
        req = self.admitted(12)
        req.last_node = cache.root_node
        self.assertIs(adder.add_one_req(req), AddReqResult.CONTINUE)
        self.assertEqual(adder.rem_swa_token_offset, [24])
        again = self.admitted(12)
        again.last_node = cache.root_node
        self.assertIs(adder.add_one_req(again), AddReqResult.NO_TOKEN)
        self.assertTrue(callable(adder._lock_node))
        self.assertIs(schedule_batch.Req, Req)


class TestScheduler(CustomTestCase):
    """Objects made by ``Scheduler.__new__`` with the attributes a check reads."""

    def bare(self, full=(64, 0, 0), swa=(64, 0, 0), page=4, dp_size=1):
        made = Scheduler.__new__(Scheduler)
        cache = UnifiedRadixCache.__new__(UnifiedRadixCache)
        for name, (_, evictable, protected) in (("full", full), ("swa", swa)):
            setattr(cache, f"{name}_evictable_size", lambda dp_rank=0, n=evictable: n)
            setattr(cache, f"{name}_protected_size", lambda dp_rank=0, n=protected: n)
        made.tree_cache, made.dp_size = cache, dp_size
        made.req_to_token_pool = ReqToTokenPool(4, 8)
        sub = lambda: types.SimpleNamespace(pages_per_rank=16, size_per_rank=64)  # noqa: E731
        made.token_to_kv_pool_allocator = types.SimpleNamespace(
            page_size=page, full_attn_allocator=sub(), swa_attn_allocator=sub(),
            full_available_size=lambda dp_rank=0: full[0], swa_available_size=lambda dp_rank=0: swa[0],
        )  # fmt: skip
        return made

    def test_check_memory(self):
        self.bare().check_memory()
        self.bare(full=(60, 1, 0)).check_memory()
        self.bare(full=(60, 0, 4), swa=(60, 4, 0)).check_memory()
        for kw, text in (
            ({"full": (62, 1, 0)}, r"^\[dp=0\]\[full\].*page-aligned"),
            ({"swa": (62, 1, 0)}, r"^\[dp=0\]\[swa\].*page-aligned"),
            ({"full": (68, 0, 0)}, r"^\[dp=0\]\[full\]"),
            ({"full": (60, 4, 1)}, r"^\[dp=0\]\[full\].*owned=5, reserved_capacity=4"),
            ({"swa": (60, 0, 0)}, r"^\[dp=0\]\[swa\].*owned=0, reserved_pages=1"),
        ):
            with self.subTest(kw=kw), self.assertRaisesRegex(ValueError, text):
                self.bare(**kw).check_memory()
        held = self.bare()
        held.req_to_token_pool.free_slots = [0]
        with self.assertRaises(ValueError):
            held.check_memory()

    def test_capacity_without_pages(self):
        made = self.bare(page=1)
        made.token_to_kv_pool_allocator.full_attn_allocator = types.SimpleNamespace(size_per_rank=64)
        made.token_to_kv_pool_allocator.swa_attn_allocator = types.SimpleNamespace(size_per_rank=64)
        made.check_memory()

    def test_flush_order(self):
        for supports in (False, True):
            made, calls = Scheduler.__new__(Scheduler), MagicMock()
            made.tree_cache, made.req_to_token_pool = calls.tree, calls.rows
            made.token_to_kv_pool_allocator = calls.allocator
            calls.tree.supports_swa.return_value = supports
            calls.allocator.available_size.return_value = 64
            made._can_flush_cache = lambda: (True, "")
            made._snapshot_swa_cache_ledger = calls.ledger
            ok, _, count = made.flush_cache()
            self.assertEqual((ok, count), (True, 64))
            names = [
                c[0]
                for c in calls.mock_calls
                if c[0] in ("tree.reset", "rows.clear", "allocator.clear", "ledger")
            ]
            reset = ["tree.reset", "rows.clear", "allocator.clear"]
            self.assertEqual(names, ["ledger", *reset, "ledger"] if supports else reset)

    def test_busy_changes_nothing(self):
        made, calls = Scheduler.__new__(Scheduler), MagicMock()
        made.tree_cache, made.req_to_token_pool = calls.tree, calls.rows
        made.token_to_kv_pool_allocator = calls.allocator
        made._can_flush_cache = lambda: (False, "two requests run")
        ok, message, count = made.flush_cache()
        self.assertEqual((ok, count), (False, 0))
        self.assertIn("two requests run", message)
        self.assertEqual(calls.mock_calls, [])

    def test_chunked_abort(self):
        mixin, req = SchedulerOutputProcessorMixin(), fake_req(kv_committed_len=0)
        mixin.tree_cache, mixin.chunked_reqs = MagicMock(), [req]
        mixin.running_batch = types.SimpleNamespace(reqs_info=[types.SimpleNamespace(chunked_req=req)])
        mixin._finalize_chunked_abort(req, 0)
        mixin.tree_cache.cache_finished_req.assert_called_once_with(req, is_insert=False)
        self.assertEqual((mixin.chunked_reqs, mixin.running_batch.reqs_info[0].chunked_req), ([None], None))


if __name__ == "__main__":
    unittest.main()
