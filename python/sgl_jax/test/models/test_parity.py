"""Logits and greedy tokens of the reference checkpoints through the paged path, each family x page size.

One engine per case: two compiled shapes (extend, decode) serve every path. Window pages are given back as soon as no query sees
them and pools are NaN where nothing was written, so a layer that ignored its window would read NaN or another page.
"""

from __future__ import annotations

import numpy as np
import pytest

from sgl_jax.srt.configs.model_config import ModelConfig
from sgl_jax.test.models.paged_engine import FAMILIES, REFS, PagedEngine, Sequence, expected


@pytest.fixture(
    scope="module", params=[(f, p) for f in FAMILIES for p in (1, 16, 128)], ids=lambda c: f"{c[0]}-p{c[1]}"
)
def case(request):
    family, page = request.param
    return PagedEngine(ModelConfig.from_path(REFS / f"{family}-tiny"), page), expected(family)


def assert_logits(got: np.ndarray, want: np.ndarray) -> None:
    """MODELS tolerances for float32 at logit std 4: a real mistake shows 1e-1 or more."""
    np.testing.assert_allclose(got, want, atol=5e-4, rtol=1e-4)
    np.testing.assert_array_equal(got.argmax(-1), want.argmax(-1))


def fresh(engine: PagedEngine, count: int) -> list[Sequence]:
    engine.reset(engine.pages_per_rank)
    return [Sequence() for _ in range(count)]


@pytest.mark.parametrize("chunk", [160, 64, 37])
def test_prefill_logits_cold_and_chunked(case, chunk):
    engine, ref = case
    assert_logits(engine.prefill(fresh(engine, 2), ref["input_ids"], chunk), ref["logits"])


def test_decode_logits_token_by_token(case):
    """Positions 90..159 decoded one at a time (far past the window of 32), two sequences of different length."""
    engine, ref = case
    ids, seqs = ref["input_ids"], fresh(engine, 2)
    engine.run([(seqs[0], ids[0, :100]), (seqs[1], ids[1, :90])])
    for step in range(60):
        rows = engine.run(
            [(seqs[0], ids[0, 100 + step : 101 + step]), (seqs[1], ids[1, 90 + step : 91 + step])]
        )
        assert_logits(
            np.concatenate(rows), np.stack([ref["logits"][0, 100 + step], ref["logits"][1, 90 + step]])
        )


def test_extend_and_decode_in_one_step(case):
    """A mixed batch: one sequence decodes while another prefills (D60)."""
    engine, ref = case
    ids, seqs = ref["input_ids"], fresh(engine, 2)
    engine.run([(seqs[0], ids[0, :120])])
    got = engine.run([(seqs[0], ids[0, 120:121]), (seqs[1], ids[1, :130])])
    assert_logits(np.concatenate(got), np.concatenate([ref["logits"][0, 120:121], ref["logits"][1, :130]]))


def test_greedy_tokens(case):
    """All 96 tokens of every reference prompt, after a chunked prefill."""
    engine, ref = case
    tokens = engine.greedy(fresh(engine, 3), ref["greedy_prompts"], 96, chunk=20)
    np.testing.assert_array_equal(tokens, ref["greedy_tokens"])


@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_runs_and_mostly_agrees(family):
    """bf16 weights, activations and pools: no token equality is claimed, but most positions choose the same token."""
    engine = PagedEngine(ModelConfig.from_path(REFS / f"{family}-tiny", {"dtype": "bfloat16"}), 16)
    ref = expected(family)
    logits = engine.prefill([Sequence(), Sequence()], ref["input_ids"], 160)
    assert logits.dtype == np.float32 and np.isfinite(logits).all()
    assert (logits.argmax(-1) == ref["logits"].argmax(-1)).mean() > 0.9
