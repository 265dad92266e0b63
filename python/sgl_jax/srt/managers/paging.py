"""Ragged page lists of a step, built from the request rows and the FULL -> SWA mapping without a Python loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sgl_jax.srt.managers.kv_memory import KVMemory
from sgl_jax.srt.managers.request import Req
from sgl_jax.srt.mem_cache.errors import UnmappedSlotError

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]

EMPTY: Int32 = np.empty((0,), np.int32)
ZERO_START: Int32 = np.zeros((1,), np.int32)


@dataclass(frozen=True, slots=True)
class PageList:
    """``pages[start[b] : start[b + 1]]`` are the logical pages ``first[b]``, ``first[b] + 1``, ... of row ``b``."""

    pages: Int32
    start: Int32
    first: Int32


def offsets(counts: Int64 | Int32) -> Int32:
    """``[0, c0, c0 + c1, ...]``, int32 ``[B + 1]``."""
    out = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=out[1:])
    return out


def page_slots(memory: KVMemory, rows: Int64, first: Int64, end: Int64) -> tuple[Int32, Int32]:
    """FULL slot of the first token of every logical page ``[first, end)`` per row, flat, and the offsets ``[B + 1]``."""
    counts = end - first
    start = offsets(counts)
    stride = memory.table.shape[1]
    base = rows * stride + (first - start[:-1]) * memory.page_size
    index = np.repeat(base, counts) + np.arange(int(start[-1]), dtype=np.int64) * memory.page_size
    return memory.table.reshape(-1)[index], start


def full_pages(memory: KVMemory, rows: Int64, seq_lens: Int32) -> PageList:
    """All pages of every row, from logical page 0."""
    zero = np.zeros(len(rows), np.int64)
    slots, start = page_slots(memory, rows, zero, -(-seq_lens.astype(np.int64) // memory.page_size))
    return PageList(slots // memory.page_size, start, EMPTY)


def swa_pages(
    memory: KVMemory,
    rank: int,
    rows: Int64,
    query_start: Int32,
    seq_lens: Int32,
    window: int,
    req_at: Callable[[int], Req | None],
) -> PageList:
    """Pages of the window pool that the queries from ``query_start`` on can see.

    Raises UnmappedSlotError naming request and position when a page inside the window has no window slot (D19). Pages before
    it are left out, so a tombstoned prefix is never translated.
    """
    page = memory.page_size
    visible = np.maximum(query_start.astype(np.int64) - (window - 1), 0)
    first = visible // page
    slots, start = page_slots(memory, rows, first, -(-seq_lens.astype(np.int64) // page))
    # A page's first token stands for the page: reclaim and eviction give window pages back whole.
    mapped = memory.swa_slots(slots, rank)
    if not mapped.all():
        hole = int(np.flatnonzero(mapped == 0)[0])
        row = int(np.searchsorted(start, hole, side="right")) - 1
        position = (int(first[row]) + hole - int(start[row])) * page
        req = req_at(row)
        raise UnmappedSlotError(
            f"request {req.rid if req is not None else '?'} (rank {rank}): position {position} lies inside the window of "
            f"{window} keys of its next query but FULL slot {int(slots[hole])} has no window slot"
        )
    return PageList(mapped // page, start, first.astype(np.int32))
