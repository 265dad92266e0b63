"""Page arithmetic by table."""

from __future__ import annotations

import pytest

from sgl_jax.srt.mem_cache.page import ceil_page, crosses_page, floor_page, new_pages, num_pages

PAGES = [1, 2, 4, 128, 256]


@pytest.mark.parametrize(
    "tokens,page,floor,ceil",
    [
        (0, 4, 0, 0),
        (1, 4, 0, 4),
        (3, 4, 0, 4),
        (4, 4, 4, 4),
        (5, 4, 4, 8),
        (7, 1, 7, 7),
        (255, 256, 0, 256),
        (256, 256, 256, 256),
        (257, 256, 256, 512),
        (129, 128, 128, 256),
        (-1, 4, 0, 0),
        (-5, 4, 0, 0),
        (-4, 1, 0, 0),
    ],
)
def test_floor_and_ceil(tokens, page, floor, ceil):
    assert (floor_page(tokens, page), ceil_page(tokens, page)) == (floor, ceil)
    assert num_pages(tokens, page) == ceil // page


@pytest.mark.parametrize("page", PAGES)
def test_rounding_brackets_every_length(page):
    for tokens in range(3 * page + 2):
        low, high = floor_page(tokens, page), ceil_page(tokens, page)
        assert low <= tokens <= high and low % page == high % page == 0
        assert high - low == (0 if tokens % page == 0 else page)


@pytest.mark.parametrize(
    "prefix,seq,page,pages",
    [(0, 0, 4, 0), (0, 1, 4, 1), (1, 4, 4, 0), (4, 5, 4, 1), (3, 9, 4, 2), (0, 5, 1, 5), (255, 257, 256, 1)],
)
def test_new_pages(prefix, seq, page, pages):
    assert new_pages(prefix, seq, page) == pages


@pytest.mark.parametrize("page", PAGES)
def test_a_token_crosses_a_page_exactly_when_it_needs_a_new_one(page):
    """D45: decode demand counts the requests for which this is true."""
    for seq in range(1, 3 * page + 2):
        assert crosses_page(seq, page) is (new_pages(seq - 1, seq, page) == 1)
