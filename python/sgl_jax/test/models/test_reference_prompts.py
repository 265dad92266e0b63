"""The reference prompts through the paged path, and the fixture's own promises."""

from __future__ import annotations

import numpy as np
import pytest

from sgl_jax.srt.configs.model_config import ModelConfig
from sgl_jax.test.models.gemma4_oracle import Gemma4Oracle
from sgl_jax.test.models.paged_engine import PagedEngine, Sequence, expected
from sgl_jax.test.models.reference_prompts import CHECKPOINT, WINDOWS, reference_prompts


@pytest.mark.parametrize("window, page", [(32, 1), (160, 128), (300, 256)])
def test_greedy_tokens_of_every_prompt(window, page):
    """Prefilled alone in chunks of 256, then decoded as one batch of 16: the float64 oracle's tokens."""
    config = ModelConfig.from_path(CHECKPOINT, {"sliding_window": window})
    prompts = reference_prompts(window)
    engine = PagedEngine(config, page, tokens=256, seqs=len(prompts), max_len=1024)
    seqs = [Sequence() for _ in prompts]
    first = [
        engine.prefill([seq], np.array([p.prompt]), 256)[0, -1].argmax() for seq, p in zip(seqs, prompts)
    ]
    tokens = [np.array(first)]
    for _ in range(31):
        rows = engine.run([(s, t[None]) for s, t in zip(seqs, tokens[-1])])
        tokens.append(np.concatenate(rows).argmax(-1))
    for prompt, got in zip(prompts, np.stack(tokens, axis=1).tolist()):
        assert got == prompt.output, prompt.name


def test_oracle_agrees_with_the_reference_logits():
    ref = expected("gemma4")
    np.testing.assert_allclose(
        Gemma4Oracle(CHECKPOINT).forward(ref["input_ids"][1]), ref["logits"][1], atol=5e-4
    )


@pytest.mark.parametrize("window", WINDOWS)
def test_fixture_keeps_its_promises(window):
    prompts = reference_prompts(window)
    assert len({p.name for p in prompts}) == len(prompts) == 16
    assert all(p.min_margin > 5e-3 and len(p.output) == 32 and not {1, 5} & set(p.output) for p in prompts)
    by_name = {p.name: p.prompt for p in prompts}
    assert [len(by_name[n]) for n in ("page_128", "page_256", "pages_384", "pages_512")] == [
        128,
        256,
        384,
        512,
    ]
    assert [len(by_name[n]) for n in ("window_minus_1", "window", "window_plus_1")] == [
        window - 1,
        window,
        window + 1,
    ]
    assert by_name["shared_a"][:300] == by_name["shared_b"][:300] == by_name["pages_512"][:300]
    assert by_name["diverge_in_window"][:-20] == by_name["shared_a"][:-20]
    assert by_name["continuation"][:340] == by_name["shared_a"]


def test_fixture_is_what_the_oracle_says():
    """One prompt a window, recomputed."""
    for window in WINDOWS:
        prompt = next(p for p in reference_prompts(window) if p.name == "window_plus_1")
        output, margin = Gemma4Oracle(CHECKPOINT, window).greedy(np.array(prompt.prompt), 32)
        assert output == prompt.output
        assert margin == pytest.approx(prompt.min_margin, abs=1e-6)
