"""Route table and fail-fast with mocked server arguments; flags; common helpers."""

from __future__ import annotations

import argparse
import os
import types
import unittest
from unittest.mock import MagicMock, patch

from sgl_jax.srt.mem_cache import kv_cache_builder
from sgl_jax.srt.mem_cache.allocator import SWATokenToKVPoolAllocator, TokenToKVPoolAllocator
from sgl_jax.srt.mem_cache.cache_init_params import CacheInitParams
from sgl_jax.srt.mem_cache.chunk_cache import ChunkCache, SWAChunkCache
from sgl_jax.srt.mem_cache.kv_cache_builder import build_kv_cache
from sgl_jax.srt.mem_cache.memory_pool import ReqToTokenPool
from sgl_jax.srt.mem_cache.radix_cache import RadixCache
from sgl_jax.srt.mem_cache.registry import (
    TreeCacheBuildContext,
    create_tree_cache,
    default_radix_cache_factory,
)
from sgl_jax.srt.mem_cache.sizing import CapRules, PoolDemand, plan_pools
from sgl_jax.srt.mem_cache.swa_radix_cache import SWARadixCache
from sgl_jax.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sgl_jax.srt.model_executor.memory_budget import interval_multiplier
from sgl_jax.srt.server_args import ServerArgs
from sgl_jax.srt.speculative.spec_info import SpeculativeAlgorithm
from sgl_jax.test.contract.kit import FULL, SWA, swa_allocator
from sgl_jax.test.test_utils import CustomTestCase


def server_args(unified=False, **fields):
    """A MagicMock: every attribute that is not set here is a truthy mock."""
    args = MagicMock()
    args.enable_unified_radix_tree = unified
    args.disable_radix_cache = fields.pop("disable_radix_cache", False)
    args.chunked_prefill_size = fields.pop("chunked_prefill_size", None)
    args.max_seq_len = 4096
    args.hicache_storage = fields.pop("hicache_storage", "disable")
    args.enable_recurrent_extra_buffer = False
    args.recurrent_track_interval = None
    args.pd_disaggregation = fields.pop("pd_disaggregation", "")
    args.disaggregation_mode = fields.pop("disaggregation_mode", "null")
    for name, value in fields.items():
        setattr(args, name, value)
    return args


def model_config():
    config = MagicMock()
    config.get_num_kv_heads.return_value = 2
    config.head_dim, config.num_hidden_layers = 8, 2
    return config


class TestFactory(CustomTestCase):
    def context(self, hybrid, args, allocator=None, recurrent=False, chunk=None, disable=False):
        allocator = swa_allocator() if allocator is None else allocator
        params = CacheInitParams(
            req_to_token_pool=ReqToTokenPool(4, 16), token_to_kv_pool_allocator=allocator, page_size=1,
            is_eagle=False, sliding_window_size=4,
        )  # fmt: skip
        return TreeCacheBuildContext(
            server_args=args, params=params, is_hybrid_swa=hybrid, disable_radix_cache=disable,
            effective_chunked_prefill_size=chunk, model_config=model_config(), tp_size=1, is_hybrid_recurrent=recurrent,
        )  # fmt: skip

    def test_table(self):
        plain = TokenToKVPoolAllocator(16, None)
        for hybrid, unified, disable, chunk, kind in (
            (True, False, True, None, SWAChunkCache),
            (True, True, True, 64, SWAChunkCache),
            (True, True, False, 64, UnifiedRadixCache),
            (True, False, False, 64, SWARadixCache),
            (False, True, True, 64, ChunkCache),
            (False, False, True, 64, ChunkCache),
            (False, True, False, 64, UnifiedRadixCache),
            (False, False, False, None, RadixCache),
            (False, True, True, None, RadixCache),
        ):
            with self.subTest(hybrid=hybrid, unified=unified, disable=disable, chunk=chunk):
                args = server_args(unified, disable_radix_cache=disable)
                ctx = self.context(hybrid, args, None if hybrid else plain, chunk=chunk, disable=disable)
                for make in (default_radix_cache_factory, create_tree_cache):
                    self.assertIs(type(make(ctx)), kind)
        disabled = default_radix_cache_factory(
            self.context(False, server_args(disable_radix_cache=True), plain, disable=True)
        )
        self.assertIs(disabled.disable, True)

    def test_components_and_window(self):
        cache = default_radix_cache_factory(self.context(True, server_args(True)))
        self.assertEqual((cache.tree_components, cache.sliding_window_size), ((FULL, SWA), 4))
        plain = self.context(False, server_args(True), TokenToKVPoolAllocator(16, None))
        self.assertEqual(default_radix_cache_factory(plain).tree_components, (FULL,))

    def test_a_mocked_dual_allocator(self):
        ctx = self.context(True, server_args(True), MagicMock(spec=SWATokenToKVPoolAllocator))
        self.assertIsInstance(default_radix_cache_factory(ctx), UnifiedRadixCache)


class TestBuilder(CustomTestCase):
    def build(self, args, hybrid=True, recurrent=False, spec=None, allocator=None, **kw):
        self.allocator = MagicMock(spec=SWATokenToKVPoolAllocator) if allocator is None else allocator
        self.pool = MagicMock(spec=ReqToTokenPool)
        return build_kv_cache(
            server_args=args, model_config=model_config(), req_to_token_pool=self.pool,
            token_to_kv_pool_allocator=self.allocator, page_size=1, is_hybrid=hybrid, is_hybrid_recurrent=recurrent,
            sliding_window_size=4 if hybrid else None, tp_size=1, spec_algorithm=spec, **kw,
        )  # fmt: skip

    def refused(self, text, args, **kw):
        with (
            patch.object(kv_cache_builder, "create_tree_cache") as create,
            patch.object(kv_cache_builder, "init_hicache") as hicache,
            self.assertRaisesRegex(ValueError, rf"(?s)--enable-unified-radix-tree.*{text}"),
        ):
            self.build(args, **kw)
        self.assertEqual((create.mock_calls, hicache.mock_calls), ([], []))
        self.assertEqual((self.allocator.mock_calls, self.pool.mock_calls), ([], []))

    def test_fail_fast(self):
        self.refused(r"FULL\+SWA\+RECURRENT", server_args(True), recurrent=True)
        self.refused("--hicache-storage", server_args(True, hicache_storage="none"))
        self.refused("--hicache-storage", server_args(True, hicache_storage="file"))
        for spec in (SpeculativeAlgorithm.EAGLE, SpeculativeAlgorithm.NEXTN, SpeculativeAlgorithm.DFLASH):
            self.refused("--speculative-algorithm", server_args(True), spec=spec)
        self.refused("--pd-disaggregation", server_args(True, pd_disaggregation="prefill"))
        self.refused("--disaggregation-mode", server_args(True, disaggregation_mode="decode"))

    def test_fail_fast_with_the_spelling_noted(self):
        for typed in ("--enable-unified-radix-cache", "--enable-unified-radix-tree"):
            args = server_args(True, hicache_storage="none", notes={"enable_unified_radix_tree": typed})
            self.refused("--hicache-storage", args)

    def test_none_and_the_null_algorithm_are_accepted(self):
        for spec in (None, SpeculativeAlgorithm.NONE):
            self.assertIsInstance(self.build(server_args(True), spec=spec), UnifiedRadixCache)

    def test_the_gates_are_off_the_predicate(self):
        with patch.object(kv_cache_builder, "create_tree_cache", return_value="made") as create:
            for args, kw in (
                (server_args(False), {"spec": SpeculativeAlgorithm.EAGLE}),
                (server_args(False, pd_disaggregation="prefill"), {}),
                (server_args(True, disable_radix_cache=True, disaggregation_mode="decode"), {}),
                (server_args(True, pd_disaggregation="prefill"), {"hybrid": False}),
                (server_args(False), {"recurrent": True}),
            ):
                self.assertEqual(self.build(args, **kw), "made")
            self.assertEqual(create.call_count, 5)

    def test_context_of_create_tree_cache(self):
        args = server_args(True, chunked_prefill_size=64)
        with (
            patch.object(kv_cache_builder, "create_tree_cache", return_value="made") as create,
            patch.object(kv_cache_builder, "init_hicache") as hicache,
        ):
            self.assertEqual(self.build(args, mesh="m"), "made")
        (ctx,) = create.call_args.args
        self.assertEqual((ctx.is_hybrid_swa, ctx.disable_radix_cache, ctx.tp_size), (True, False, 1))
        self.assertEqual((ctx.effective_chunked_prefill_size, ctx.params.sliding_window_size), (64, 4))
        self.assertIs(ctx.params.token_to_kv_pool_allocator, self.allocator)
        self.assertIs(ctx.server_args, args)
        self.assertEqual((ctx.params.is_eagle, ctx.params.page_size), (False, 1))
        hicache.assert_not_called()

    def test_hicache_is_initialised_by_the_module_name(self):
        args = server_args(False, hicache_storage="none")
        with (
            patch.object(kv_cache_builder, "create_tree_cache", return_value="made"),
            patch.object(kv_cache_builder, "init_hicache") as hicache,
        ):
            self.build(args, hybrid=False, allocator=TokenToKVPoolAllocator(8, None), mesh="m")
        self.assertEqual(hicache.call_args.args[:2], ("made", args))

    def test_real_routes(self):
        self.assertIsInstance(self.build(server_args(False)), SWARadixCache)
        self.assertIsInstance(self.build(server_args(True)), UnifiedRadixCache)
        self.assertIsInstance(self.build(server_args(True, disable_radix_cache=True)), SWAChunkCache)
        plain = TokenToKVPoolAllocator(8, None)
        self.assertIsInstance(self.build(server_args(False), hybrid=False, allocator=plain), RadixCache)
        chunk = server_args(False, chunked_prefill_size=64, disable_radix_cache=True)
        self.assertIs(type(self.build(chunk, hybrid=False, allocator=plain)), ChunkCache)

    def test_a_simple_namespace_of_arguments(self):
        args = types.SimpleNamespace(
            enable_unified_radix_tree=True, disable_radix_cache=False, chunked_prefill_size=-1, max_seq_len=None,
            hicache_storage="disable",
        )  # fmt: skip
        self.assertIsInstance(self.build(args), UnifiedRadixCache)


class TestSpeculativeAlgorithm(CustomTestCase):
    def test_enum(self):
        self.assertEqual(
            [a.name for a in SpeculativeAlgorithm],
            ["NONE", "EAGLE", "EAGLE3", "NEXTN", "STANDALONE", "DFLASH"],
        )
        self.assertTrue(SpeculativeAlgorithm.NONE.is_none())
        self.assertTrue(SpeculativeAlgorithm.EAGLE.is_eagle())
        self.assertFalse(SpeculativeAlgorithm.STANDALONE.is_none())
        self.assertIs(SpeculativeAlgorithm.from_string(None), SpeculativeAlgorithm.NONE)
        self.assertIs(SpeculativeAlgorithm.from_string("EAGLE"), SpeculativeAlgorithm.EAGLE)


class TestFlags(CustomTestCase):
    def test_defaults(self):
        args = ServerArgs(model_path="dummy")
        self.assertIs(args.enable_unified_radix_tree, False)
        self.assertIs(args.disable_radix_cache, False)
        self.assertEqual((args.swa_full_tokens_ratio, args.page_size, args.dp_size), (0.8, 1, 1))
        self.assertEqual((args.disable_hybrid_swa_memory, args.enable_cache_report), (False, False))
        self.assertEqual(
            (args.chunked_prefill_size, args.hicache_storage, args.hicache_ratio), (4096, "disable", 2.0)
        )
        self.assertEqual(
            (args.hicache_write_through_threshold, args.hicache_write_policy), (1, "write_through")
        )
        self.assertEqual((args.enable_recurrent_extra_buffer, args.recurrent_track_interval), (False, None))
        self.assertEqual((args.speculative_algorithm, args.disaggregation_mode), (None, "null"))
        self.assertFalse(args.pd_disaggregation)

    def test_no_chunk_size_means_4096(self):
        self.assertEqual(ServerArgs(model_path="dummy", chunked_prefill_size=None).chunked_prefill_size, 4096)

    def test_pool_sizes_round_down_to_whole_pages_of_every_rank(self):
        demand = PoolDemand(8, 8, 2, 64, CapRules(4, window=8, chunk_size=16))
        plan = plan_pools(demand, max_total_tokens=1003, ratio=0.5)
        self.assertEqual((plan.total_full_tokens, plan.total_swa_tokens), (1000, 496))

    def test_interval_multiplier(self):
        name = "SGL_JAX_SWA_EVICTION_INTERVAL_MULTIPLIER"
        self.assertEqual(interval_multiplier(), 1.0)
        with patch.dict(os.environ, {name: "2.5"}):
            self.assertEqual(interval_multiplier(), 2.5)
        for wrong in ("0", "-1", "fast", "inf"):
            with patch.dict(os.environ, {name: wrong}), self.assertRaisesRegex(ValueError, name):
                interval_multiplier()

    def test_environment(self):
        with patch.dict(os.environ, {"SGLANG_JAX_ENABLE_UNIFIED_RADIX_TREE": "1"}):
            self.assertIs(ServerArgs(model_path="dummy").enable_unified_radix_tree, True)
        with patch.dict(os.environ, {"SGLANG_JAX_ENABLE_UNIFIED_RADIX_TREE": "0"}):
            self.assertIs(ServerArgs(model_path="dummy").enable_unified_radix_tree, False)

    def test_command_line(self):
        parser = argparse.ArgumentParser()
        ServerArgs.add_cli_args(parser)
        parse = lambda *argv: ServerArgs.from_cli_args(parser.parse_args(["--model-path", "dummy", *argv]))  # noqa: E731
        self.assertIs(parse().enable_unified_radix_tree, False)
        self.assertIs(parse("--enable-unified-radix-tree").enable_unified_radix_tree, True)
        args = parse("--page-size", "128", "--chunked-prefill-size", "256", "--swa-full-tokens-ratio", "0.5")
        self.assertEqual(
            (args.page_size, args.chunked_prefill_size, args.swa_full_tokens_ratio), (128, 256, 0.5)
        )
        self.assertEqual(parse("--chunked-prefill-size", "-1").chunked_prefill_size, -1)
        with self.assertRaises(ValueError):
            parse("--page-size", "128", "--chunked-prefill-size", "100")
        with self.assertRaises(ValueError):
            parse("--hicache-storage", "file")
        namespace = parser.parse_args(["--model-path", "dummy"])
        self.assertIs(getattr(namespace, "enable_unified_radix_tree", False), False)


if __name__ == "__main__":
    unittest.main()
