"""Turns chosen seats into the arrays of a step. Every array handed out is a fresh copy (D33, rule 9)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt

from sgl_jax.srt.managers.batch import NO_ROWS, Batch, ExtendRow, RankRows
from sgl_jax.srt.managers.kv_memory import KVMemory
from sgl_jax.srt.managers.paging import PageList, full_pages, swa_pages
from sgl_jax.srt.managers.request import Req
from sgl_jax.srt.managers.roster import Roster
from sgl_jax.srt.managers.sampling_rows import sampling_inputs
from sgl_jax.srt.managers.seats import RankSeats
from sgl_jax.srt.model_executor.forward_inputs import (
    ForwardMode,
    RankInputs,
    SamplingInputs,
    StepInputs,
    empty_rank,
)

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]

_UNWANTED = -1


class BatchBuilder:
    """Builds :class:`Batch` from rows whose slots are already allocated and written to the request rows."""

    def __init__(self, roster: Roster, memory: KVMemory, window: int | None) -> None:
        self._roster = roster
        self._memory = memory
        self._window = window if memory.hybrid else None
        self._idle = empty_rank(self._window is not None)

    # ------------------------------------------------------------------------------------------------------------- extend
    def extend(self, rows_by_rank: Sequence[Sequence[ExtendRow]]) -> Batch:
        """An extend step: per rank, the rows in launch order."""
        ranks, inputs = [], []
        for rank, rows in enumerate(rows_by_rank):
            if not rows:
                ranks.append(NO_ROWS)
                inputs.append(self._idle)
                continue
            seats = np.array([row.req.seat for row in rows], np.int64)
            ends = np.array([row.end for row in rows], np.int32)
            table = self._roster.seats[rank]
            ranks.append(RankRows(seats, table.generation[seats], ends, tuple(rows)))
            inputs.append(self._extend_inputs(rank, table, rows, seats, ends))
        return self._batch(ForwardMode.EXTEND, ranks, inputs)

    def _extend_inputs(
        self, rank: int, table: RankSeats, rows: Sequence[ExtendRow], seats: Int64, ends: Int32
    ) -> RankInputs:
        starts = np.array([row.start for row in rows], np.int32)
        lens = ends - starts
        positions = np.concatenate([np.arange(row.start, row.end, dtype=np.int32) for row in rows])
        row_ids = table.row[seats]
        loc = self._memory.table[np.repeat(row_ids, lens), positions]
        return self._rank_inputs(
            rank,
            req_at=lambda row: rows[row].req,
            input_ids=np.concatenate([row.req.tokens(row.start, row.end) for row in rows]),
            positions=positions,
            starts=starts,
            seq_lens=ends,
            loc=loc,
            row_ids=row_ids,
            sampling=sampling_inputs(table, seats, [row.req for row in rows]),
            targets=_logprob_targets(rows),
        )

    # ------------------------------------------------------------------------------------------------------------- decode
    def decode(self, chosen: Sequence[Int64], locs: Sequence[Int32], flight: int) -> Batch:
        """A decode step. ``chosen`` and ``locs`` per rank: seats and the slot of each seat's new token.

        ``flight``: number of the launched step whose result is pending, or -1; its rows feed this step on the device.
        """
        ranks, inputs = [], []
        for rank, seats in enumerate(chosen):
            if not len(seats):
                ranks.append(NO_ROWS)
                inputs.append(self._idle)
                continue
            table = self._roster.seats[rank]
            ends = table.length[seats]
            ranks.append(RankRows(seats, table.generation[seats], ends))
            pending = table.flight_step[seats] == flight if flight >= 0 else None
            future = None
            if pending is not None and pending.any():
                future = np.where(pending, table.flight_row[seats], np.int32(-1))
            inputs.append(
                self._rank_inputs(
                    rank,
                    req_at=partial(_seated, table, seats),
                    input_ids=table.last_token[seats],
                    positions=ends - 1,
                    starts=ends - 1,
                    seq_lens=ends,
                    loc=locs[rank],
                    row_ids=table.row[seats],
                    sampling=sampling_inputs(table, seats),
                    future=future,
                )
            )
        return self._batch(ForwardMode.DECODE, ranks, inputs)

    # ------------------------------------------------------------------------------------------------------------- shared
    def _rank_inputs(
        self,
        rank: int,
        *,
        req_at: Callable[[int], Req | None],
        input_ids: Int32,
        positions: Int32,
        starts: Int32,
        seq_lens: Int32,
        loc: Int32,
        row_ids: Int64,
        sampling: SamplingInputs,
        future: Int32 | None = None,
        targets: Int32 | None = None,
    ) -> RankInputs:
        memory = self._memory
        full = full_pages(memory, row_ids, seq_lens)
        swa: PageList | None = None
        if self._window is not None:
            swa = swa_pages(memory, rank, row_ids, starts, seq_lens, self._window, req_at)
        return RankInputs(
            input_ids=input_ids,
            positions=positions,
            extend_lens=seq_lens - starts,
            seq_lens=seq_lens,
            full_loc=loc,
            full_pages=full.pages,
            full_page_start=full.start,
            sampling=sampling,
            swa_loc=None if swa is None else memory.swa_slots(loc, rank),
            swa_pages=None if swa is None else swa.pages,
            swa_page_start=None if swa is None else swa.start,
            swa_first_page=None if swa is None else swa.first,
            future_rows=future,
            logprob_targets=targets,
        )

    def _batch(self, mode: ForwardMode, ranks: list[RankRows], inputs: list[RankInputs]) -> Batch:
        wants = top = 0
        for table, rows in zip(self._roster.seats, ranks, strict=True):
            if len(rows) and table.logprobs[rows.seats].any():
                wants = 1
                top = max(top, int(table.top_logprobs[rows.seats].max()))
        step = StepInputs(mode, tuple(inputs), return_logprobs=bool(wants), top_logprobs=top)
        return Batch(mode, tuple(ranks), step)


def _seated(table: RankSeats, seats: Int64, row: int) -> Req | None:
    return table.reqs[int(seats[row])]


def _logprob_targets(rows: Sequence[ExtendRow]) -> Int32 | None:
    """Next-token id per query token where a prompt logprob is wanted, -1 elsewhere; None when nobody wants any.

    The query at position q predicts the prompt token at q + 1, so a row that wants positions from s on uses q >= s - 1.
    """
    if not any(row.req.wants_input_logprobs and not row.req.input_logprobs_complete for row in rows):
        return None
    parts = []
    for row in rows:
        part = np.full(row.end - row.start, _UNWANTED, np.int32)
        req = row.req
        if req.wants_input_logprobs and not req.input_logprobs_complete:
            prompt = len(req.origin_input_ids)
            first = max(row.start, req.logprob_start_len - 1, 0)
            last = min(row.end, prompt - 1)
            if first < last:
                part[first - row.start : last - row.start] = req.tokens(first + 1, last + 1)
        parts.append(part)
    return np.concatenate(parts)
