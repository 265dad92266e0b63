"""ReqToTokenPool: rows of running requests."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from sgl_jax.srt.mem_cache.memory_pool import ReqToTokenPool


def req(row=None, is_chunked=0, committed=0):
    return SimpleNamespace(req_pool_idx=row, is_chunked=is_chunked, kv_committed_len=committed)


def test_rows_are_int32_zeros_and_row_zero_is_usable():
    pool = ReqToTokenPool(3, 8)
    assert pool.req_to_token.dtype == np.int32 and pool.req_to_token.shape == (3, 8)
    assert pool.free_slots == [0, 1, 2] and pool.available_size() == 3
    first, second = req(), req()
    assert pool.alloc([first, second]) == [0, 1] and (first.req_pool_idx, second.req_pool_idx) == (0, 1)
    assert pool.alloc([req(), req()]) is None and pool.available_size() == 1


def test_the_chunked_request_keeps_its_row():
    pool = ReqToTokenPool(3, 8)
    chunked = req()
    pool.alloc([chunked])
    chunked.is_chunked = 1
    assert pool.alloc([req(), chunked, req()]) == [1, 0, 2] and pool.alloc([chunked]) == [0]
    chunked.is_chunked, chunked.kv_committed_len = 0, 4
    assert pool.alloc([chunked]) == [0]


@pytest.mark.parametrize(
    "reqs,text",
    [([req(0, 1), req(1, 1)], "only one chunked request"), ([req(0)], "row 0 is not chunked")],
)
def test_other_requests_with_a_row_are_refused(reqs, text):
    pool = ReqToTokenPool(4, 8)
    with pytest.raises(AssertionError, match=text):
        pool.alloc(reqs)
    assert pool.available_size() == 4


def test_free_takes_the_row_back_once():
    pool = ReqToTokenPool(2, 8)
    r = req()
    pool.alloc([r])
    pool.free(r)
    assert r.req_pool_idx is None and pool.free_slots == [1, 0]
    with pytest.raises(AssertionError, match="holds no row"):
        pool.free(r)
    pool.clear()
    assert pool.free_slots == [0, 1]


def test_write_and_read():
    pool = ReqToTokenPool(2, 8)
    pool.write((1, slice(0, 3)), np.array([5, 6, 7], np.int32))
    pool.write((1, np.array([3, 4])), 9)
    out = pool.read(1, 5)
    assert out.tolist() == [5, 6, 7, 9, 9]
    out[:] = 0
    assert pool.req_to_token[1, :5].tolist() == [5, 6, 7, 9, 9]


def test_the_host_buffer_only_grows():
    pool = ReqToTokenPool(2, 8)
    assert pool.cache_loc_host_buf is None
    buffer = pool.init_cache_loc_host_buffer(16)
    assert buffer.size == 16 and buffer.dtype == np.int32
    assert pool.init_cache_loc_host_buffer(8) is buffer
    assert pool.init_cache_loc_host_buffer(17).size == 17 and pool.cache_loc_host_buf.size == 17


def test_it_is_a_pytree():
    import jax

    pool = ReqToTokenPool(2, 4)
    pool.alloc([req()])
    leaves, tree = jax.tree_util.tree_flatten(pool)
    assert [leaf.shape for leaf in leaves] == [(2, 4)]
    again = jax.tree_util.tree_unflatten(tree, leaves)
    assert again.free_slots == [1] and again.req_to_token is pool.req_to_token
