"""Page-level tally for the healthy case: one pass over each array, then pages instead of tokens; no Python int per slot.

A state is *regular* when every node value and row is a run of whole pages (the last page of a row may be short), no page
has two owners, none is free and owned or free twice, and the mapping is that of what is owned and keeps offsets. So a regular
state whose sums balance has no fault at all. Anything else returns None and the token-level tally decides:
the two agree by construction, and only a broken state pays for the exact count (DECISIONS 15).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from sgl_jax.srt.mem_cache.ledger.schema import MappingTally, PoolTally
from sgl_jax.srt.mem_cache.ledger.source import IntArray, PoolView, RankView, RequestRow

_BATCH_TOKENS = 1 << 15  # temporaries stay inside the processor's cache


class _Irregular(Exception):
    """The state needs the token-level tally."""


@dataclass(slots=True)
class _Pages:
    """Page ids per pool, as they are found."""

    full: list[IntArray] = field(default_factory=list)
    swa: list[IntArray] = field(default_factory=list)


def _runs(tokens: IntArray, page_size: int) -> IntArray:
    """Page ids of tokens that are consecutive within every page, each run starting on a page boundary."""
    if page_size == 1:
        return tokens
    if len(tokens) % page_size:
        raise _Irregular
    steps = tokens[1:] - tokens[:-1] == 1
    steps[page_size - 1 :: page_size] = True
    heads = tokens[::page_size]
    pages: IntArray = heads // page_size
    if not steps.all() or not np.array_equal(pages * page_size, heads):
        raise _Irregular
    return pages


def _short_runs(tokens: IntArray, page_size: int) -> IntArray:
    """As ``_runs``; the last page may be short."""
    short = len(tokens) % page_size
    body = len(tokens) - short
    pages = _runs(tokens[:body], page_size)
    if not short:
        return pages
    tail = tokens[body:]
    if tail[0] % page_size or not (tail[1:] - tail[:-1] == 1).all():
        raise _Irregular
    return np.append(pages, np.int32(tail[0] // page_size)).astype(np.int32)


def _batches(pairs: Iterable[tuple[IntArray, IntArray]]) -> Iterator[tuple[IntArray, IntArray]]:
    """Join small arrays pairwise into batches, so that the cost follows tokens and not nodes."""
    left: list[IntArray] = []
    right: list[IntArray] = []
    size = 0
    for full, swa in pairs:
        left.append(full)
        right.append(swa)
        size += len(full)
        if size >= _BATCH_TOKENS:
            yield np.concatenate(left), np.concatenate(right)
            left, right, size = [], [], 0
    if left:
        yield np.concatenate(left), np.concatenate(right)


def _check_range(pages: IntArray, view: PoolView) -> None:
    if len(pages) and not (int(pages.min()) >= 1 and int(pages.max()) <= view.capacity // view.page_size):
        raise _Irregular


def _check_held_once(parts: list[IntArray], view: PoolView) -> None:
    """Owned and free pages together: each at most once."""
    pages = np.concatenate([*parts, view.free])
    _check_range(pages, view)
    seen = np.zeros(view.capacity // view.page_size + 1, np.bool_)
    seen[pages] = True
    if int(np.count_nonzero(seen)) != len(pages):
        raise _Irregular


def _collect_nodes(view: RankView, found: _Pages) -> None:
    """Pages of all nodes; live nodes must store exactly what the mapping says, token by token."""
    page = view.page_size
    rows = view.mapping.reshape(-1, page)
    live: list[tuple[IntArray, IntArray]] = []
    dead: list[tuple[IntArray, IntArray]] = []
    for node in view.nodes:
        if node.swa is not None:
            if node.full is None or len(node.full) != len(node.swa):
                raise _Irregular
            live.append((node.full, node.swa))
        elif node.full is not None:
            dead.append((node.full, node.full[:0]))
    for full, swa in _batches(live):
        pages = _runs(full, page)
        _check_range(pages, view.full)
        if not np.array_equal(rows.take(pages, axis=0).reshape(-1), swa):
            raise _Irregular
        found.full.append(pages)
        found.swa.append(_runs(swa, page))
    found.full.extend(_runs(full, page) for full, _ in _batches(dead))


def _collect_row(view: RankView, row: RequestRow, found: _Pages) -> tuple[int, int]:
    """Pages of one row; returns how many it holds in (full, swa)."""
    page = view.page_size
    if row.start % page or row.swa_from % page:
        raise _Irregular
    full = _short_runs(row.full, page)
    _check_range(full, view.full)
    swa = _short_runs(view.mapping[row.live], page)
    found.full.append(full)
    found.swa.append(swa)
    return len(full), len(swa)


def _tally(
    view: PoolView, nodes: list[tuple[IntArray, int]], request_tokens: int, request_pages: int
) -> PoolTally:
    protected = sum(len(value) for value, locked in nodes if locked)
    return PoolTally(
        capacity=view.capacity,
        available=view.available,
        tree_evictable=sum(len(value) for value, _ in nodes) - protected,
        tree_protected=protected,
        request_owned=request_tokens,
        reserved_page_slack=request_pages * view.page_size - request_tokens,
    )


def _tally_or_raise(view: RankView) -> tuple[PoolTally, PoolTally, MappingTally]:
    found = _Pages()
    _collect_nodes(view, found)
    held = [_collect_row(view, row, found) for row in view.rows]
    _check_held_once(found.full, view.full)
    _check_held_once(found.swa, view.swa)
    full_nodes = [(n.full, n.full_locked) for n in view.nodes if n.full is not None]
    swa_nodes = [(n.swa, n.swa_locked) for n in view.nodes if n.swa is not None]
    full_tokens = sum(len(row.full) for row in view.rows)
    swa_tokens = sum(len(row.live) for row in view.rows)
    mapped = int(np.count_nonzero(view.mapping))
    # Everything owned is mapped as stored; an equal count leaves no other entry.
    if mapped != swa_tokens + sum(len(value) for value, _ in swa_nodes):
        raise _Irregular
    return (
        _tally(view.full, full_nodes, full_tokens, sum(full for full, _ in held)),
        _tally(view.swa, swa_nodes, swa_tokens, sum(swa for _, swa in held)),
        MappingTally(nonzero_count=mapped),
    )


def tally_regular(view: RankView) -> tuple[PoolTally, PoolTally, MappingTally] | None:
    """(full, swa, mapping) of one regular rank, all diagnostics zero; None when the state is not regular."""
    if len(view.mapping) != view.full.end:
        return None
    try:
        return _tally_or_raise(view)
    except _Irregular:
        return None
