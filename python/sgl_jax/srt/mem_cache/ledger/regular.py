"""Page-level tally for the healthy case: pages instead of tokens, one pass over each array, no Python int per slot.

A state is *regular* when every node value and row is a run of whole pages (the last page of a row may be short), no page
has two owners and the mapping is offset-preserving. Anything else returns None and the token-level tally decides, so the
two agree by construction and only a broken state pays for the exact count (DECISIONS 15).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sgl_jax.srt.mem_cache.ledger.schema import MappingTally, PoolTally
from sgl_jax.srt.mem_cache.ledger.source import IntArray, PoolView, RankView

_WORD = 8  # bool lanes compared at once
_CHUNK_TOKENS = 1 << 15  # keep temporaries inside the cache
_ALL_TRUE = np.uint64(0x0101010101010101)


@dataclass(slots=True)
class _MapPages:
    """``page[f]``: SWA page of FULL page f (0 = none); ``whole[f]``: all its tokens are mapped; ``entries``: mapped tokens."""

    page: IntArray
    whole: npt.NDArray[np.bool_]
    entries: int


def _runs(tokens: IntArray, page_size: int) -> IntArray | None:
    """Page ids of whole-page runs, or None when the tokens are not consecutive within every page."""
    grid = tokens.reshape(-1, page_size)
    heads = grid[:, :1]
    if not np.array_equal(grid, heads + np.arange(page_size, dtype=np.int32)):
        return None
    pages = heads[:, 0] // page_size
    return pages if np.array_equal(pages * page_size, heads[:, 0]) else None


def _batches(arrays: Iterable[IntArray]) -> Iterable[IntArray]:
    held: list[IntArray] = []
    size = 0
    for array in arrays:
        held.append(array)
        size += len(array)
        if size >= _CHUNK_TOKENS:
            yield np.concatenate(held)
            held, size = [], 0
    if held:
        yield np.concatenate(held)


def _value_pages(arrays: list[IntArray], page_size: int) -> IntArray | None:
    if any(len(array) % page_size for array in arrays):
        return None
    pages = []
    for batch in _batches(arrays):
        run = _runs(batch, page_size)
        if run is None:
            return None
        pages.append(run)
    return np.concatenate(pages) if pages else np.empty(0, np.int32)


def _row_pages(tokens: IntArray, start: int, page_size: int) -> IntArray | None:
    """Pages of a row from a page-aligned start; the last page may be short."""
    if start % page_size:
        return None
    short = len(tokens) % page_size
    pages = _runs(tokens[: len(tokens) - short], page_size)
    if pages is None or not short:
        return pages
    tail = tokens[len(tokens) - short :]
    if tail[0] % page_size or not np.array_equal(tail, tail[0] + np.arange(short, dtype=np.int32)):
        return None
    return np.append(pages, np.int32(tail[0] // page_size))


def _map_pages(mapping: IntArray, page_size: int) -> _MapPages | None:
    grid = mapping.reshape(-1, page_size)
    offsets = np.arange(page_size, dtype=np.int32)
    heads = np.ascontiguousarray(grid[:, 0])
    whole = np.zeros(len(grid), np.bool_)
    entries = 0
    step = max(1, _CHUNK_TOKENS // page_size)
    for low in range(0, len(grid), step):
        part = grid[low : low + step]
        hits = part == heads[low : low + step, None] + offsets
        live = heads[low : low + step] != 0
        regular = int(np.count_nonzero(hits[live]))
        if regular != int(np.count_nonzero(part)):
            return None
        entries += regular
        lanes = hits.view(np.uint64)
        whole[low : low + step] = (lanes == _ALL_TRUE).all(axis=1) & live
    pages = heads // page_size
    if not np.array_equal(pages * page_size, heads):
        return None
    return _MapPages(pages, whole, entries)


def _in_range(pages: IntArray, view: PoolView) -> bool:
    if not len(pages):
        return True
    return int(pages.min()) >= 1 and int(pages.max()) <= view.capacity // view.page_size


def _all_distinct(pages: IntArray, view: PoolView) -> bool:
    if not _in_range(pages, view):
        return False
    seen = np.zeros(view.capacity // view.page_size + 1, np.bool_)
    seen[pages] = True
    return int(np.count_nonzero(seen)) == len(pages)


def _tally(
    view: PoolView, nodes: list[tuple[IntArray, int]], owned_by_requests: int, request_pages: int
) -> PoolTally:
    protected = sum(len(value) for value, locked in nodes if locked)
    return PoolTally(
        capacity=view.capacity,
        available=view.available,
        tree_evictable=sum(len(value) for value, _ in nodes) - protected,
        tree_protected=protected,
        request_owned=owned_by_requests,
        reserved_page_slack=request_pages * view.page_size - owned_by_requests,
    )


@dataclass(slots=True)
class _OwnedPages:
    """Page ids per owner: live nodes (both pools, same order), tombstones, rows."""

    live_full: IntArray
    live_swa: IntArray
    dead_full: IntArray
    rows: list[IntArray]


def _owned_pages(view: RankView) -> _OwnedPages | None:
    page = view.page_size
    live = [(n.full, n.swa) for n in view.nodes if n.swa is not None]
    if any(full is None or len(full) != len(swa) for full, swa in live):
        return None
    live_full = _value_pages([full for full, _ in live if full is not None], page)
    live_swa = _value_pages([swa for _, swa in live], page)
    dead_full = _value_pages([n.full for n in view.nodes if n.swa is None and n.full is not None], page)
    rows = []
    for row in view.rows:
        pages = None if row.swa_from % page else _row_pages(row.full, row.start, page)
        if pages is None:
            return None
        rows.append(pages)
    if live_full is None or live_swa is None or dead_full is None:
        return None
    return _OwnedPages(live_full, live_swa, dead_full, rows)


def _mapping_agrees(view: RankView, owned: _OwnedPages, mapped: _MapPages, row_tokens: int) -> bool:
    """Live nodes and rows are mapped as stored, targets are unshared and in range, and nothing else is mapped."""
    targets = mapped.page[mapped.page != 0]
    return bool(
        mapped.page[0] == 0
        and _all_distinct(targets, view.swa)
        and np.array_equal(mapped.page[owned.live_full], owned.live_swa)
        and mapped.whole[owned.live_full].all()
        and all(view.mapping[row.live].all() for row in view.rows)
        and mapped.entries == row_tokens + len(owned.live_swa) * view.page_size
    )


def tally_regular(view: RankView) -> tuple[PoolTally, PoolTally, MappingTally] | None:
    """(full, swa, mapping) of one regular rank, all diagnostics zero; None when the state is not regular."""
    page = view.page_size
    if page % _WORD or len(view.mapping) != view.full.end:
        return None
    owned = _owned_pages(view)
    if owned is None:
        return None
    full_pages = np.concatenate([owned.live_full, owned.dead_full, *owned.rows])
    row_tokens = sum(len(row.live) for row in view.rows)
    if not _all_distinct(full_pages, view.full):
        return None
    mapped = _map_pages(view.mapping, page)
    if mapped is None or not _mapping_agrees(view, owned, mapped, row_tokens):
        return None
    full = _tally(
        view.full,
        [(n.full, n.full_locked) for n in view.nodes if n.full is not None],
        sum(len(row.full) for row in view.rows),
        sum(len(pages) for pages in owned.rows),
    )
    swa = _tally(
        view.swa,
        [(n.swa, n.swa_locked) for n in view.nodes if n.swa is not None],
        row_tokens,
        sum(-(-len(row.live) // page) for row in view.rows),
    )
    return full, swa, MappingTally(nonzero_count=mapped.entries)
