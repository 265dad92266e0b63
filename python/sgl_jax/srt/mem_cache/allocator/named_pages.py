"""From token indices to the pages they name: a page is released only when all its tokens are named (rule 6, D01)."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from sgl_jax.srt.mem_cache.allocator.rank_pool import IntArray, empty_ids

BoolArray = npt.NDArray[np.bool_]
#: pages -> ``bool[len(pages), page_size]``: the tokens a free of that page has to name.
LiveTokens = Callable[[IntArray], BoolArray]


class NamedPages(NamedTuple):
    """``complete``: pages whose live tokens are all named (duplicates possible); ``partial``: only some are."""

    complete: IntArray
    partial: IntArray


def named_pages(indices: IntArray, page_size: int, live_tokens: LiveTokens) -> NamedPages:
    """Sort the pages of in-range ``indices`` into complete and partial ones; a page without live tokens is complete.

    Runs of whole pages, which is what rows and tree nodes hold, cost one comparison; a remainder (a short last page,
    single tokens, any order) is looked up page by page of that remainder. Nothing depends on the pool.
    """
    body = indices.size - indices.size % page_size
    rows = indices[:body].reshape(-1, page_size)
    first = rows[:, 0]
    offsets = np.arange(page_size, dtype=np.int32)
    if not bool((first % page_size == 0).all()) or not bool((rows == first[:, None] + offsets).all()):
        return _lookup(indices, page_size, live_tokens)
    whole = first // page_size
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
    if bool((of_token == of_token[0]).all()):
        pages, row = of_token[:1], np.zeros((indices.size,), np.intp)
    else:
        pages, row = np.unique(of_token, return_inverse=True)
    named = np.zeros((pages.size, page_size), np.bool_)
    named[row, indices - of_token * page_size] = True
    partial = (live_tokens(pages) & ~named).any(axis=1)
    return NamedPages(pages[~partial], pages[partial])
