"""Which query rows attend to which pages: one block-ragged description for prefill and decode.

Query tokens are grouped in blocks of ``BQ`` rows; **a block belongs to one sequence** and its rows are consecutive tokens::

    sequence 0: 5 new tokens   sequence 1: 2 new tokens          BQ = 4
    tokens   0 1 2 3 4         5 6
    blocks  [0 1 2 3][4 . . .][5 6 . .][padding block, rows = 0]

Decode is the case BQ = 1. The builder is pure numpy over rank-local arrays; ranks are stacked on axis 0, every axis is padded
to a compiled shape. Padding blocks have no rows and read nothing; padding tokens write to slot 0 of page 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import jax
import numpy as np

from sgl_jax.srt.mem_cache.window import first_visible


class RankQueries(Protocol):
    """One rank's share of a step, as the scheduler hands it over (unpadded, rank-local).

    Sequence ``b`` owns tokens ``[sum(extend_lens[:b]), sum(extend_lens[:b+1]))`` at the positions ``[seq_lens[b] - extend_lens[b],
    seq_lens[b])``. ``full_pages[full_page_start[b]:full_page_start[b+1]]`` are its logical pages 0, 1, ...;
    ``swa_pages[...]`` its logical pages ``swa_first_page[b], +1, ...``. ``swa_*`` are None for models with one pool.
    """

    @property
    def extend_lens(self) -> np.ndarray: ...
    @property
    def seq_lens(self) -> np.ndarray: ...
    @property
    def full_loc(self) -> np.ndarray: ...
    @property
    def full_pages(self) -> np.ndarray: ...
    @property
    def full_page_start(self) -> np.ndarray: ...
    @property
    def swa_loc(self) -> np.ndarray | None: ...
    @property
    def swa_pages(self) -> np.ndarray | None: ...
    @property
    def swa_page_start(self) -> np.ndarray | None: ...
    @property
    def swa_first_page(self) -> np.ndarray | None: ...


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Compiled (padded) sizes per rank. ``swa_pages`` 0 = the model has one pool.

    ``tokens`` query tokens, ``seqs`` sequences, ``block_rows`` = BQ, ``full_pages``/``swa_pages`` flat page list lengths.
    """

    tokens: int
    seqs: int
    block_rows: int
    full_pages: int
    swa_pages: int = 0

    @property
    def blocks(self) -> int:
        """Blocks that always suffice: each sequence wastes less than one block."""
        return max(1, (self.tokens + self.seqs * (self.block_rows - 1)) // self.block_rows)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class PoolView:
    """How a step addresses one pool, rank-local ids.

    ``loc`` [dp, T]: slot each new token's K/V goes to. Logical page ``j`` of sequence ``s`` is ``pages[base[s] + j]``; ``base`` may be
    negative when the list starts at a later page.
    """

    loc: Any  # [dp, T]
    pages: Any  # [dp, pages]
    base: Any  # [dp, S]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """Input of the attention backends; arrays are int32 (numpy on the host, traced inside a step).

    ``blocks`` [dp, 4, NB]: rows (sequence, position of the first row, live rows, token index of the first row).
    ``tok_row`` [dp, T]: block row (block * BQ + row) of each token; NB * BQ for padding tokens.
    ``swa`` None: window layers live in the full pool.
    """

    blocks: Any
    tok_row: Any
    full: PoolView
    swa: PoolView | None
    block_rows: int = field(metadata={"static": True})


def query_block_rows(max_extend: int, limit: int = 64) -> int:
    """BQ for a compiled step: 1 for decode, else the power of two that covers ``max_extend``, at most ``limit``."""
    rows = 1
    while rows < min(max_extend, limit):
        rows *= 2
    return rows


def build_attention_metadata(ranks: Sequence[RankQueries], shape: AttentionShape) -> AttentionMetadata:
    """Stack and pad ``ranks`` to ``shape``. Pure; O(tokens + pages), no Python per sequence.

    Raises ValueError naming the axis when a rank does not fit ``shape``.
    """
    dp, blocks_padded = len(ranks), shape.blocks
    blocks = np.zeros((dp, 4, blocks_padded), np.int32)
    tok_row = np.full((dp, shape.tokens), blocks_padded * shape.block_rows, np.int32)
    for i, rank in enumerate(ranks):
        own_blocks, own_rows = _rank_blocks(rank, shape.block_rows)
        _fit("tokens", own_rows.shape[0], shape.tokens)
        _fit("seqs", len(rank.seq_lens), shape.seqs)
        _fit("blocks", own_blocks.shape[1], blocks_padded)
        blocks[i, :, : own_blocks.shape[1]] = own_blocks
        tok_row[i, : own_rows.shape[0]] = own_rows
    full = _pool_view(
        [(r.full_loc, r.full_pages, r.full_page_start, None) for r in ranks], shape, "full_pages"
    )
    swa = None
    if shape.swa_pages:
        swa_lists = [(r.swa_loc, r.swa_pages, r.swa_page_start, r.swa_first_page) for r in ranks]
        swa = _pool_view(swa_lists, shape, "swa_pages")
    return AttentionMetadata(blocks, tok_row, full, swa, shape.block_rows)


def _rank_blocks(rank: RankQueries, block_rows: int) -> tuple[np.ndarray, np.ndarray]:
    """(blocks [4, n], tok_row [T]) of one rank, unpadded."""
    extend = rank.extend_lens.astype(np.int64)
    per_seq = -(-extend // block_rows)
    first_block = np.cumsum(per_seq) - per_seq
    first_token = np.cumsum(extend) - extend
    seq = np.repeat(np.arange(len(extend)), per_seq)
    done = (np.arange(len(seq)) - first_block[seq]) * block_rows  # tokens of the sequence before the block
    blocks = np.stack(
        [
            seq,
            (rank.seq_lens - extend)[seq] + done,
            np.minimum(block_rows, extend[seq] - done),
            first_token[seq] + done,
        ]
    )
    # A sequence's blocks are adjacent, so row = first row of the sequence + offset of the token in it.
    tok_row = np.repeat(first_block * block_rows - first_token, extend) + np.arange(int(extend.sum()))
    return blocks.astype(np.int32), tok_row.astype(np.int32)


def _pool_view(lists: Sequence[tuple[Any, Any, Any, Any]], shape: AttentionShape, axis: str) -> PoolView:
    dp, size = len(lists), getattr(shape, axis)
    loc = np.zeros((dp, shape.tokens), np.int32)
    pages = np.zeros((dp, size), np.int32)
    base = np.zeros((dp, shape.seqs), np.int32)
    for i, (own_loc, own_pages, start, first_page) in enumerate(lists):
        _fit(axis, len(own_pages), size)
        _fit("tokens", len(own_loc), shape.tokens)
        loc[i, : len(own_loc)] = own_loc
        pages[i, : len(own_pages)] = own_pages
        own_base = start[:-1] if first_page is None else start[:-1] - first_page
        base[i, : len(own_base)] = own_base
    return PoolView(loc, pages, base)


def _fit(axis: str, have: int, limit: int) -> None:
    if have > limit:
        raise ValueError(f"attention step has {have} {axis}, the compiled shape holds {limit}")


def check_queries(
    rank: RankQueries, page_size: int, window: int | None, full_pages: int, swa_pages: int = 0
) -> None:
    """Index check of one rank's step (D59: never rely on clamping). ``*_pages``: usable pages of the rank's pools.

    Raises ValueError for a slot or page id outside its pool, for page 0 where a live page is needed, and for a page list that
    does not cover the pages the queries see.
    """
    views: list[tuple[Any, ...]] = [
        ("full", rank.full_loc, rank.full_pages, rank.full_page_start, None, full_pages, None)
    ]
    if rank.swa_pages is not None:
        views.append(
            ("swa", rank.swa_loc, rank.swa_pages, rank.swa_page_start, rank.swa_first_page, swa_pages, window)
        )
    for name, loc, pages, start, first, limit, own_window in views:
        for b, seq_len in enumerate(rank.seq_lens.tolist()):
            oldest = seq_len - int(rank.extend_lens[b])
            low = 0 if own_window is None else first_visible(oldest, own_window) // page_size
            begin = 0 if first is None else int(first[b])
            owned = pages[int(start[b]) : int(start[b + 1])]
            high = -(-seq_len // page_size)
            if low < begin or begin + len(owned) < high:
                raise ValueError(
                    f"{name} pages of sequence {b} cover [{begin}, {begin + len(owned)}), queries see [{low}, {high})"
                )
            seen = owned[low - begin : high - begin]
            if len(seen) and (seen.min() < 1 or seen.max() > limit):
                raise ValueError(
                    f"{name} page ids of sequence {b} are outside 1..{limit}: {seen.tolist()[:16]}"
                )
        if len(loc) and (loc.min() < 0 or loc.max() >= (limit + 1) * page_size):
            raise ValueError(f"{name} slots are outside 0..{(limit + 1) * page_size - 1}")
