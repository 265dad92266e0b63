"""Which padded shapes exist, and how a step is padded to one of them.

A decode step is padded to a batch bucket ``S`` (one token per row), an extend step to a pair ``(T tokens, S sequences)``; the
lengths of the flat page lists follow from the bucket and the pools, so that a server compiles a handful of shapes::

    decode  S in bs_paddings
    extend  (T, S) for T in token_paddings; a small T comes with a small S, the last T with the largest S

A page list that outgrows its bucket (heavy prefix sharing: many rows listing the same pages) takes the next power of two;
that shape is compiled when it is first needed. Padding tokens carry slot 0, hence write to slot 0 of page 0; padding
blocks have no rows and read nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from sgl_jax.srt.layers.attention.metadata import (
    AttentionMetadata,
    AttentionShape,
    build_attention_metadata,
    query_block_rows,
)
from sgl_jax.srt.mem_cache.page import num_pages
from sgl_jax.srt.model_executor.forward_inputs import (
    ForwardMode,
    Int32,
    RankInputs,
    StepInputs,
    empty_rank,
)

_CPU_TOKEN_LADDER = (64, 512)
_CPU_BATCH_LADDER = (8, 32)
_DEVICE_TOKEN_LADDER = (128, 512, 1024, 2048, 4096, 8192)
_DEVICE_BATCH_LADDER = (8, 16, 32, 64, 128, 256)


class StepTooLargeError(ValueError):
    """A step exceeds the worker's limits; the message names the axis, its size and the limit."""


@dataclass(frozen=True, slots=True)
class StepShape:
    """One compiled bucket. ``tokens`` == ``seqs`` for decode."""

    mode: ForwardMode
    tokens: int
    seqs: int

    def __str__(self) -> str:
        if self.mode.is_decode():
            return f"decode rows={self.seqs}"
        return f"extend tokens={self.tokens} rows={self.seqs}"


@dataclass(frozen=True, slots=True)
class PageGeometry:
    """What bounds the page lists of a step. ``swa_pages_per_rank`` 0 = one pool; pages are usable ones, page 0 not counted."""

    page_size: int
    context_len: int
    full_pages_per_rank: int
    swa_pages_per_rank: int = 0
    window: int = 0


class ForwardArrays(NamedTuple):
    """A padded step on the host; ranks are stacked on axis 0. Every array is new (D33).

    ``input_ids``, ``positions``, ``future_rows`` [dp, T]; ``out_rows`` [dp, S]: token index of each sequence's last token;
    ``logprob_targets`` [dp, T] or None.
    """

    input_ids: Int32
    positions: Int32
    future_rows: Int32
    out_rows: Int32
    attention: AttentionMetadata
    logprob_targets: Int32 | None = None


class PaddingTable:
    """The bounded set of step shapes of one worker."""

    def __init__(self, decode: Sequence[int], extend: Sequence[tuple[int, int]]) -> None:
        """``decode`` ascending batch buckets; ``extend`` pairs (tokens, sequences), ascending in both."""
        self.decode = tuple(decode)
        self.extend = tuple(extend)

    @property
    def max_batch(self) -> int:
        return self.decode[-1]

    @property
    def max_extend_tokens(self) -> int:
        return self.extend[-1][0]

    def shapes(self) -> list[StepShape]:
        """All shapes, cheapest first."""
        decode = [StepShape(ForwardMode.DECODE, rows, rows) for rows in self.decode]
        return decode + [StepShape(ForwardMode.EXTEND, tokens, rows) for tokens, rows in self.extend]

    def select(self, mode: ForwardMode, tokens: int, seqs: int) -> StepShape:
        """Smallest shape that holds ``tokens`` and ``seqs`` (the largest over the ranks).

        Raises:
            StepTooLargeError: naming the limit that is exceeded.
        """
        if mode.is_decode():
            for rows in self.decode:
                if tokens <= rows and seqs <= rows:
                    return StepShape(mode, rows, rows)
        else:
            for most_tokens, rows in self.extend:
                if tokens <= most_tokens and seqs <= rows:
                    return StepShape(mode, most_tokens, rows)
        limit = self.max_batch if mode.is_decode() else self.max_extend_tokens
        raise StepTooLargeError(
            f"a {mode.name} step of {tokens} tokens in {seqs} sequences exceeds {limit} tokens or {self.max_batch} "
            "sequences per rank; see --chunked-prefill-size and --max-running-requests"
        )


def _ladder(given: Sequence[int] | None, default: Sequence[int], limit: int, flag: str) -> list[int]:
    """Buckets below ``limit`` plus ``limit`` itself."""
    buckets = sorted(set(default if given is None else given))
    if given is not None and (not buckets or buckets[0] < 1 or buckets[-1] > limit):
        raise ValueError(f"{flag} {list(given)}: values must lie in 1..{limit}")
    return [b for b in buckets if b < limit] + [limit]


def build_padding_table(
    max_batch: int,
    max_extend_tokens: int,
    *,
    token_paddings: Sequence[int] | None = None,
    bs_paddings: Sequence[int] | None = None,
    on_cpu: bool = True,
) -> PaddingTable:
    """Shapes for a worker that takes up to ``max_batch`` sequences and ``max_extend_tokens`` new tokens per rank and step.

    ``token_paddings`` / ``bs_paddings``: the flags' values; the limits themselves are always added. Defaults: tokens
    64, 512 and the limit, rows 8, 32 and the limit on CPU (at most six shapes); a longer ladder on accelerators, where padding costs
    more than compiling.

    Raises:
        ValueError: a padding outside ``1..limit``, naming its flag.
    """
    tokens = _ladder(
        token_paddings,
        _CPU_TOKEN_LADDER if on_cpu else _DEVICE_TOKEN_LADDER,
        max_extend_tokens,
        "--precompile-token-paddings",
    )
    rows = _ladder(
        bs_paddings,
        _CPU_BATCH_LADDER if on_cpu else _DEVICE_BATCH_LADDER,
        max_batch,
        "--precompile-bs-paddings",
    )
    extend = []
    for padded in tokens:
        fitting = [r for r in rows if r * 8 >= padded]
        extend.append((padded, fitting[0] if fitting and padded != tokens[-1] else max_batch))
    return PaddingTable(rows, extend)


def _power_of_two(value: int) -> int:
    return 1 << max(0, value - 1).bit_length()


def _list_length(bucket: int, needed: int) -> int:
    return bucket if needed <= bucket else _power_of_two(needed)


def attention_shape(shape: StepShape, geometry: PageGeometry, ranks: Sequence[RankInputs]) -> AttentionShape:
    """Compiled attention sizes for ``ranks`` (empty = the bucket's own, used for precompilation)."""
    page = geometry.page_size
    per_row = num_pages(geometry.context_len, page)
    full = min(shape.seqs * per_row, _power_of_two(geometry.full_pages_per_rank))
    swa = 0
    if geometry.swa_pages_per_rank:
        # A row's queries see their own tokens' pages and the window before them; both ends may cut a page.
        own = shape.tokens // page + shape.seqs * (num_pages(geometry.window, page) + 2)
        swa = min(own, shape.seqs * per_row)
        swa = _list_length(swa, max((len(r.swa_pages) for r in ranks if r.swa_pages is not None), default=0))
    return AttentionShape(
        tokens=shape.tokens,
        seqs=shape.seqs,
        block_rows=1 if shape.mode.is_decode() else query_block_rows(shape.tokens),
        full_pages=_list_length(full, max((len(r.full_pages) for r in ranks), default=0)),
        swa_pages=swa,
    )


def pad_rows(values: Sequence[np.ndarray], width: int, fill: float) -> np.ndarray:
    """Stack one array per rank into ``[ranks, width]``, padded with ``fill``; dtype of the first."""
    out = np.full((len(values), width), fill, values[0].dtype)
    for row, value in zip(out, values):
        row[: len(value)] = value
    return out


def pad_step(step: StepInputs, shape: StepShape, attention: AttentionShape) -> ForwardArrays:
    """Pad ``step`` to ``shape``. Pure: reads the step's arrays, returns new ones.

    Raises:
        ValueError: a rank does not fit (``shape`` must come from :meth:`PaddingTable.select`).
    """
    ranks = step.ranks
    targets = None
    if any(r.logprob_targets is not None for r in ranks):
        wanted = [
            np.full(len(r.input_ids), -1, np.int32) if r.logprob_targets is None else r.logprob_targets
            for r in ranks
        ]
        targets = pad_rows(wanted, shape.tokens, -1)
    futures = [
        np.empty(0, np.int32) if r.future_rows is None else r.future_rows for r in ranks
    ]  # a short row is padded with -1: "take input_ids"
    last = [np.cumsum(r.extend_lens, dtype=np.int32) - np.int32(1) for r in ranks]
    return ForwardArrays(
        input_ids=pad_rows([r.input_ids for r in ranks], shape.tokens, 0),
        positions=pad_rows([r.positions for r in ranks], shape.tokens, 0),
        future_rows=pad_rows(futures, shape.tokens, -1),
        out_rows=pad_rows(last, shape.seqs, 0),
        attention=build_attention_metadata(ranks, attention),
        logprob_targets=targets,
    )


def empty_step(mode: ForwardMode, dp_size: int, hybrid: bool) -> StepInputs:
    """A step of idle ranks."""
    return StepInputs(mode, (empty_rank(hybrid),) * dp_size)
