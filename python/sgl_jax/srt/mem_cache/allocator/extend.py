"""Page geometry of growing sequences: which slots a batch of extends gets. Pure, vectorised, no loop per page or sequence.

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
from sgl_jax.srt.mem_cache.page import ceil_page

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
            f"prefix_lens, seq_lens and last_loc need one entry per sequence, got {prefix.size}, {seq.size}, {last.size}"
        )
    grown = seq - prefix
    if seq.size and int(grown.min()) < 0:
        raise ValueError(f"seq_lens {seq.tolist()} must not be smaller than prefix_lens {prefix.tolist()}")
    total = int(grown.sum())
    if total != num_tokens:
        raise ValueError(f"extend_num_tokens={num_tokens}, but seq_lens - prefix_lens sums to {total}")
    fill = np.minimum(grown, -prefix % page_size)
    pages = -(-seq // page_size) - -(-prefix // page_size)
    return ExtendPlan(prefix, seq, last, fill, pages, total, int(pages.sum()), page_size)


def fill_len(prefix: int, seq: int, page_size: int) -> int:
    """Tokens one sequence takes from its half-filled page when it grows from ``prefix`` to ``seq``."""
    return min(seq, ceil_page(prefix, page_size)) - prefix


def extend_slots(plan: ExtendPlan, pages: IntArray) -> IntArray:
    """Slots of all new tokens, sequence by sequence. ``pages``: the ``plan.new_pages`` new page ids, in order."""
    if plan.total == 0:
        return empty_ids()
    # Segments in output order: each sequence's fill, then its pages; the last page may be short.
    ends = np.cumsum(plan.pages + 1)
    fill_at = ends - plan.pages - 1
    is_page = np.ones((int(ends[-1]),), np.bool_)
    is_page[fill_at] = False
    starts = np.empty((is_page.size,), np.int32)
    lengths = np.full((is_page.size,), plan.page_size, np.int32)
    starts[is_page] = pages * plan.page_size
    lengths[fill_at + plan.pages] -= -plan.seq % plan.page_size
    starts[fill_at] = plan.last_loc + 1
    lengths[fill_at] = plan.fill
    offsets = np.cumsum(lengths) - lengths
    slots: IntArray = np.repeat(starts - offsets, lengths).astype(np.int32)
    slots += np.arange(plan.total, dtype=np.int32)
    return slots


def run_slots(last_loc: int, fill: int, pages: IntArray, total: int, page_size: int) -> IntArray:
    """:func:`extend_slots` for one sequence: ``fill`` slots after ``last_loc``, then ``pages``, ``total`` in all."""
    whole = page_slots(pages, page_size)
    if fill == 0:
        return whole[:total]
    slots = np.empty((total,), np.int32)
    slots[:fill] = np.arange(last_loc + 1, last_loc + 1 + fill, dtype=np.int32)
    slots[fill:] = whole[: total - fill]
    return slots


def page_slots(pages: IntArray, page_size: int) -> IntArray:
    """All slots of ``pages``: int32 ``[len(pages) * page_size]``."""
    firsts: IntArray = pages * np.int32(page_size)
    slots: IntArray = np.add.outer(firsts, np.arange(page_size, dtype=np.int32)).reshape(-1)
    return slots
