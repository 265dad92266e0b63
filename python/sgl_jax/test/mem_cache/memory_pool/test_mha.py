"""MHATokenToKVPool: separate flat K and V arrays, writes, donation, size checks."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from sgl_jax.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator
from sgl_jax.srt.mem_cache.memory_pool import (
    MHATokenToKVPool,
    PoolSizeError,
    merge_kv,
    update_fused_kv_cache_vectorized,
    write_kv,
)
from sgl_jax.srt.utils.mesh_utils import create_device_mesh


@pytest.fixture(scope="module")
def mesh():
    return create_device_mesh(ici_parallelism=[1, 1], dcn_parallelism=[1, 1], devices=jax.devices()[:1])


def build(mesh, **kwargs):
    defaults = {
        "size": 16,
        "page_size": 4,
        "dtype": jnp.float32,
        "head_num": 2,
        "head_dim": 3,
        "layer_num": 2,
        "mesh": mesh,
    }
    return MHATokenToKVPool(**{**defaults, **kwargs})


@pytest.mark.parametrize("page", [1, 4])
@pytest.mark.parametrize("dp", [1, 2])
def test_arrays_have_one_padding_page_per_rank(mesh, page, dp):
    pool = build(mesh, size=8 * page * dp, page_size=page, dp_size=dp, v_head_dim=5)
    assert [k.shape for k in pool.k_buffer] == [(9 * dp, page, 6)] * 2
    assert [v.shape for v in pool.v_buffer] == [(9 * dp, page, 10)] * 2
    assert (
        pool.kv_sharding.spec == P("data", None, "tensor") and pool.k_buffer[0].sharding == pool.kv_sharding
    )
    assert pool.mem_usage == 2 * 9 * dp * page * 16 * 4 / 1024**3
    assert (pool.start_layer, pool.end_layer) == (0, 1)


def test_written_tokens_come_back_from_their_slots(mesh):
    pool = build(mesh, v_head_dim=2, start_layer=5)
    k = np.arange(12, dtype=np.float32).reshape(2, 2, 3)
    v = -np.arange(8, dtype=np.float32).reshape(2, 2, 2)
    pool.set_kv_buffer(6, np.array([5, 16]), k, v)
    keys, values = pool.get_kv_buffer(6)
    assert (np.asarray(keys)[1, 1] == k[0].ravel()).all() and (np.asarray(keys)[4, 0] == k[1].ravel()).all()
    assert (np.asarray(values)[1, 1] == v[0].ravel()).all() and (
        np.asarray(values)[4, 0] == v[1].ravel()
    ).all()
    assert np.count_nonzero(np.asarray(keys)) == 11 and not np.asarray(pool.get_key_buffer(5)).any()
    assert pool.get_value_buffer(6) is values and (pool.start_layer, pool.end_layer) == (5, 6)
    pool.clear_buffers()
    assert not np.asarray(pool.get_key_buffer(6)).any()


def test_ranks_have_their_own_page_zero(mesh):
    """D49: the same local slot on two ranks is two places."""
    pool = build(mesh, size=16, dp_size=2)
    one = np.ones((1, 6), np.float32)
    pool.set_kv_buffer(0, [4], one, one, dp_rank=0)
    pool.set_kv_buffer(0, [4], 2 * one, 2 * one, dp_rank=1)
    keys = np.asarray(pool.get_key_buffer(0))
    assert keys[1, 0].tolist() == [1] * 6 and keys[3 + 1, 0].tolist() == [2] * 6
    assert not keys[0].any() and not keys[3].any()


def test_slots_out_of_range_raise_and_are_never_clamped(mesh):
    """D59."""
    pool = build(mesh)
    one = np.ones((1, 6), np.float32)
    for slot in (20, -1):
        with pytest.raises(PoolSizeError, match=rf"slots \[{slot}\] are outside 0\.\.19"):
            pool.set_kv_buffer(0, [slot], one, one)
    keys, values = write_kv(*pool.get_kv_buffer(0), jnp.array([20, 3]), jnp.ones((2, 6)), jnp.ones((2, 6)))
    assert np.argwhere(np.asarray(keys).any(-1)).tolist() == [[0, 3]] and not np.asarray(values)[4].any()


def test_an_array_one_page_short_is_refused_at_start(mesh):
    """D59: array sizes are checked against allocator sizes."""
    pool = build(mesh, size=16)
    pool.check_allocator(PagedTokenToKVPoolAllocator(16, 4, pool))
    for wrong in (
        PagedTokenToKVPoolAllocator(20, 4, pool),
        PagedTokenToKVPoolAllocator(32, 8, pool),
        PagedTokenToKVPoolAllocator(16, 4, pool, dp_size=2),
    ):
        with pytest.raises(PoolSizeError, match="layer 0 K: array has 5 pages of 4 over 1 ranks"):
            pool.check_allocator(wrong)


@pytest.mark.parametrize(
    "kwargs,text",
    [
        ({"size": 18}, "size=18 must be a multiple of page_size.*= 4; use 16"),
        ({"size": 20, "dp_size": 2}, "dp_size = 8; use 16"),
    ],
)
def test_sizes_that_do_not_divide_are_refused(mesh, kwargs, text):
    with pytest.raises(PoolSizeError, match=text):
        build(mesh, **kwargs)
    with pytest.raises(AssertionError):
        build(mesh, **kwargs)


def test_a_step_donates_and_gives_back(mesh):
    pool = build(mesh, layer_num=1)

    def step(buffers, loc, k, v):
        return [write_kv(kp, vp, loc, k, v) for kp, vp in buffers]

    old = pool.buffers()
    new = jax.jit(step, donate_argnums=0)(
        old, jnp.array([4, 0], jnp.int32), jnp.ones((2, 6)), jnp.ones((2, 6))
    )
    pool.replace_buffer(new)
    assert old[0][0].is_deleted() and np.asarray(pool.get_key_buffer(0))[1, 0].tolist() == [1] * 6
    with pytest.raises(PoolSizeError, match="2 layers for a pool of 1"):
        pool.replace_buffer(new * 2)


def test_merge_and_update_keep_the_names_of_the_seam():
    k, v = jnp.ones((2, 2, 3)), 2 * jnp.ones((2, 2, 4))
    flat_k, flat_v = merge_kv(k, v)
    assert flat_k.shape == (2, 6) and flat_v.shape == (2, 8)
    keys, values = update_fused_kv_cache_vectorized(
        k, v, jnp.array([2, 5]), jnp.zeros((3, 2, 6), jnp.bfloat16), jnp.zeros((3, 2, 8), jnp.bfloat16)
    )
    assert keys.dtype == jnp.bfloat16
    assert np.argwhere(np.asarray(keys).any(-1)).tolist() == [[1, 0], [2, 1]]
    assert np.asarray(values)[1, 0].tolist() == [2] * 8


def test_it_is_a_pytree_of_its_arrays(mesh):
    pool = build(mesh, v_head_dim=2)
    leaves, tree = jax.tree_util.tree_flatten(pool)
    assert [leaf.shape for leaf in leaves] == [(5, 4, 6)] * 2 + [(5, 4, 4)] * 2
    again = jax.tree_util.tree_unflatten(tree, leaves)
    assert again.get_kv_buffer(1)[0] is pool.get_kv_buffer(1)[0]
    assert (again.pages_per_rank, again.kv_sharding) == (4, pool.kv_sharding)
    assert jax.tree_util.tree_structure(again) == tree


def test_it_shards_pages_over_data_and_heads_over_tensor():
    """Four virtual devices in a child process: shards, replication demand, data axis."""
    import subprocess
    import sys

    code = """
import jax, jax.numpy as jnp
from sgl_jax.srt.mem_cache.memory_pool import MHATokenToKVPool, PoolSizeError
from sgl_jax.srt.utils.mesh_utils import create_device_mesh
mesh = create_device_mesh([2, -1], [1, 1])
assert dict(mesh.shape) == {"data": 2, "tensor": 2}, mesh
make = lambda **k: MHATokenToKVPool(**{**dict(size=16, page_size=4, dtype=jnp.float32, head_num=2, head_dim=3,
                                              layer_num=1, mesh=mesh, dp_size=2), **k})
pool = make()
assert {s.data.shape for s in pool.k_buffer[0].addressable_shards} == {(3, 4, 3)}
pool.set_kv_buffer(0, [4], jnp.ones((1, 6)), jnp.ones((1, 6)), dp_rank=1)
rows = {s.index[0].start: bool(s.data[1, 0].any()) for s in pool.k_buffer[0].addressable_shards}
assert rows == {0: False, 3: True}, rows
for wrong, text in ((dict(head_num=1), "replicate the KV heads"), (dict(dp_size=1), "data axis of 2")):
    try:
        make(**wrong)
    except PoolSizeError as error:
        assert text in str(error), error
    else:
        raise SystemExit(f"{wrong} accepted")
"""
    env = {**__import__("os").environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300, env=env)
