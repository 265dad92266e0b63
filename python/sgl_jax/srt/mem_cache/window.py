"""Sliding-window arithmetic: one convention for mask, match, lock, reclaim and admission (D58).

``W`` (``sliding_window_size``) is the number of keys a query sees, **itself included**: the query at position ``q``
attends to ``k`` with ``q - W < k <= q``.

* attention mask          ``k > q - W``
* a match is valid        with ``W`` live tokens up to its end, or no gap from the root (one more than the mask needs)
* the reclaim boundary    leaves the last ``W + P`` tokens alone (RFC-0035 section 5)
* a lock protects         whole nodes from the end up until >= ``W`` live tokens are covered
* LRU refresh             the last ``W + P`` logical tokens (D13: the next look-up may stop one page short)
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from sgl_jax.srt.mem_cache.page import ceil_page, floor_page

Lengths = npt.NDArray[np.int32]


def first_visible(position: int, window: int) -> int:
    """First key position the query at ``position`` attends to."""
    return max(0, position - window + 1)


def reclaim_boundary(
    evicted: int, protected: int, pre_len: int, window: int, page_size: int
) -> tuple[int, int]:
    """Half-open interval of row positions whose SWA slots a request gives back (RFC-0035 section 5).

    ::

        [0, protected)        tree-owned, never touched
        [.., old)             reclaimed before
        [old, new)            freed by this call
        [new, pre_len)        kept: at least W + P tokens

    ``pre_len`` is the *processed* length (rule 9). Returns ``(old, new)`` with ``old <= new``; equal means "nothing".
    The boundary never moves backward and is page aligned whenever it moves.
    """
    old = max(evicted, protected)
    new = floor_page(max(old, pre_len - window - page_size), page_size)
    return old, max(old, new)


def reclaim_ends(processed: Lengths, window: int, page_size: int) -> Lengths:
    """Where :func:`reclaim_boundary` ends for many processed lengths at once, cursors aside: page aligned, never negative."""
    ends: Lengths = np.maximum(processed - window - page_size, 0) // page_size * page_size
    return ends


def live_node_limit(window: int, page_size: int) -> int:
    """Largest live node the SWA component creates: a window rounded up to pages."""
    return ceil_page(window, page_size)


def refresh_span(window: int, page_size: int) -> int:
    """Logical tokens above a match's end whose SWA recency is refreshed: W + P (DECISIONS 2)."""
    return window + page_size


def reclaim_interval(window: int, page_size: int, multiplier: float = 1.0) -> int:
    """Decode steps between two reclaims of one request: a page multiple, so no call frees zero pages (D80)."""
    return max(page_size, floor_page(int(window * multiplier), page_size))


def peak_live_tokens(window: int, page_size: int, multiplier: float = 1.0) -> int:
    """Most SWA slots one decoding request holds between two reclaims (D47, D79): window + interval + 2 pages."""
    return window + reclaim_interval(window, page_size, multiplier) + 2 * page_size
