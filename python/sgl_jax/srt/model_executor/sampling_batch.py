"""From the scheduler's per-rank sampling parameters to one padded tree, and to the cheapest compiled sampler that fits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sgl_jax.srt.model_executor.forward_inputs import Float32, Int32, PenaltyInputs, RankInputs, StepInputs
from sgl_jax.srt.model_executor.padding import pad_rows
from sgl_jax.srt.model_executor.sampler import (
    BiasArrays,
    PenaltyArrays,
    SampleKind,
    SamplingArrays,
    top_logprobs_bucket,
)

_LEAST_HISTORY = 64
_LEAST_BIAS = 8


@dataclass(frozen=True, slots=True)
class SampleVariant:
    """Static part of a sampling call. ``top_logprobs`` is a bucket, not the exact number asked for."""

    kind: SampleKind
    logprobs: bool = False
    top_logprobs: int = 0


def choose_variant(step: StepInputs, vocab_size: int) -> SampleVariant:
    """Cheapest variant that serves every row of ``step``."""
    kind = max((_rank_kind(r) for r in step.ranks), default=SampleKind.GREEDY)
    if not step.return_logprobs:
        return SampleVariant(kind)
    return SampleVariant(kind, True, top_logprobs_bucket(step.top_logprobs, vocab_size))


def _rank_kind(rank: RankInputs) -> SampleKind:
    params = rank.sampling
    drawn = (params.temperature > 0) & (params.top_k != 1)
    if not drawn.any():
        return SampleKind.GREEDY
    filtered = (params.top_p < 1) | (params.top_k > 0) | (params.min_p > 0)
    return SampleKind.FILTERED if (drawn & filtered).any() else SampleKind.TEMPERATURE


def pad_sampling(step: StepInputs, rows: int) -> SamplingArrays:
    """Sampling parameters of all ranks, padded to ``rows``; padding rows are greedy. New arrays."""
    ranks = step.ranks
    params = [r.sampling for r in ranks]
    return SamplingArrays(
        temperature=pad_rows([p.temperature for p in params], rows, 0.0),
        top_p=pad_rows([p.top_p for p in params], rows, 1.0),
        top_k=pad_rows([p.top_k for p in params], rows, 0),
        min_p=pad_rows([p.min_p for p in params], rows, 0.0),
        seed=pad_rows([p.seed for p in params], rows, 0),
        positions=pad_rows([r.seq_lens for r in ranks], rows, 0),
        penalties=_pad_penalties(ranks, rows),
        bias=_pad_bias(ranks, rows),
    )


def _bucket(length: int, least: int) -> int:
    while least < length:
        least *= 2
    return least


def _pad_matrix(
    values: Sequence[np.ndarray | None], rows: int, width: int, fill: float, dtype: type
) -> np.ndarray:
    out: np.ndarray = np.full((len(values), rows, width), fill, dtype)
    for page, value in zip(out, values):
        if value is not None:
            page[: value.shape[0], : value.shape[1]] = value
    return out


def _pad_penalties(ranks: Sequence[RankInputs], rows: int) -> PenaltyArrays | None:
    given: list[PenaltyInputs | None] = [r.sampling.penalties for r in ranks]
    if all(p is None for p in given):
        return None

    def scalars(name: str, neutral: float) -> Float32:
        none = np.empty(0, np.float32)
        return pad_rows([none if p is None else getattr(p, name) for p in given], rows, neutral)

    def history(name: str) -> Int32:
        values = [None if p is None else getattr(p, name) for p in given]
        width = _bucket(max(v.shape[1] for v in values if v is not None), _LEAST_HISTORY)
        return _pad_matrix(values, rows, width, -1, np.int32)

    # A decode row has one query token, so its future row is that token's; other steps know all their inputs.
    futures = [
        r.future_rows
        if r.future_rows is not None and len(r.future_rows) == r.batch_size
        else np.empty(0, np.int32)
        for r in ranks
    ]
    return PenaltyArrays(
        frequency=scalars("frequency", 0.0),
        presence=scalars("presence", 0.0),
        repetition=scalars("repetition", 1.0),
        output_ids=history("output_ids"),
        prompt_ids=history("prompt_ids"),
        future_rows=pad_rows(futures, rows, -1),
    )


def _pad_bias(ranks: Sequence[RankInputs], rows: int) -> BiasArrays | None:
    ids = [r.sampling.bias_ids for r in ranks]
    if all(i is None for i in ids):
        return None
    width = _bucket(max(i.shape[1] for i in ids if i is not None), _LEAST_BIAS)
    return BiasArrays(
        _pad_matrix(ids, rows, width, -1, np.int32),
        _pad_matrix([r.sampling.bias_values for r in ranks], rows, width, 0.0, np.float32),
    )
