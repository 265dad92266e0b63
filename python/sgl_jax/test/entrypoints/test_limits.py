"""Range tables of sampling parameters, lengths and rank wishes."""

from __future__ import annotations

import pytest

from sgl_jax.srt.managers.frontend.errors import RequestError
from sgl_jax.srt.managers.frontend.limits import (
    Limits,
    check_prompt,
    check_rank,
    check_sampling,
    check_token_ids,
    output_budget,
)
from sgl_jax.srt.managers.io_struct import SamplingParams

LIMITS = Limits(context_len=100, max_req_input_len=90, vocab_size=384, dp_size=2)


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("temperature", -0.1, "temperature is -0.1, must be in [0, 100]"),
        ("temperature", float("inf"), "temperature is inf"),
        ("top_p", 0.0, "top_p is 0.0, must be in (0, 1]"),
        ("top_p", 1.01, "must be in (0, 1]"),
        ("top_k", 0, "top_k is 0, must be -1 (off) or at least 1"),
        ("top_k", -2, "top_k is -2"),
        ("min_p", 1.5, "must be in [0, 1]"),
        ("frequency_penalty", 2.5, "must be in [-2, 2]"),
        ("presence_penalty", -3.0, "must be in [-2, 2]"),
        ("repetition_penalty", 0.0, "must be in (0, 2]"),
        ("max_new_tokens", -1, "max_new_tokens is -1, must be at least 0"),
        ("min_new_tokens", 129, "between 0 and max_new_tokens (128)"),
        ("stop", [""], "empty string"),
        ("stop", ["x"] * 17, "17 strings, at most 16"),
        ("stop_token_ids", [384], "stop_token_ids[0] is 384, must be in [0, 383]"),
        ("logit_bias", {5: 101.0}, "logit_bias[5] is 101.0"),
        ("logit_bias", {-1: 1.0}, "logit_bias[0] is -1"),
        ("seed", 2**64, "64 bits"),
    ],
)
def test_bad_sampling_names_field_value_limit(field, value, said):
    with pytest.raises(RequestError) as error:
        check_sampling(SamplingParams(**{field: value}), 384)
    assert error.value.status == 400
    assert said in str(error.value)


def test_tiny_temperature_is_greedy_and_seeds_fold_to_32_bits():
    assert check_sampling(SamplingParams(temperature=1e-7), 384).temperature == 0.0
    assert check_sampling(SamplingParams(temperature=1e-3), 384).temperature == 1e-3
    assert check_sampling(SamplingParams(seed=7), 384).seed == 7
    assert check_sampling(SamplingParams(seed=(5 << 32) + 3), 384).seed == 6
    assert 0 <= check_sampling(SamplingParams(seed=-1), 384).seed < 2**32


@pytest.mark.parametrize(
    ("prompt", "wanted", "default", "budget"),
    [(10, 20, 16, 20), (10, None, 16, 16), (95, None, 16, 5), (10, None, None, 90), (10, 90, 1, 90)],
)
def test_output_budget(prompt, wanted, default, budget):
    assert output_budget(prompt, wanted, default, LIMITS, "max_tokens") == budget


def test_an_explicit_wish_that_does_not_fit_is_refused():
    with pytest.raises(
        RequestError,
        match="max_tokens is 91: with 10 prompt tokens that is 101, the limit is the context length 100",
    ):
        output_budget(10, 91, 16, LIMITS, "max_tokens")


def test_prompt_and_ids():
    check_prompt([1] * 90, LIMITS, "prompt")
    with pytest.raises(RequestError, match="prompt has 91 tokens, the limit is 90"):
        check_prompt([1] * 91, LIMITS, "prompt")
    with pytest.raises(RequestError, match="prompt is empty"):
        check_prompt([], LIMITS, "prompt")
    with pytest.raises(RequestError, match=r"input_ids\[1\] is -5"):
        check_token_ids([1, -5], 384, "input_ids")


@pytest.mark.parametrize("rank", [2, 7, -1])
def test_d51_forged_rank(rank):
    """D51: a rank that does not exist never reaches the scheduler."""
    with pytest.raises(RequestError, match=rf"dp_rank is {rank}, must be in \[0, 1\] \(--dp-size 2\)"):
        check_rank(rank, 2)
    check_rank(1, 2)
    check_rank(None, 2)
