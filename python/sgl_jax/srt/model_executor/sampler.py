"""Sampling in plain JAX over ``[ranks, rows, vocab]`` logits.

Order of operations: repetition, frequency and presence penalties -> logit bias -> temperature -> top-k -> top-p (over what
top-k left, renormalised) -> min-p (relative to the most likely token) -> Gumbel-max draw. ``temperature`` 0 and ``top_k`` 1
are greedy. Logprobs are those of the raw distribution: before penalties, bias and temperature.

The noise of a row is ``gumbel(fold_in(key(seed), position))`` by token id, so a draw depends on the row alone: not on its
place in the batch, on the batch's size, or on the order of near-equal logits.

Three kinds of a step keep the common ones cheap: GREEDY (an argmax), TEMPERATURE (no filter, hence no sort over the
vocabulary) and FILTERED.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import jax
import jax.numpy as jnp

_TOP_LOGPROB_BUCKETS = (8, 32, 128)


class SampleKind(IntEnum):
    """How much work a step's rows need; static in the compiled sampler."""

    GREEDY = 0
    TEMPERATURE = 1
    FILTERED = 2


class PenaltyArrays(NamedTuple):
    """Padded penalties: scalars ``[ranks, rows]``, histories ``[ranks, rows, H]`` with -1 as padding.

    ``future_rows`` [ranks, rows]: row of the previous step's tokens that belongs to the output history but was not known to
    the host at launch, or -1.
    """

    frequency: jax.Array
    presence: jax.Array
    repetition: jax.Array
    output_ids: jax.Array
    prompt_ids: jax.Array
    future_rows: jax.Array


class BiasArrays(NamedTuple):
    """Additive logit bias ``[ranks, rows, K]``; id -1 is padding."""

    ids: jax.Array
    values: jax.Array


class SamplingArrays(NamedTuple):
    """Padded sampling parameters, each ``[ranks, rows]``; ``positions`` are those of the token to be sampled."""

    temperature: jax.Array
    top_p: jax.Array
    top_k: jax.Array
    min_p: jax.Array
    seed: jax.Array
    positions: jax.Array
    penalties: PenaltyArrays | None = None
    bias: BiasArrays | None = None


class SampleOutput(NamedTuple):
    """``tokens`` [ranks, rows]; the rest is None unless logprobs were asked for."""

    tokens: jax.Array
    logprobs: jax.Array | None = None
    top_values: jax.Array | None = None
    top_ids: jax.Array | None = None


def top_logprobs_bucket(wanted: int, vocab_size: int) -> int:
    """Number of alternatives the compiled step computes so that few variants exist; 0 stays 0."""
    if wanted <= 0:
        return 0
    for bucket in _TOP_LOGPROB_BUCKETS:
        if wanted <= bucket:
            return min(bucket, vocab_size)
    return vocab_size


def _gather(rows: jax.Array, index: jax.Array) -> jax.Array:
    """``rows[..., index]`` along the last axis, with -1 clipped to 0."""
    return jnp.take_along_axis(rows, jnp.maximum(index, 0), axis=-1)


def _token_counts(ids: jax.Array, vocab_size: int) -> jax.Array:
    """How often each token id occurs in ``ids`` [ranks, rows, H]; -1 counts for nothing. [ranks, rows, vocab]"""

    def one(row: jax.Array) -> jax.Array:
        slot = jnp.where(row >= 0, row, vocab_size)  # out of range: dropped
        return jnp.zeros((vocab_size,), jnp.float32).at[slot].add(jnp.float32(1.0), mode="drop")

    return jax.vmap(jax.vmap(one))(ids)


def apply_penalties(logits: jax.Array, penalties: PenaltyArrays, previous: jax.Array) -> jax.Array:
    """Repetition (prompt and output; divides positive, multiplies negative logits), then frequency and presence (output)."""
    vocab = logits.shape[-1]
    future = jnp.where(penalties.future_rows >= 0, _gather(previous, penalties.future_rows), -1)
    output = _token_counts(jnp.concatenate([penalties.output_ids, future[..., None]], axis=-1), vocab)
    seen = (output + _token_counts(penalties.prompt_ids, vocab)) > 0
    repetition = penalties.repetition[..., None]
    repeated = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = jnp.where(seen, repeated, logits)
    present = (output > 0).astype(jnp.float32)
    return logits - penalties.frequency[..., None] * output - penalties.presence[..., None] * present


def apply_bias(logits: jax.Array, bias: BiasArrays) -> jax.Array:
    """Add ``bias.values`` at ``bias.ids``; -inf forbids a token."""
    vocab = logits.shape[-1]

    def one(row: jax.Array, ids: jax.Array, values: jax.Array) -> jax.Array:
        return row.at[jnp.where(ids >= 0, ids, vocab)].add(values, mode="drop")

    return jax.vmap(jax.vmap(one))(logits, bias.ids, bias.values)


def filter_logits(logits: jax.Array, top_k: jax.Array, top_p: jax.Array, min_p: jax.Array) -> jax.Array:
    """Set to -inf what top-k, then top-p, then min-p exclude. The most likely token always stays.

    ``logits`` [ranks, rows, vocab] are scaled by the temperature already. Tokens equal to the last kept logit are kept too.
    """
    vocab = logits.shape[-1]
    ordered = -jnp.sort(-logits, axis=-1)
    limit = jnp.where(top_k <= 0, vocab, jnp.minimum(top_k, vocab))[..., None]
    rank = jnp.broadcast_to(jnp.arange(vocab, dtype=jnp.int32), logits.shape)
    kept = jnp.where(rank < limit, ordered, -jnp.inf)
    probs = jax.nn.softmax(kept, axis=-1)
    before = jnp.cumsum(probs, axis=-1) - probs
    inside = (rank == 0) | ((rank < limit) & (before < top_p[..., None]))
    last = jnp.sum(inside.astype(jnp.int32), axis=-1, keepdims=True) - 1
    threshold = jnp.take_along_axis(ordered, last, axis=-1)
    floor = ordered[..., :1] + jnp.log(min_p)[..., None]  # log(0) = -inf: off
    return jnp.where(logits >= jnp.maximum(threshold, floor), logits, -jnp.inf)


def _gumbel(seed: jax.Array, positions: jax.Array, vocab: int) -> jax.Array:
    def one(row_seed: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.key(row_seed), position)
        return jax.random.gumbel(key, (vocab,), jnp.float32)

    return jax.vmap(jax.vmap(one))(seed, positions)


def _draw(logits: jax.Array, params: SamplingArrays, kind: SampleKind) -> jax.Array:
    greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    if kind is SampleKind.GREEDY:
        return greedy
    is_greedy = (params.temperature <= 0) | (params.top_k == 1)
    scaled = logits / jnp.where(is_greedy, jnp.float32(1.0), params.temperature)[..., None]
    if kind is SampleKind.FILTERED:
        scaled = filter_logits(scaled, params.top_k, params.top_p, params.min_p)
    noise = _gumbel(params.seed, params.positions, logits.shape[-1])
    drawn = jnp.argmax(scaled + noise, axis=-1).astype(jnp.int32)
    return jnp.where(is_greedy, greedy, drawn)


def sample(
    logits: jax.Array,
    params: SamplingArrays,
    previous: jax.Array,
    *,
    kind: SampleKind,
    logprobs: bool = False,
    top_logprobs: int = 0,
) -> SampleOutput:
    """Sample one token per row.

    ``logits`` [ranks, rows, vocab]; ``previous`` [ranks, max_rows]: tokens of the preceding step (used by penalties only).
    ``kind``, ``logprobs`` and ``top_logprobs`` are static. Pure; nothing is donated.
    """
    raw = logits.astype(jnp.float32)
    adjusted = raw
    if params.penalties is not None:
        adjusted = apply_penalties(adjusted, params.penalties, previous)
    if params.bias is not None:
        adjusted = apply_bias(adjusted, params.bias)
    tokens = _draw(adjusted, params, kind)
    if not logprobs:
        return SampleOutput(tokens)
    return SampleOutput(tokens, *gather_logprobs(raw, tokens, top_logprobs))


def gather_logprobs(
    raw: jax.Array, tokens: jax.Array, top_logprobs: int
) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
    """Raw log-probabilities of ``tokens`` and of the ``top_logprobs`` most likely ids. ``raw`` [..., vocab] float32."""
    norm = jax.nn.logsumexp(raw, axis=-1)
    chosen = jnp.take_along_axis(raw, jnp.maximum(tokens, 0)[..., None], axis=-1)[..., 0] - norm
    if top_logprobs == 0:
        return chosen, None, None
    values, ids = jax.lax.top_k(raw, top_logprobs)
    return chosen, values - norm[..., None], ids.astype(jnp.int32)
