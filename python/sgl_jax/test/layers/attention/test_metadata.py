"""The block builder against literal tables."""

from __future__ import annotations

import numpy as np
import pytest

from sgl_jax.srt.layers.attention.metadata import (
    AttentionShape,
    build_attention_metadata,
    check_queries,
    query_block_rows,
)
from sgl_jax.test.layers.attention.paged_cases import Queries


def queries(extend, seq, pages_per_seq, swa=None) -> Queries:
    i32 = lambda x: np.array(x, np.int32)  # noqa: E731
    flat = np.arange(1, sum(pages_per_seq) + 1, dtype=np.int32)
    start = np.concatenate([[0], np.cumsum(pages_per_seq)]).astype(np.int32)
    swa = swa or {}
    return Queries(i32(extend), i32(seq), np.arange(1, sum(extend) + 1, dtype=np.int32), flat, start, **swa)


def test_a_block_belongs_to_one_sequence():
    """5 and 2 new tokens behind prefixes of 3 and 0, BQ 4: three blocks, one padding block."""
    meta = build_attention_metadata([queries([5, 2], [8, 2], [2, 1])], AttentionShape(8, 2, 4, 4))
    seq, pos0, rows, tok0 = meta.blocks[0]
    assert seq.tolist() == [0, 0, 1]
    assert pos0.tolist() == [3, 7, 0]
    assert rows.tolist() == [4, 1, 2]
    assert tok0.tolist() == [0, 4, 5]
    # token 4 stands in row 0 of block 1; the padding token 7 points past all 12 block rows
    assert meta.tok_row[0].tolist() == [0, 1, 2, 3, 4, 8, 9, 12]
    assert meta.full.pages[0].tolist() == [1, 2, 3, 0]
    assert meta.full.base[0].tolist() == [0, 2]
    assert meta.full.loc[0].tolist() == [1, 2, 3, 4, 5, 6, 7, 0]
    assert meta.swa is None


def test_decode_is_one_row_per_block():
    meta = build_attention_metadata([queries([1, 1, 1], [7, 1, 20], [1, 1, 2])], AttentionShape(4, 4, 1, 8))
    assert meta.blocks[0].tolist() == [[0, 1, 2, 0], [6, 0, 19, 0], [1, 1, 1, 0], [0, 1, 2, 0]]
    assert meta.tok_row[0].tolist() == [0, 1, 2, 4]


def test_swa_pages_may_start_later():
    """Logical page j of sequence s is pages[base[s] + j]: here sequence 0 lists pages from 5 on, sequence 1 from 0 on."""
    swa = {
        "swa_loc": np.array([9, 17], np.int32),
        "swa_pages": np.array([4, 2, 8], np.int32),
        "swa_page_start": np.array([0, 2, 3], np.int32),
        "swa_first_page": np.array([5, 0], np.int32),
    }
    meta = build_attention_metadata([queries([1, 1], [52, 6], [7, 1], swa)], AttentionShape(2, 2, 1, 8, 4))
    assert meta.swa.base[0].tolist() == [-5, 2]
    assert meta.swa.pages[0, meta.swa.base[0, 0] + 6] == 2
    assert meta.swa.loc[0].tolist() == [9, 17]


def test_ranks_are_stacked_and_an_idle_rank_is_padding():
    idle = queries([], [], [0])
    busy = queries([2], [2], [1])
    meta = build_attention_metadata([idle, busy], AttentionShape(2, 1, 2, 1))
    assert meta.blocks[:, 2].tolist() == [[0], [2]]
    assert meta.tok_row.tolist() == [[2, 2], [0, 1]]
    assert meta.full.loc.tolist() == [[0, 0], [1, 2]]


@pytest.mark.parametrize(
    "shape, axis",
    [
        (AttentionShape(6, 2, 4, 4), "7 tokens, the compiled shape holds 6"),
        (AttentionShape(8, 1, 4, 4), "2 seqs, the compiled shape holds 1"),
        (AttentionShape(8, 2, 4, 2), "3 full_pages, the compiled shape holds 2"),
    ],
)
def test_a_step_that_does_not_fit_is_refused_by_axis(shape, axis):
    with pytest.raises(ValueError, match=axis):
        build_attention_metadata([queries([5, 2], [8, 2], [2, 1])], shape)


@pytest.mark.parametrize(
    "tokens, seqs, rows, blocks",
    [(64, 64, 1, 64), (8, 2, 4, 3), (320, 4, 64, 8), (1, 1, 64, 1), (65, 1, 64, 2)],
)
def test_block_bound(tokens, seqs, rows, blocks):
    assert AttentionShape(tokens, seqs, rows, 1).blocks == blocks


@pytest.mark.parametrize("longest, rows", [(1, 1), (2, 2), (5, 8), (64, 64), (5000, 64)])
def test_query_block_rows(longest, rows):
    assert query_block_rows(longest) == rows


@pytest.mark.parametrize(
    "change, message",
    [
        ({"full_loc": np.array([4 * 8], np.int32)}, r"full slots are outside 0\.\.31"),
        ({"full_pages": np.array([1, 9, 2], np.int32)}, r"full page ids of sequence 0 are outside 1\.\.3"),
        ({"full_pages": np.array([1, 0, 2], np.int32)}, r"outside 1\.\.3"),
        ({"full_page_start": np.array([0, 2], np.int32)}, r"cover \[0, 2\), queries see \[0, 3\)"),
    ],
)
def test_check_queries_names_what_is_wrong(change, message):
    """D59: array indices are checked, not clamped."""
    fields = {
        "extend_lens": np.array([1], np.int32),
        "seq_lens": np.array([20], np.int32),
        "full_loc": np.array([19], np.int32),
        "full_pages": np.array([1, 3, 2], np.int32),
        "full_page_start": np.array([0, 3], np.int32),
    }
    check_queries(Queries(**fields), 8, None, 3)
    with pytest.raises(ValueError, match=message):
        check_queries(Queries(**{**fields, **change}), 8, None, 3)


def test_check_queries_wants_the_window_covered():
    """Position 19, W = 4: keys 16..19, page 2 of 8. A list that starts at page 3 would not hold them."""
    swa = {
        "swa_loc": np.array([9], np.int32),
        "swa_pages": np.array([1], np.int32),
        "swa_page_start": np.array([0, 1], np.int32),
        "swa_first_page": np.array([2], np.int32),
    }
    check_queries(queries([1], [20], [3], swa), 8, 4, 3, 1)
    late = {**swa, "swa_first_page": np.array([3], np.int32)}
    with pytest.raises(ValueError, match=r"swa pages of sequence 0 cover \[3, 4\), queries see \[2, 3\)"):
        check_queries(queries([1], [20], [3], late), 8, 4, 3, 1)
