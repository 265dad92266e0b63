"""SWAKVPool and MemoryPools."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sgl_jax.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, SWATokenToKVPoolAllocator
from sgl_jax.srt.mem_cache.memory_pool import MemoryPools, MHATokenToKVPool, PoolSizeError, SWAKVPool
from sgl_jax.srt.utils.mesh_utils import create_device_mesh


@pytest.fixture(scope="module")
def mesh():
    return create_device_mesh(ici_parallelism=[1, 1], dcn_parallelism=[1, 1], devices=jax.devices()[:1])


def build(mesh, **kwargs):
    defaults = {
        "size": 16,
        "size_swa": 8,
        "page_size": 4,
        "swa_attention_layer_ids": [0, 1, 3],
        "full_attention_layer_ids": [2, 4],
        "mesh": mesh,
        "dtype": jnp.float32,
        "head_num": 1,
        "head_dim": 4,
    }
    return SWAKVPool(**{**defaults, **kwargs})


def test_layers_are_split_between_the_pools(mesh):
    pool = build(mesh, swa_head_num=2, swa_head_dim=3, swa_v_head_dim=2, v_head_dim=5)
    assert pool.layers_mapping == {2: (0, False), 4: (1, False), 0: (0, True), 1: (1, True), 3: (2, True)}
    assert (pool.full_kv_pool.layer_num, pool.swa_kv_pool.layer_num) == (2, 3)
    assert [x.shape for x in pool.get_kv_buffer(4)] == [(5, 4, 4), (5, 4, 5)]
    assert [x.shape for x in pool.get_kv_buffer(3)] == [(3, 4, 6), (3, 4, 4)]
    assert (pool.size, pool.size_swa, pool.page_size, pool.dp_size) == (16, 8, 4, 1)
    assert pool.mem_usage == pool.full_kv_pool.mem_usage + pool.swa_kv_pool.mem_usage > 0
    assert [a[0].shape[0] for a in pool.kv_buffer] == [3, 3, 5, 3, 5]


def test_swa_dims_default_to_the_full_ones(mesh):
    assert [x.shape for x in build(mesh, v_head_dim=5).get_kv_buffer(0)] == [(3, 4, 4), (3, 4, 5)]
    assert [x.shape for x in build(mesh, v_head_dim=5, swa_head_dim=3).get_kv_buffer(0)] == [(3, 4, 3)] * 2


def test_a_layer_is_of_one_kind(mesh):
    with pytest.raises(PoolSizeError, match=r"layers \[2\] are listed as SWA and as FULL"):
        build(mesh, swa_attention_layer_ids=[0, 2])


@pytest.mark.parametrize("dp", [1, 2])
def test_swa_layers_are_written_at_the_mapped_slots(mesh, dp):
    pool = build(mesh, size=16 * dp, size_swa=8 * dp, dp_size=dp)
    with pytest.raises(PoolSizeError, match="build it first"):
        pool.remap_cache_loc([4], 0)
    a = SWATokenToKVPoolAllocator(16 * dp, 8 * dp, pool, page_size=4, dp_size=dp)
    assert pool.full_to_swa_index_mapping is a.full_to_swa_index_mapping
    rank = dp - 1
    a.swa_attn_allocator.alloc(4, dp_rank=rank)
    slots = a.alloc(4, dp_rank=rank)
    assert pool.remap_cache_loc(slots, 2, rank) is slots
    assert pool.remap_cache_loc(slots, 3, rank).tolist() == [8, 9, 10, 11]
    ones = np.ones((4, 1, 4), np.float32)
    for layer in (2, 3):
        pool.set_kv_buffer(layer, slots, ones, ones, dp_rank=rank)
    full, swa = (
        np.asarray(pool.get_kv_buffer(layer)[0]).any((1, 2)).nonzero()[0].tolist() for layer in (2, 3)
    )
    assert full == [5 * rank + 1] and swa == [3 * rank + 2]


def test_replace_buffer_takes_layer_order(mesh):
    pool = build(mesh)
    marked = [(k + i, v - i) for i, (k, v) in enumerate(pool.buffers())]
    pool.replace_buffer(marked)
    assert [float(pool.get_kv_buffer(layer)[0][0, 0, 0]) for layer in range(5)] == [0, 1, 2, 3, 4]
    assert float(pool.get_kv_buffer(3)[1][0, 0, 0]) == -3
    with pytest.raises(PoolSizeError, match="4 layers for a pool of 5"):
        pool.replace_buffer(marked[:4])


def test_allocator_and_arrays_must_agree(mesh):
    """D59: give the SWA array one page less than the allocator."""
    pool = build(mesh)
    pool.check_allocator(SWATokenToKVPoolAllocator(16, 8, pool, page_size=4))
    with pytest.raises(PoolSizeError, match=r"SWA pool layer 0 K: array has 3 pages.*hands out 4 pages"):
        pool.check_allocator(SWATokenToKVPoolAllocator(16, 12, pool, page_size=4))
    with pytest.raises(PoolSizeError, match="FULL pool"):
        pool.check_allocator(SWATokenToKVPoolAllocator(20, 8, pool, page_size=4))
    with pytest.raises(PoolSizeError, match="needs the dual allocator"):
        pool.check_allocator(PagedTokenToKVPoolAllocator(16, 4, pool))


def test_a_host_only_pool_has_no_arrays():
    pool = SWAKVPool.host_only(8, 4, 2, 1)
    assert (pool.size, pool.size_swa, pool.page_size, pool.full_kv_pool) == (8, 4, 2, None)


def test_it_is_a_pytree_with_the_mapping_as_a_child(mesh):
    pool = build(mesh)
    a = SWATokenToKVPoolAllocator(16, 8, pool, page_size=4)
    leaves, tree = jax.tree_util.tree_flatten(pool)
    assert len(leaves) == 4 + 6 + 1 and leaves[-1] is a.full_to_swa_index_mapping
    again = jax.tree_util.tree_unflatten(tree, leaves)
    assert (
        again.layers_mapping == pool.layers_mapping and again.get_kv_buffer(3)[0] is pool.get_kv_buffer(3)[0]
    )
    assert (again.start_layer, again.end_layer, again.layer_num) == (0, 4, 5)


def test_the_pool_class_can_be_replaced(mesh):
    seen = []

    class Spy(MHATokenToKVPool):
        def __init__(self, **kwargs):
            seen.append((kwargs["size"], kwargs["layer_num"], kwargs["head_num"]))
            super().__init__(**kwargs)

    build(mesh, token_to_kv_pool_class=Spy, swa_head_num=2)
    assert seen == [(16, 2, 1), (8, 3, 2)]


def test_memory_pools_replace_all_by_name(mesh):
    pools = MemoryPools(token_to_kv_pool=build(mesh))
    assert [name for name, _ in pools.items()] == ["token_to_kv_pool"]
    buffers = pools.buffers()
    pools.replace_all({"token_to_kv_pool": [(k + 1, v) for k, v in buffers["token_to_kv_pool"]]})
    assert float(pools.token_to_kv_pool.get_kv_buffer(0)[0][0, 0, 0]) == 1
    pools.replace_all(token_to_kv_pool=buffers["token_to_kv_pool"])
    with pytest.raises(ValueError, match=r"no memory pool named \['other'\]"):
        pools.replace_all({"token_to_kv_pool": [], "other": []})
    with pytest.raises(AttributeError, match="no memory pool named 'recurrent'"):
        _ = pools.recurrent
    leaves, tree = jax.tree_util.tree_flatten(pools)
    assert len(leaves) == 10
    assert jax.tree_util.tree_unflatten(tree, leaves).token_to_kv_pool.size == 16
