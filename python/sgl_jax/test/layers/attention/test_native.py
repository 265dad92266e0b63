"""The native backend against dense attention. Pools are NaN wherever nothing was written, so a stray read shows."""

from __future__ import annotations

import numpy as np
import pytest

from sgl_jax.test.layers.attention.paged_cases import Geometry, PagedSequences

W = 8
KINDS = pytest.mark.parametrize("window", [None, W], ids=["full", "swa"])
PAGES = pytest.mark.parametrize("page", [1, 16, 128, 256])


def assert_close(got: np.ndarray, want: np.ndarray) -> None:
    np.testing.assert_allclose(got[: len(want)], want, atol=2e-6, rtol=1e-5)
    assert not np.isnan(got).any(), "a padding row read something"


@PAGES
@KINDS
@pytest.mark.parametrize("path", ["cold", "chunked", "warm", "decode", "mixed"])
def test_every_path_sees_its_window(page, window, path):
    """D60: each path x layer kind at three windows of length, in one batch with a shorter sequence."""
    seqs = PagedSequences([3 * W, W + 3], Geometry(page, window=window))
    steps = {
        "cold": [([(0, 0, 24), (1, 0, 11)], 8)],
        "chunked": [([(0, 0, 7), (1, 0, 5)], 8), ([(0, 7, 20), (1, 5, 11)], 8), ([(0, 20, 24)], 8)],
        "warm": [([(0, 0, 16)], 8), ([(0, 16, 24), (1, 0, 11)], 8)],
        "decode": [([(0, 0, 20), (1, 0, 9)], 8)]
        + [([(0, 20 + i, 21 + i)] + [(1, 9 + i, 10 + i)] * (i < 2), 1) for i in range(4)],
        "mixed": [([(0, 0, 23)], 8), ([(0, 23, 24), (1, 0, 11)], 8)],
    }[path]
    for spans, block_rows in steps:
        assert_close(seqs.run(spans, block_rows), seqs.dense(spans))


@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("length", [W - 1, W, W + 1, 2 * W, 4 * W + 1])
def test_a_query_weights_exactly_its_last_w_positions(page, length):
    """D58: values one-hot by position; the query at p uses p-W+1..p, itself included, and nothing else."""
    geo = Geometry(page, q_heads=1, kv_heads=1, dv=4 * W + 1, window=W)
    seqs = PagedSequences([length], geo)
    seqs.v[0] = np.eye(4 * W + 1, dtype=np.float32)[:length, None]
    weights = seqs.run([(0, 0, length)], 4)[:length, 0, :length]
    for p in range(length):
        assert np.flatnonzero(weights[p]).tolist() == list(range(max(0, p - W + 1), p + 1))


@pytest.mark.parametrize("page", [1, 16, 128])
def test_the_window_starts_in_a_late_key_block(page):
    """D57: four steps of 128 keys, the window inside the last one: the first visited step initialises the sums."""
    seqs = PagedSequences([512], Geometry(page, window=W))
    seqs.run([(0, 0, 511)], 64)
    assert_close(seqs.run([(0, 511, 512)], 1), seqs.dense([(0, 511, 512)]))


@pytest.mark.parametrize("page", [1, 16])
def test_pages_before_the_window_are_never_touched(page):
    """Slots below the window are overwritten with NaN between steps, as after reclaim; decode does not notice."""
    seqs = PagedSequences([3 * W + 1], Geometry(page, window=W))
    seqs.run([(0, 0, 3 * W)], 8)
    gone = seqs.slots(0, 0, 2 * W + 1)
    for name in ("k_pool", "v_pool"):
        pool = np.array(getattr(seqs, name))
        pool.reshape(-1, pool.shape[2])[gone] = np.nan
        setattr(seqs, name, pool)
    assert_close(seqs.run([(0, 3 * W, 3 * W + 1)], 1), seqs.dense([(0, 3 * W, 3 * W + 1)]))


@pytest.mark.parametrize(
    "page, length, window", [(1, 393, 128), (16, 393, 128), (128, 393, 128), (16, 40, None)]
)
def test_every_new_token_is_written(page, length, window):
    """D56: pool contents, not the answer: K/V of all new tokens are in their slots, everything else is as before."""
    seqs = PagedSequences([length], Geometry(page, window=window))
    seqs.run([(0, 0, length)], 32)
    slots = seqs.slots(0, 0, length)
    for pool, values in ((seqs.k_pool, seqs.k[0]), (seqs.v_pool, seqs.v[0])):
        flat = np.asarray(pool).reshape(-1, pool.shape[2])
        np.testing.assert_array_equal(flat[slots], values.reshape(length, -1))
        untouched = np.setdiff1d(np.arange(len(flat)), np.append(slots, 0))
        assert np.isnan(flat[untouched]).all()


@pytest.mark.parametrize("block_rows", [1, 2, 16, 64])
def test_block_rows_do_not_change_the_answer(block_rows):
    """More blocks than one group holds: the group loop runs over live groups only."""
    seqs = PagedSequences([150, 1, 70], Geometry(4, window=20))
    spans = [(0, 0, 150), (1, 0, 1), (2, 0, 70)]
    assert_close(seqs.run(spans, block_rows), seqs.dense(spans))


@pytest.mark.parametrize("q_heads, kv_heads", [(4, 1), (6, 2), (5, 5)])
@KINDS
def test_grouped_heads_soft_cap_and_sinks(q_heads, kv_heads, window):
    """D61: a sink enters the denominator once per head and is never cached; soft cap applies to scores, not to sinks."""
    sinks = np.linspace(-1, 2, q_heads, dtype=np.float32)
    geo = Geometry(16, q_heads, kv_heads, window=window, soft_cap=1.5)
    seqs = PagedSequences([21, 9], geo)
    spans = [(0, 0, 20), (1, 0, 9)]
    assert_close(seqs.run(spans, 8, sinks), seqs.dense(spans, sinks))
    assert_close(seqs.run([(0, 20, 21)], 1, sinks), seqs.dense([(0, 20, 21)], sinks))
