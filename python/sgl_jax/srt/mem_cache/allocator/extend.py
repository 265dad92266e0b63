"""Page geometry of growing sequences: which slots a batch of extends or decodes gets. Pure, vectorised.

One sequence that grows from ``prefix`` to ``seq`` tokens::

    [prefix, fill_end)      rest of its half-filled page: last_loc + 1, last_loc + 2, ...
    [fill_end, seq)         whole new pages, the last one possibly short

    fill_end = min(seq, ceil_page(prefix))
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sgl_jax.srt.mem_cache.allocator.base import IntVector
from sgl_jax.srt.mem_cache.allocator.rank_pool import IntArray, as_indices, empty_ids
from sgl_jax.srt.mem_cache.page import ceil_page, num_pages

BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class ExtendPlan:
    """Geometry of one ``alloc_extend`` call; arrays are ``[num_seqs]`` int32.

    ``fill``: tokens each sequence takes from its half-filled page; ``pages``: new pages each needs; ``total``: tokens of
    all sequences; ``new_pages``: pages of all sequences.
    """

    prefix: IntArray
    seq: IntArray
    last_loc: IntArray
    fill: IntArray
    pages: IntArray
    total: int
    new_pages: int
    page_size: int

    def continues(self) -> BoolArray:
        """``bool[num_seqs]``: sequences that write into the page of their ``last_loc``."""
        result: BoolArray = self.fill > 0
        return result


def plan_extend(
    prefix_lens: IntVector, seq_lens: IntVector, last_loc: IntVector, num_tokens: int, page_size: int
) -> ExtendPlan:
    """Raises ValueError when the three vectors differ in length, a sequence shrinks, or ``num_tokens`` is not the sum."""
    prefix, seq, last = as_indices(prefix_lens), as_indices(seq_lens), as_indices(last_loc)
    if not prefix.size == seq.size == last.size:
        raise ValueError(
            f"prefix_lens, seq_lens and last_loc must have one entry per sequence, got {prefix.size}, {seq.size}, {last.size}"
        )
    if seq.size == 1:
        return _plan_one(prefix, seq, last, num_tokens, page_size)
    grown = seq - prefix
    if seq.size and int(grown.min()) < 0:
        raise ValueError(f"seq_lens must not be smaller than prefix_lens: {seq.tolist()} < {prefix.tolist()}")
    total = int(grown.sum())
    _check_total(total, num_tokens)
    fill = np.minimum(grown, -prefix % page_size)
    pages = -(-seq // page_size) - -(-prefix // page_size)
    return ExtendPlan(prefix, seq, last, fill, pages, total, int(pages.sum()), page_size)


def _plan_one(prefix: IntArray, seq: IntArray, last: IntArray, num_tokens: int, page_size: int) -> ExtendPlan:
    start, end = int(prefix[0]), int(seq[0])
    if end < start:
        raise ValueError(f"seq_lens must not be smaller than prefix_lens: {end} < {start}")
    _check_total(end - start, num_tokens)
    fill = min(end, ceil_page(start, page_size)) - start
    pages = num_pages(end, page_size) - num_pages(start, page_size)
    fills, counts = np.array([fill], np.int32), np.array([pages], np.int32)
    return ExtendPlan(prefix, seq, last, fills, counts, end - start, pages, page_size)


def _check_total(total: int, num_tokens: int) -> None:
    if total != num_tokens:
        raise ValueError(f"extend_num_tokens={num_tokens} but seq_lens - prefix_lens sums to {total}")


def extend_slots(plan: ExtendPlan, pages: IntArray) -> IntArray:
    """Slots of all new tokens, sequence by sequence. ``pages``: the ``plan.new_pages`` new page ids, in order."""
    page_size = plan.page_size
    if plan.seq.size == 1:
        fill = int(plan.fill[0])
        out = np.empty((plan.total,), np.int32)
        if fill:
            first = int(plan.last_loc[0]) + 1
            out[:fill] = np.arange(first, first + fill, dtype=np.int32)
        out[fill:] = page_slots(pages, page_size)[: plan.total - fill]
        return out
    if plan.total == 0:
        return empty_ids()
    # Segments in output order: each sequence's fill, then its pages; the last page may be short.
    ends = np.cumsum(plan.pages + 1)
    fill_at = ends - plan.pages - 1
    is_page = np.ones((int(ends[-1]),), np.bool_)
    is_page[fill_at] = False
    starts = np.empty((is_page.size,), np.int32)
    lengths = np.full((is_page.size,), page_size, np.int32)
    starts[is_page] = pages * page_size
    lengths[fill_at + plan.pages] -= -plan.seq % page_size
    starts[fill_at] = plan.last_loc + 1
    lengths[fill_at] = plan.fill
    offsets = np.cumsum(lengths) - lengths
    slots: IntArray = np.repeat(starts - offsets, lengths).astype(np.int32)
    slots += np.arange(plan.total, dtype=np.int32)
    return slots


def page_slots(pages: IntArray, page_size: int) -> IntArray:
    """All slots of ``pages``: int32 ``[len(pages) * page_size]``."""
    firsts: IntArray = pages * np.int32(page_size)
    slots: IntArray = np.add.outer(firsts, np.arange(page_size, dtype=np.int32)).reshape(-1)
    return slots
