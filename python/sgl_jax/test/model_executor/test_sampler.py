"""The sampler against numpy: filters, penalties, bias, seeds, logprobs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sgl_jax.srt.model_executor import sampler
from sgl_jax.srt.model_executor.sampler import BiasArrays, PenaltyArrays, SampleKind, SamplingArrays

VOCAB = 64


def _params(rows, *, temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, seed=0, position=5, **more):
    def full(value, dtype):
        return jnp.asarray(np.broadcast_to(np.asarray(value, dtype), (1, rows)))

    return SamplingArrays(
        temperature=full(temperature, np.float32),
        top_p=full(top_p, np.float32),
        top_k=full(top_k, np.int32),
        min_p=full(min_p, np.float32),
        seed=full(seed, np.uint32),
        positions=full(position, np.int32),
        **more,
    )


def _logits(rows, seed=0):
    return np.random.default_rng(seed).normal(size=(1, rows, VOCAB)).astype(np.float32) * 2


_PREVIOUS = np.zeros((1, 8), np.int32)


@functools.cache
def _compiled(kind, logprobs=False, top=0):
    return jax.jit(functools.partial(sampler.sample, kind=kind, logprobs=logprobs, top_logprobs=top))


def _oracle_allowed(row, top_k, top_p, min_p):
    """Token ids that survive the filters, in plain float64."""
    order = np.argsort(-row.astype(np.float64), kind="stable")
    kept = order[: top_k if top_k > 0 else len(order)]
    p = np.exp(row[kept].astype(np.float64))
    p /= p.sum()
    allowed = []
    before = 0.0
    for token, prob in zip(kept, p):
        if allowed and before >= top_p:
            break
        allowed.append(int(token))
        before += prob
    peak = row.max()
    return {t for t in allowed if min_p == 0 or np.exp(row[t] - peak) >= min_p}


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"),
    [
        (0, 1.0, 0.0),
        (5, 1.0, 0.0),
        (0, 0.6, 0.0),
        (0, 1.0, 0.2),
        (12, 0.7, 0.1),
        (1, 0.1, 0.9),
        (999, 0.001, 0.0),
    ],
)
def test_filters_equal_oracle(top_k, top_p, min_p):
    logits = _logits(4)
    p = _params(4, top_k=top_k, top_p=top_p, min_p=min_p)
    out = np.asarray(jax.jit(sampler.filter_logits)(logits, p.top_k, p.top_p, p.min_p))
    for row in range(4):
        assert set(np.flatnonzero(np.isfinite(out[0, row]))) == _oracle_allowed(
            logits[0, row], top_k, top_p, min_p
        )


def test_filters_with_mixed_rows():
    """Each row obeys its own parameters, greedy rows included."""
    logits = _logits(4)
    p = _params(4, temperature=[0.0, 1.0, 1.0, 0.7], top_k=[0, 3, 0, 1], top_p=[1.0, 1.0, 0.5, 1.0])
    for seed in range(20):
        out = _compiled(SampleKind.FILTERED)(logits, p._replace(seed=p.seed + np.uint32(seed)), _PREVIOUS)
        tokens = np.asarray(out.tokens)[0]
        assert tokens[0] == logits[0, 0].argmax()
        assert tokens[1] in _oracle_allowed(logits[0, 1], 3, 1.0, 0.0)
        assert tokens[2] in _oracle_allowed(logits[0, 2], 0, 0.5, 0.0)
        assert tokens[3] == logits[0, 3].argmax()


def test_draws_follow_the_distribution():
    rows = 4096
    logits = np.broadcast_to(np.log(np.array([0.5, 0.3, 0.15, 0.05], np.float32)), (1, rows, 4))
    out = _compiled(SampleKind.TEMPERATURE)(logits, _params(rows, seed=np.arange(rows)), _PREVIOUS)
    share = np.bincount(np.asarray(out.tokens)[0], minlength=4) / rows
    np.testing.assert_allclose(share, [0.5, 0.3, 0.15, 0.05], atol=0.03)


def test_draw_does_not_depend_on_the_batch():
    """Same seed and position, another row, batch size and neighbours: the same token."""
    wide = _logits(8, seed=3)
    alone = wide[:, 6:7]
    seeds = np.arange(8) * 7 + 1
    for kind in (SampleKind.TEMPERATURE, SampleKind.FILTERED):
        many = _compiled(kind)(wide, _params(8, seed=seeds, position=np.arange(8)), _PREVIOUS)
        one = _compiled(kind)(alone, _params(1, seed=seeds[6], position=6), _PREVIOUS)
        assert int(one.tokens[0, 0]) == int(many.tokens[0, 6])


def test_seed_and_position_both_matter():
    logits = np.zeros((1, 1, VOCAB), np.float32)
    draws = {
        (seed, position): int(
            _compiled(SampleKind.TEMPERATURE)(
                logits, _params(1, seed=seed, position=position), _PREVIOUS
            ).tokens[0, 0]
        )
        for seed in range(4)
        for position in range(4)
    }
    assert len(set(draws.values())) > 8


def _oracle_penalised(row, prompt, output, frequency, presence, repetition):
    row = row.astype(np.float64).copy()
    for token in set(prompt) | set(output):
        row[token] = row[token] / repetition if row[token] > 0 else row[token] * repetition
    for token in set(output):
        row[token] -= frequency * output.count(token) + presence
    return row


@pytest.mark.parametrize(
    ("frequency", "presence", "repetition"),
    [(0.5, 0.0, 1.0), (0.0, 0.7, 1.0), (0.0, 0.0, 1.3), (0.4, -0.2, 0.8)],
)
def test_penalties_equal_oracle(frequency, presence, repetition):
    logits = _logits(1, seed=1)
    prompt, known, future = [1, 2, 3], [3, 4, 4], 4
    previous = np.array([[9, future, 9]], np.int32)
    arrays = PenaltyArrays(
        frequency=np.array([[frequency]], np.float32),
        presence=np.array([[presence]], np.float32),
        repetition=np.array([[repetition]], np.float32),
        output_ids=np.array([[[*known, -1, -1]]], np.int32),
        prompt_ids=np.array([[[*prompt, -1]]], np.int32),
        future_rows=np.array([[1]], np.int32),
    )
    out = np.asarray(jax.jit(sampler.apply_penalties)(logits, arrays, previous))[0, 0]
    want = _oracle_penalised(logits[0, 0], prompt, [*known, future], frequency, presence, repetition)
    np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-6)


def test_bias_forces_and_forbids():
    logits = _logits(2)
    best = int(logits[0, 0].argmax())
    bias = BiasArrays(
        np.array([[[best, -1], [7, -1]]], np.int32), np.array([[[-np.inf, 5.0], [100.0, 5.0]]], np.float32)
    )
    out = _compiled(SampleKind.GREEDY)(logits, _params(2, temperature=0.0, bias=bias), _PREVIOUS)
    assert np.asarray(out.tokens)[0].tolist() == [int(np.argsort(logits[0, 0])[-2]), 7]


def test_logprobs_are_those_of_the_raw_distribution():
    """Neither temperature nor bias nor filters touch the reported logprobs."""
    logits = _logits(3)
    bias = BiasArrays(np.full((1, 3, 1), 7, np.int32), np.full((1, 3, 1), 100.0, np.float32))
    params = _params(3, temperature=0.3, top_k=2, bias=bias)
    out = _compiled(SampleKind.FILTERED, True, 8)(logits, params, _PREVIOUS)
    x = logits[0].astype(np.float64)
    want = x - np.log(np.exp(x).sum(-1, keepdims=True))
    assert np.asarray(out.tokens)[0].tolist() == [7, 7, 7]
    np.testing.assert_allclose(np.asarray(out.logprobs)[0], want[:, 7], atol=1e-5)
    order = np.argsort(-want, axis=-1)[:, :8]
    assert np.array_equal(np.asarray(out.top_ids)[0], order)
    np.testing.assert_allclose(np.asarray(out.top_values)[0], np.take_along_axis(want, order, -1), atol=1e-5)


@pytest.mark.parametrize(
    ("wanted", "vocab", "bucket"),
    [(0, 384, 0), (1, 384, 8), (8, 384, 8), (20, 384, 32), (100, 384, 128), (200, 384, 384), (20, 16, 16)],
)
def test_top_logprobs_buckets(wanted, vocab, bucket):
    assert sampler.top_logprobs_bucket(wanted, vocab) == bucket
