"""Padding: the table of shapes, page-list widths, padded arrays, packing."""

import numpy as np
import pytest

from sgl_jax.srt.model_executor import packing
from sgl_jax.srt.model_executor.forward_inputs import ForwardMode, RankInputs, SamplingInputs, StepInputs
from sgl_jax.srt.model_executor.padding import (
    PageGeometry,
    StepShape,
    StepTooLargeError,
    attention_shape,
    build_padding_table,
    pad_step,
)

EXTEND, DECODE = ForwardMode.EXTEND, ForwardMode.DECODE


def i32(*values):
    return np.array(values, np.int32)


def sampling(rows):
    zeros = np.zeros(rows, np.float32)
    return SamplingInputs(zeros, zeros + 1, np.zeros(rows, np.int32), zeros, np.zeros(rows, np.uint32))


def rank(extend=(2, 1), seq=(5, 1), pages=(3, 4, 5), start=(0, 2, 3), **more):
    total = sum(extend)
    return RankInputs(
        input_ids=np.arange(10, 10 + total, dtype=np.int32),
        positions=i32(*(p for e, s in zip(extend, seq) for p in range(s - e, s))),
        extend_lens=i32(*extend),
        seq_lens=i32(*seq),
        full_loc=np.arange(30, 30 + total, dtype=np.int32),
        full_pages=i32(*pages),
        full_page_start=i32(*start),
        sampling=sampling(len(extend)),
        **more,
    )


IDLE = rank(extend=(), seq=(), pages=(), start=(0,))


def test_default_cpu_table_is_small():
    table = build_padding_table(64, 4096)
    assert table.decode == (8, 32, 64)
    assert table.extend == ((64, 8), (512, 64), (4096, 64))
    assert [str(s) for s in table.shapes()] == [
        "decode rows=8",
        "decode rows=32",
        "decode rows=64",
        "extend tokens=64 rows=8",
        "extend tokens=512 rows=64",
        "extend tokens=4096 rows=64",
    ]


@pytest.mark.parametrize(
    ("max_batch", "max_tokens", "decode", "extend"),
    [
        (4, 32, (4,), ((32, 4),)),
        (16, 512, (8, 16), ((64, 8), (512, 16))),
        (256, 2048, (8, 32, 256), ((64, 8), (512, 256), (2048, 256))),
        (1, 1, (1,), ((1, 1),)),
    ],
)
def test_table_for_limits(max_batch, max_tokens, decode, extend):
    table = build_padding_table(max_batch, max_tokens)
    assert (table.decode, table.extend) == (decode, extend)
    assert (table.max_batch, table.max_extend_tokens) == (max_batch, max_tokens)


def test_given_paddings_are_used_and_checked():
    table = build_padding_table(32, 256, token_paddings=[16, 100], bs_paddings=[2, 32])
    assert table.decode == (2, 32)
    assert table.extend == ((16, 2), (100, 32), (256, 32))
    with pytest.raises(
        ValueError, match=r"--precompile-token-paddings \[16, 300\]: values must lie in 1..256"
    ):
        build_padding_table(32, 256, token_paddings=[16, 300])
    with pytest.raises(ValueError, match="--precompile-bs-paddings"):
        build_padding_table(32, 256, bs_paddings=[0])


@pytest.mark.parametrize(
    ("mode", "tokens", "seqs", "shape"),
    [
        (DECODE, 1, 1, StepShape(DECODE, 8, 8)),
        (DECODE, 9, 9, StepShape(DECODE, 32, 32)),
        (EXTEND, 64, 8, StepShape(EXTEND, 64, 8)),
        (EXTEND, 64, 9, StepShape(EXTEND, 512, 64)),
        (EXTEND, 65, 1, StepShape(EXTEND, 512, 64)),
        (EXTEND, 4096, 1, StepShape(EXTEND, 4096, 64)),
    ],
)
def test_select(mode, tokens, seqs, shape):
    assert build_padding_table(64, 4096).select(mode, tokens, seqs) == shape


def test_select_refuses_by_name():
    table = build_padding_table(64, 4096)
    with pytest.raises(
        StepTooLargeError, match=r"4097 tokens in 1 sequences exceeds 4096 .*--chunked-prefill-size"
    ):
        table.select(EXTEND, 4097, 1)
    with pytest.raises(StepTooLargeError, match="65 sequences"):
        table.select(DECODE, 65, 65)


@pytest.mark.parametrize(
    ("page", "full", "swa"),
    [(1, 1024, 8 + 8 * 34), (128, 8, 24), (256, 4, 24)],
)
def test_page_list_lengths(page, full, swa):
    """FULL lists are bounded by the pool (rounded up), SWA lists by the window; context 700, window 32, 8 rows."""
    geometry = PageGeometry(page, 700, -(-1024 // page), -(-512 // page), 32)
    shape = attention_shape(StepShape(DECODE, 8, 8), geometry, [])
    assert (shape.full_pages, shape.swa_pages) == (full, swa)
    assert (shape.tokens, shape.seqs, shape.block_rows) == (8, 8, 1)


def test_page_list_grows_by_powers_of_two_when_sharing_needs_it():
    geometry = PageGeometry(1, 4096, 64)
    crowded = rank(extend=(1, 1), seq=(60, 60), pages=range(1, 121), start=(0, 60, 120))
    assert attention_shape(StepShape(DECODE, 8, 8), geometry, []).full_pages == 64
    assert attention_shape(StepShape(DECODE, 8, 8), geometry, [crowded]).full_pages == 128


def test_pad_step():
    shape = StepShape(EXTEND, 6, 4)
    geometry = PageGeometry(4, 16, 8)
    step = StepInputs(EXTEND, (rank(logprob_targets=i32(7, 8, -1)), IDLE))
    out = pad_step(step, shape, attention_shape(shape, geometry, step.ranks))
    assert out.input_ids.tolist() == [[10, 11, 12, 0, 0, 0], [0] * 6]
    assert out.positions.tolist() == [[3, 4, 0, 0, 0, 0], [0] * 6]
    assert out.future_rows.tolist() == [[-1] * 6, [-1] * 6]
    assert out.out_rows.tolist() == [[1, 2, 0, 0], [0, 0, 0, 0]]
    assert out.logprob_targets.tolist() == [[7, 8, -1, -1, -1, -1], [-1] * 6]
    assert out.attention.full.loc.tolist() == [[30, 31, 32, 0, 0, 0], [0] * 6]
    assert out.attention.blocks[1, 2].max() == 0  # the idle rank has no live block row


def test_padded_arrays_are_copies():
    """D33: a launched step must not see a later change of the scheduler's arrays."""
    source = rank()
    step = StepInputs(EXTEND, (source,))
    shape = StepShape(EXTEND, 3, 2)  # no padding needed at all
    arrays = pad_step(step, shape, attention_shape(shape, PageGeometry(4, 16, 8), step.ranks))
    buffer, _ = packing.pack(arrays)
    for name in ("input_ids", "positions", "full_loc", "full_pages", "seq_lens"):
        assert not np.shares_memory(buffer, getattr(source, name))
        assert not np.shares_memory(arrays.input_ids, getattr(source, name))


def test_pack_roundtrip():
    tree = {
        "f": np.array([[1.5, -np.inf], [0.0, np.nan]], np.float32),
        "i": np.arange(12, dtype=np.int32).reshape(2, 2, 3),
        "none": None,
        "u": np.array([[2**32 - 1], [3]], np.uint32),
    }
    buffer, spec = packing.pack(tree)
    assert buffer.shape == (2, 2 + 6 + 1)
    again, same = packing.pack(tree)
    assert spec == same and hash(spec) == hash(same) and np.array_equal(buffer, again)
    out = packing.unpack(buffer, spec)
    assert out["none"] is None
    for name in ("f", "i", "u"):
        assert out[name].dtype == tree[name].dtype
        np.testing.assert_array_equal(np.asarray(out[name]), tree[name])


def test_pack_refuses_other_widths():
    with pytest.raises(TypeError, match="32-bit, got int64"):
        packing.pack({"a": np.zeros((1, 2), np.int64)})
