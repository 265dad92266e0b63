"""Request rows, KV pools and the mesh helper: constructor parameters, accessors, test-poked attributes."""

from __future__ import annotations

import types
import unittest

import jax
import jax.numpy as jnp
import numpy as np

from sgl_jax.srt.mem_cache import memory_pool
from sgl_jax.srt.mem_cache.memory_pool import (
    KVCache,
    MemoryPools,
    MHATokenToKVPool,
    ReqToTokenPool,
    SWAKVPool,
)
from sgl_jax.srt.utils.mesh_utils import create_device_mesh
from sgl_jax.test.contract.kit import ids, mesh, swa_allocator, swa_pool
from sgl_jax.test.test_utils import CustomTestCase


def row_req(**fields):
    return types.SimpleNamespace(**{"req_pool_idx": None, "is_chunked": 0, "kv_committed_len": 0, **fields})


class TestReqToTokenPool(CustomTestCase):
    def test_fields(self):
        pool = ReqToTokenPool(4, 16)
        self.assertEqual((pool.size, pool.max_context_len), (4, 16))
        self.assertEqual((pool.req_to_token.shape, pool.req_to_token.dtype), ((4, 16), np.int32))
        self.assertFalse(pool.req_to_token.any())
        self.assertEqual(pool.free_slots, [0, 1, 2, 3])
        self.assertEqual(ReqToTokenPool(4, 16, dtype=np.int32).available_size(), 4)

    def test_rows_are_poked_and_read_is_a_copy(self):
        pool = ReqToTokenPool(4, 16)
        pool.req_to_token[0, :3] = [7, 8, 9]
        pool.write((1, slice(2, 4)), ids(5, 6))
        pool.write((1, ids(0)), ids(3))
        got = pool.read(0, 3)
        self.assertEqual(got.tolist(), [7, 8, 9])
        got[:] = 0
        self.assertEqual(pool.read(0, 3).tolist(), [7, 8, 9])
        self.assertEqual(pool.read(1, 4).tolist(), [3, 0, 5, 6])

    def test_alloc_free_clear(self):
        pool = ReqToTokenPool(2, 16)
        a, b, c = row_req(), row_req(), row_req()
        self.assertEqual(pool.alloc([a, b]), [0, 1])
        self.assertEqual((a.req_pool_idx, b.req_pool_idx), (0, 1))
        self.assertIsNone(pool.alloc([c]))
        pool.free(a)
        self.assertIsNone(a.req_pool_idx)
        with self.assertRaises(AssertionError):
            pool.free(a)
        self.assertEqual(pool.alloc([c]), [0])
        pool.clear()
        self.assertEqual(pool.available_size(), 2)

    def test_one_chunked_request_keeps_its_row(self):
        pool = ReqToTokenPool(4, 16)
        held = row_req(req_pool_idx=3, is_chunked=1)
        self.assertEqual(pool.alloc([held, row_req()]), [3, 0])
        self.assertEqual(pool.alloc([row_req(req_pool_idx=2, kv_committed_len=5)]), [2])
        with self.assertRaises(AssertionError):
            pool.alloc([row_req(req_pool_idx=2)])
        with self.assertRaises(AssertionError):
            pool.alloc([row_req(req_pool_idx=2, is_chunked=1), row_req(req_pool_idx=3, is_chunked=1)])

    def test_host_buffer_only_grows(self):
        pool = ReqToTokenPool(2, 16)
        self.assertIsNone(pool.cache_loc_host_buf)
        pool.init_cache_loc_host_buffer(8)
        big = pool.cache_loc_host_buf
        pool.init_cache_loc_host_buffer(4)
        self.assertIs(pool.cache_loc_host_buf, big)
        pool.init_cache_loc_host_buffer(32)
        self.assertEqual(pool.cache_loc_host_buf.size, 32)

    def test_pytree(self):
        leaves, tree = jax.tree_util.tree_flatten(ReqToTokenPool(2, 4))
        self.assertEqual(len(leaves), 1)
        self.assertIsInstance(jax.tree_util.tree_unflatten(tree, leaves), ReqToTokenPool)


class TestKVPools(CustomTestCase):
    def test_mha_by_keyword_and_position(self):
        pool = MHATokenToKVPool(
            size=16, page_size=4, dtype=jnp.bfloat16, head_num=2, head_dim=8, layer_num=2, mesh=mesh
        )
        self.assertIsInstance(pool, KVCache)
        self.assertEqual(len(pool.kv_buffer), 2)
        self.assertEqual(pool.get_kv_buffer(1)[0].shape[:2], (5, 4))
        self.assertEqual(pool.kv_sharding.spec[0], "data")
        self.assertEqual(MHATokenToKVPool(8, 1, jnp.float32, 2, 4, 1, mesh, 2).dp_size, 2)

    def test_size_must_divide(self):
        for size, page, dp in ((10, 4, 1), (9, 1, 2)):
            with self.assertRaises(AssertionError):
                MHATokenToKVPool(size, page, jnp.float32, 1, 4, 1, mesh, dp_size=dp)

    def test_swa_pool(self):
        pool = swa_pool(64, 32, 4)
        self.assertEqual((pool.size, pool.size_swa, pool.page_size, pool.dp_size), (64, 32, 4, 1))
        self.assertEqual(pool.layers_mapping, {1: (0, False), 0: (0, True)})
        self.assertIsInstance(pool.full_kv_pool, MHATokenToKVPool)
        self.assertEqual((pool.full_kv_pool.size, pool.swa_kv_pool.size), (64, 32))
        self.assertGreater(pool.mem_usage, 0)
        self.assertIsNone(pool.full_to_swa_index_mapping)
        for layer, pages in ((0, 9), (1, 17)):
            self.assertEqual(pool.get_kv_buffer(layer)[0].shape[0], pages)
            self.assertIsNotNone(pool.get_fused_kv_buffer(layer))

    def test_own_head_shape_of_swa_layers(self):
        pool = SWAKVPool(
            8, 8, 1, [0], [1], swa_head_num=4, swa_head_dim=16,
            mesh=mesh, dtype=jnp.float32, head_num=2, head_dim=8,
        )  # fmt: skip
        self.assertEqual((pool.swa_kv_pool.head_num, pool.swa_kv_pool.head_dim), (4, 16))
        self.assertEqual((pool.full_kv_pool.head_num, pool.full_kv_pool.head_dim), (2, 8))

    def test_remap_and_pytree(self):
        a = swa_allocator(64, 32, page_size=4)
        a.alloc(4)
        full = a.alloc(4)
        a.free_swa(ids(4, 5, 6, 7))
        pool = a.get_kvcache()
        self.assertEqual(pool.remap_cache_loc(full, 1).tolist(), full.tolist())
        self.assertEqual(pool.remap_cache_loc(full, 0).tolist(), [8, 9, 10, 11])
        leaves, tree = jax.tree_util.tree_flatten(pool)
        self.assertTrue(any(leaf is a.full_to_swa_index_mapping for leaf in leaves))
        self.assertIsInstance(jax.tree_util.tree_unflatten(tree, leaves), SWAKVPool)
        two = swa_allocator(64, 32, page_size=4, dp_size=2)
        leaves = jax.tree_util.tree_leaves(two.get_kvcache())
        self.assertTrue(any(leaf is two.full_to_swa_index_mapping[1] for leaf in leaves))

    def test_names_a_conftest_replaces(self):
        for name in ("merge_kv", "update_fused_kv_cache_vectorized"):
            self.assertTrue(callable(getattr(memory_pool, name)))
            real = getattr(memory_pool, name)
            setattr(memory_pool, name, None)
            self.assertIsNone(getattr(memory_pool, name))
            setattr(memory_pool, name, real)

    def test_memory_pools(self):
        pool = MHATokenToKVPool(8, 1, jnp.float32, 2, 4, 1, mesh)
        pools = MemoryPools(token_to_kv_pool=pool)
        self.assertIs(pools.token_to_kv_pool, pool)
        pools.replace_all({"token_to_kv_pool": pool.kv_buffer})


class TestMesh(CustomTestCase):
    def test_fill(self):
        made = create_device_mesh(ici_parallelism=[1, -1], dcn_parallelism=[1, 1])
        self.assertEqual(made.axis_names, ("data", "tensor"))
        self.assertEqual(made.shape["data"], 1)
        one = create_device_mesh(
            [1, 1], [1, 1], devices=jax.devices()[:1], num_slices=1, allow_split_physical_axes=True,
            use_explicit_sharding=True, mesh_axes=["data", "tensor"],
        )  # fmt: skip
        self.assertEqual(one.devices.shape, (1, 1))


if __name__ == "__main__":
    unittest.main()
