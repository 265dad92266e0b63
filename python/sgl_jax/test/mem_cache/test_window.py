"""Window arithmetic by table: mask, reclaim boundary, spans, peak."""

from __future__ import annotations

import numpy as np
import pytest

from sgl_jax.srt.mem_cache.window import (
    first_visible,
    live_node_limit,
    peak_live_tokens,
    reclaim_boundary,
    reclaim_ends,
    reclaim_interval,
    refresh_span,
)

GEOMETRY = [(w, p) for w in (1, 4, 128, 300) for p in (1, 128, 256)]


@pytest.mark.parametrize(
    "position,window,first",
    [(0, 4, 0), (3, 4, 0), (4, 4, 1), (9, 4, 6), (5, 1, 5), (127, 128, 0), (128, 128, 1)],
)
def test_a_query_sees_window_keys_itself_included(position, window, first):
    """D58: one convention, ``k > q - W``."""
    assert first_visible(position, window) == first
    assert len([k for k in range(position + 1) if k > position - window]) == position - first + 1


@pytest.mark.parametrize(
    "evicted,protected,pre_len,window,page,expected",
    [
        (0, 0, 16, 4, 1, (0, 11)),
        (0, 8, 16, 4, 1, (8, 11)),
        (11, 8, 17, 4, 1, (11, 12)),
        (0, 12, 16, 4, 1, (12, 12)),
        (0, 0, 5, 4, 1, (0, 0)),
        (0, 0, 3, 4, 1, (0, 0)),
        (0, 0, 400, 128, 256, (0, 0)),  # D18
        (0, 0, 640, 128, 256, (0, 256)),
        (0, 0, 639, 128, 256, (0, 0)),
        (0, 256, 1024, 128, 256, (256, 512)),
        (0, 300, 1024, 128, 256, (300, 512)),
        (512, 256, 1024, 128, 256, (512, 512)),
        (0, 0, 1024, 128, 128, (0, 768)),
    ],
)
def test_reclaim_boundary(evicted, protected, pre_len, window, page, expected):
    assert reclaim_boundary(evicted, protected, pre_len, window, page) == expected


@pytest.mark.parametrize(
    "window,page,ends",
    [
        (4, 1, [0, 0, 0, 1, 11]),
        (128, 128, [0, 0, 0, 0, 0]),
        (8, 4, [0, 0, 0, 0, 4]),
    ],
)
def test_the_ends_of_many_requests_at_once(window, page, ends):
    processed = np.array([0, 3, 5, 6, 16], np.int32)
    assert reclaim_ends(processed, window, page).tolist() == ends
    assert [reclaim_boundary(0, 0, n, window, page)[1] for n in processed.tolist()] == ends
    assert reclaim_ends(np.array([639, 640, 1024], np.int32), 128, 256).tolist() == [0, 256, 512]


@pytest.mark.parametrize("window,page", GEOMETRY)
def test_the_boundary_is_monotonic_page_aligned_and_keeps_window_plus_page(window, page):
    """RFC-0035 section 5, D18: sweep the processed length; the final active page and a live window always stay."""
    evicted = 0
    for pre_len in range(0, 4 * page + 3 * window, max(1, page // 32)):
        old, new = reclaim_boundary(evicted, 0, pre_len, window, page)
        assert old == evicted <= new
        assert new % page == 0
        if new > old:
            assert pre_len - new >= window + page
            assert new > pre_len - window - 2 * page
        evicted = new


@pytest.mark.parametrize("protected", [0, 128, 256, 384])
def test_the_boundary_never_enters_what_the_tree_owns(protected):
    for pre_len in range(0, 2000, 37):
        old, new = reclaim_boundary(0, protected, pre_len, 100, 128)
        assert old == protected <= new


@pytest.mark.parametrize(
    "window,page,limit,span,interval,peak",
    [
        (4, 1, 4, 5, 4, 10),
        (4, 4, 4, 8, 4, 16),
        (5, 4, 8, 9, 4, 17),
        (128, 256, 256, 384, 256, 896),
        (128, 128, 128, 256, 128, 512),
        (1024, 128, 1024, 1152, 1024, 2304),
        (1, 1, 1, 2, 1, 4),
    ],
)
def test_spans_interval_and_peak(window, page, limit, span, interval, peak):
    assert live_node_limit(window, page) == limit
    assert refresh_span(window, page) == span
    assert reclaim_interval(window, page) == interval
    assert peak_live_tokens(window, page) == peak


@pytest.mark.parametrize("multiplier,interval", [(0.1, 256), (1.0, 256), (2.0, 256), (4.0, 512), (5.9, 512)])
def test_no_interval_is_shorter_than_a_page(multiplier, interval):
    """D80: W=128, P=256; a reclaim that frees nothing cannot be scheduled."""
    assert reclaim_interval(128, 256, multiplier) == interval
    assert peak_live_tokens(128, 256, multiplier) == 128 + interval + 512


@pytest.mark.parametrize("window,page", GEOMETRY)
@pytest.mark.parametrize("multiplier", [0.5, 1.0, 2.0])
def test_the_peak_bounds_a_decoding_request(window, page, multiplier):
    """D47, D79: simulate 6 windows of decode with whole SWA pages; live slots never exceed the peak."""
    interval = reclaim_interval(window, page, multiplier)
    evicted = most = 0
    for seq_len in range(1, 6 * max(window, page)):
        if seq_len % interval == 0:
            evicted = reclaim_boundary(evicted, 0, seq_len - 1, window, page)[1]
        most = max(most, -(-seq_len // page) * page - evicted)
    assert most <= peak_live_tokens(window, page, multiplier) + page - 1
