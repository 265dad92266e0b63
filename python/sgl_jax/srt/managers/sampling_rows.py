"""Sampling parameters of a rank's rows, gathered from the seats; history and bias only when some row needs them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from sgl_jax.srt.managers.request import Req
from sgl_jax.srt.managers.seats import RankSeats
from sgl_jax.srt.model_executor.forward_inputs import PenaltyInputs, SamplingInputs

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Float32 = npt.NDArray[np.float32]

_PAD = -1


def _padded(lists: Sequence[Sequence[int]]) -> Int32:
    """[B, longest] int32, padded with -1."""
    width = max((len(ids) for ids in lists), default=0)
    out = np.full((len(lists), width), _PAD, np.int32)
    for row, ids in enumerate(lists):
        out[row, : len(ids)] = ids
    return out


def penalty_inputs(reqs: Sequence[Req]) -> PenaltyInputs:
    """Penalties and token history; needs every output token of the rows on the host."""
    sampling = [req.sampling_params for req in reqs]
    return PenaltyInputs(
        frequency=np.array([s.frequency_penalty for s in sampling], np.float32),
        presence=np.array([s.presence_penalty for s in sampling], np.float32),
        repetition=np.array([s.repetition_penalty for s in sampling], np.float32),
        output_ids=_padded([req.output_ids for req in reqs]),
        prompt_ids=_padded([req.origin_input_ids for req in reqs]),
    )


def _bias_of(req: Req, produced: int) -> dict[int, float]:
    """Additive bias of the next token; ends are forbidden while fewer than ``min_new_tokens`` were produced."""
    sampling = req.sampling_params
    bias = dict(sampling.logit_bias)
    if produced < sampling.min_new_tokens:
        ends = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else set(req.eos_token_ids))
        bias.update(dict.fromkeys(sorted(ends), float("-inf")))
    return bias


def bias_inputs(reqs: Sequence[Req], produced: Sequence[int]) -> tuple[Int32, Float32] | None:
    """``(ids [B, K], values [B, K])`` padded with id -1; None when no row has a bias right now."""
    rows = [_bias_of(req, count) for req, count in zip(reqs, produced, strict=True)]
    width = max((len(row) for row in rows), default=0)
    if width == 0:
        return None
    ids = np.full((len(rows), width), _PAD, np.int32)
    values = np.zeros((len(rows), width), np.float32)
    for at, row in enumerate(rows):
        ids[at, : len(row)] = list(row)
        values[at, : len(row)] = list(row.values())
    return ids, values


def sampling_inputs(seats: RankSeats, chosen: Int64, reqs: Sequence[Req] | None = None) -> SamplingInputs:
    """Rows of the chosen seats, each [B]; fancy indexing copies, so that nobody mutates a launched step's arrays."""
    bias = penalties = None
    if seats.biased[chosen].any() or seats.penalised[chosen].any():
        rows = reqs if reqs is not None else [_present(seats, int(seat)) for seat in chosen]
        # This step's token is out of the budget already.
        produced = seats.max_new[chosen] - seats.budget[chosen] - 1
        bias = bias_inputs(rows, produced.tolist())
        penalties = penalty_inputs(rows) if seats.penalised[chosen].any() else None
    return SamplingInputs(
        temperature=seats.temperature[chosen],
        top_p=seats.top_p[chosen],
        top_k=seats.top_k[chosen],
        min_p=seats.min_p[chosen],
        seed=seats.seed[chosen],
        bias_ids=None if bias is None else bias[0],
        bias_values=None if bias is None else bias[1],
        penalties=penalties,
    )


def _present(seats: RankSeats, seat: int) -> Req:
    req = seats.reqs[seat]
    if req is None:
        raise RuntimeError(f"seat {seat} is in a batch but nobody sits there")
    return req
