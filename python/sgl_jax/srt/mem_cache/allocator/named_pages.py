"""From token indices to the pages they name: a page is released only when all its tokens are named (rule 6, D01)."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from sgl_jax.srt.mem_cache.allocator.rank_pool import IntArray, all_true, empty_ids

BoolArray = npt.NDArray[np.bool_]
#: pages -> ``bool[len(pages), page_size]``: the tokens a free of that page has to name.
LiveTokens = Callable[[IntArray], BoolArray]


class NamedPages(NamedTuple):
    """``complete``: pages whose live tokens are all named (duplicates possible); ``partial``: only some are."""

    complete: IntArray
    partial: IntArray


def whole_pages(indices: IntArray, page_size: int) -> IntArray | None:
    """Pages of ``indices`` when they are runs of whole pages, offset 0 first; None for anything else.

    That is what rows and tree nodes hold; it costs one subtraction and knows nothing of the pool.
    """
    if indices.size % page_size:
        return None
    first = indices[::page_size]
    steps = indices[1:] - indices[:-1]
    steps[page_size - 1 :: page_size] = 1  # from page to page any step will do
    if not all_true(steps == 1) or np.count_nonzero(first % page_size):
        return None
    pages: IntArray = first // page_size
    return pages


def named_pages(indices: IntArray, page_size: int, live_tokens: LiveTokens) -> NamedPages:
    """Sort the pages of in-range ``indices`` into complete and partial ones; a page without live tokens is complete.

    Whole pages first and a short last page, the shape of a request's tail, cost two comparisons; any other order is
    looked up page by page of the indices. Nothing depends on the pool.
    """
    body = indices.size - indices.size % page_size
    if body == 0 < indices.size:
        return _lookup(indices, page_size, live_tokens)
    whole = whole_pages(indices[:body], page_size)
    if whole is None:
        return _lookup(indices, page_size, live_tokens)
    rest = indices[body:]
    if rest.size == 0:
        return NamedPages(whole, empty_ids())
    page = rest[0] // page_size
    if bool((rest // page_size != page).any()) or bool((whole == page).any()):
        return _lookup(indices, page_size, live_tokens)
    tail = _lookup(rest, page_size, live_tokens)
    return NamedPages(np.concatenate((whole, tail.complete)), tail.partial)


def _lookup(indices: IntArray, page_size: int, live_tokens: LiveTokens) -> NamedPages:
    of_token = indices // page_size
    if np.count_nonzero(of_token == of_token[0]) == of_token.size:
        pages, row = of_token[:1], np.zeros((indices.size,), np.intp)
    else:
        pages, row = np.unique(of_token, return_inverse=True)
    named = np.zeros((pages.size, page_size), np.bool_)
    named[row, indices - of_token * page_size] = True
    partial = (live_tokens(pages) & ~named).any(axis=1)
    return NamedPages(pages[~partial], pages[partial])
