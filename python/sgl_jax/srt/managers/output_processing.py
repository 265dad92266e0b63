"""What a finished step means for its requests: tokens, logprobs, ends, and what enters the cache.

Runs inside one free group. Rows whose seat changed hands since the launch are dropped: they are the tokens with which overlap
outran a request's end, or steps of a request that was aborted meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from sgl_jax.srt.managers.batch import ExtendRow, LaunchedStep, RankRows
from sgl_jax.srt.managers.finish import StopStrings, finish_reason
from sgl_jax.srt.managers.io_struct import FinishReason
from sgl_jax.srt.managers.kv_memory import KVMemory
from sgl_jax.srt.managers.lifecycle import Lifecycle
from sgl_jax.srt.managers.request import Req
from sgl_jax.srt.managers.roster import Roster
from sgl_jax.srt.managers.seats import RankSeats
from sgl_jax.srt.managers.stats import Counters
from sgl_jax.srt.model_executor.forward_inputs import RankResult

Bool = npt.NDArray[np.bool_]
Int32 = npt.NDArray[np.int32]

Top = list[tuple[float, int]]


class OutputProcessor:
    """Applies step results. ``eos_ids`` are the model's; requests may ignore them."""

    def __init__(
        self,
        roster: Roster,
        memory: KVMemory,
        lifecycle: Lifecycle,
        counters: Counters,
        stops: StopStrings,
        eos_ids: Iterable[int],
        vocab_size: int,
    ) -> None:
        self._roster = roster
        self._memory = memory
        self._lifecycle = lifecycle
        self._counters = counters
        self._stops = stops
        self._is_eos: Bool = np.zeros(vocab_size, np.bool_)
        for token in eos_ids:
            if 0 <= token < vocab_size:
                self._is_eos[token] = True

    def process(self, step: LaunchedStep) -> None:
        """Wait for the step and apply it. New tokens and ends are in the lifecycle's outbox afterwards."""
        result = step.handle.result()
        with self._memory.free_group():
            for rank, rows in enumerate(step.batch.ranks):
                if not len(rows):
                    continue
                if step.batch.mode.is_extend():
                    self._extend_rank(rank, rows, result.ranks[rank])
                else:
                    self._decode_rank(rank, rows, result.ranks[rank])

    # ------------------------------------------------------------------------------------------------------------- decode
    def _decode_rank(self, rank: int, rows: RankRows, result: RankResult) -> None:
        table = self._roster.seats[rank]
        seats, ends, tokens = rows.seats, rows.ends, result.next_token_ids
        at = np.arange(len(seats))
        live = table.generation[seats] == rows.generations
        if not live.all():
            at = np.flatnonzero(live)
            seats, ends, tokens = seats[at], ends[at], tokens[at]
        table.processed[seats] = ends
        table.last_token[seats] = tokens
        generated = table.generated[seats] + 1
        table.generated[seats] = generated
        self._counters.generation_tokens[rank] += len(seats)
        reqs = table.reqs
        for seat, token in zip(seats.tolist(), tokens.tolist()):
            reqs[seat].output_ids.append(token)
        ends_now = (generated >= table.max_new[seats]) | (
            self._is_eos[tokens] & table.heeds_eos[seats] & (generated >= table.min_new[seats])
        )
        look = ends_now | table.attention[seats]
        for i in np.flatnonzero(look | table.streams[seats]).tolist():
            req = reqs[int(seats[i])]
            if req is None:
                continue
            if not look[i]:
                self._lifecycle.outbox.append(self._lifecycle.token_out(req, None))
                continue
            if req.return_logprob:
                _add_output_logprob(req, result, int(at[i]))
            self._report(req, finish_reason(req, self._stops))

    def _report(self, req: Req, reason: FinishReason | None) -> None:
        if reason is not None:
            self._lifecycle.finish(req, reason)
        elif req.stream:
            self._lifecycle.outbox.append(self._lifecycle.token_out(req, None))

    # ------------------------------------------------------------------------------------------------------------- extend
    def _extend_rank(self, rank: int, rows: RankRows, result: RankResult) -> None:
        table = self._roster.seats[rank]
        offset = 0
        for at, row in enumerate(rows.extend):
            queries = slice(offset, offset + row.end - row.start)
            offset = queries.stop
            seat = int(rows.seats[at])
            if table.generation[seat] != rows.generations[at]:
                continue
            table.processed[seat] = row.end
            if not row.req.input_logprobs_complete:
                _add_input_logprobs(row, result, queries)
            if row.req.to_finish is not None:
                self._lifecycle.finish(row.req, row.req.to_finish)
            elif row.samples:
                self._first_token(rank, row.req, table, result, at)

    def _first_token(self, rank: int, req: Req, table: RankSeats, result: RankResult, at: int) -> None:
        """The prompt is computed: its first sampled token, then the prompt enters the cache::

        [0, fill)              offered to the cache; the row is re-pointed to what it keeps
        [fill, kv_allocated)   request-owned (a decode step that was launched meanwhile)
        """
        seat = req.seat
        reason: FinishReason | None
        if req.max_new_tokens == 0:
            reason = FinishReason(type="length")
        else:
            token = int(result.next_token_ids[at])
            req.output_ids.append(token)
            table.last_token[seat] = token
            table.generated[seat] += 1
            self._counters.generation_tokens[rank] += 1
            if req.return_logprob:
                _add_output_logprob(req, result, at)
            reason = finish_reason(req, self._stops)
        if reason is not None:
            self._lifecycle.finish(req, reason)
            return
        table.settle(req)
        self._memory.store_unfinished(req)
        table.reread(req)
        self._lifecycle.outbox.append(self._lifecycle.token_out(req, None))


# ---------------------------------------------------------------------------------------------------------------- logprobs
def _top(values: Any, ids: Any, count: int) -> Top:
    return list(zip(values[:count].tolist(), ids[:count].tolist()))


def _add_output_logprob(req: Req, result: RankResult, at: int) -> None:
    if result.logprobs is None:
        raise RuntimeError(f"request {req.rid} wants logprobs, but its step was launched without")
    req.output_logprobs.append(float(result.logprobs[at]))
    if req.top_logprobs_num and result.top_values is not None and result.top_ids is not None:
        req.output_top.append(_top(result.top_values[at], result.top_ids[at], req.top_logprobs_num))


def _add_input_logprobs(row: ExtendRow, result: RankResult, queries: slice) -> None:
    """Prompt logprobs of one chunk: the query at q speaks about position q + 1; position 0 has none."""
    req = row.req
    prompt, first = len(req.origin_input_ids), req.logprob_start_len
    if first == 0 and row.start == 0:
        req.input_logprobs.append(None)
        req.input_top.append(None)
    for q in range(max(row.start, first - 1, 0), min(row.end, prompt - 1)):
        at = queries.start + q - row.start
        if result.input_logprobs is None:
            raise RuntimeError(f"request {req.rid} wants prompt logprobs, but its step was launched without")
        req.input_logprobs.append(float(result.input_logprobs[at]))
        if result.input_top_values is not None and result.input_top_ids is not None:
            req.input_top.append(
                _top(result.input_top_values[at], result.input_top_ids[at], req.top_logprobs_num)
            )
    if row.end >= prompt:
        req.input_logprobs_complete = True
