"""Page arithmetic: the only place where token counts are rounded to pages.

A pool of page size ``P`` hands out pages of ``P`` consecutive slots. Page 0 is reserved for padding, so slot
``page * P + offset`` of a usable page is never smaller than ``P``. All functions are pure and take plain ints.
"""

from __future__ import annotations


def floor_page(tokens: int, page_size: int) -> int:
    """Largest multiple of ``page_size`` that is <= ``tokens`` (0 for negative ``tokens``)."""
    if tokens <= 0:
        return 0
    return tokens - tokens % page_size


def ceil_page(tokens: int, page_size: int) -> int:
    """Smallest multiple of ``page_size`` that is >= ``tokens`` (0 for negative ``tokens``)."""
    if tokens <= 0:
        return 0
    return -(-tokens // page_size) * page_size


def num_pages(tokens: int, page_size: int) -> int:
    """Pages that ``tokens`` consecutive tokens starting on a page boundary occupy."""
    return ceil_page(tokens, page_size) // page_size


def new_pages(prefix_len: int, seq_len: int, page_size: int) -> int:
    """Pages a request must newly allocate to grow from ``prefix_len`` to ``seq_len`` tokens."""
    return num_pages(seq_len, page_size) - num_pages(prefix_len, page_size)


def crosses_page(seq_len: int, page_size: int) -> bool:
    """True when appending the token at position ``seq_len - 1`` needs a new page (D45)."""
    return (seq_len - 1) % page_size == 0
