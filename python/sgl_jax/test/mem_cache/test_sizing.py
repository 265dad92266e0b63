"""Pool sizing and request caps: worked numbers, minima, refusals that teach."""

from __future__ import annotations

import dataclasses

import pytest

from sgl_jax.srt.mem_cache.sizing import (
    CapRules,
    PoolConfigError,
    PoolDemand,
    chunk_within,
    full_request_cap,
    minimum_full_tokens,
    minimum_swa_tokens,
    plan_pools,
    stored_kv_heads,
    swa_request_cap,
    token_bytes,
)


def demand(page=1, dp=1, window=4, chunk=None, full=8, swa=8, context=1024) -> PoolDemand:
    return PoolDemand(full, swa if window else 0, dp, context, CapRules(page, window, chunk))


# -- bytes --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("heads,tensor,stored", [(8, 1, 8), (8, 4, 8), (4, 4, 4), (2, 4, 4), (1, 8, 8)])
def test_heads_are_replicated_up_to_the_tensor_axis(heads, tensor, stored):
    """DECISIONS 11: sizing counts the replicas."""
    assert stored_kv_heads(heads, tensor) == stored


@pytest.mark.parametrize("heads,tensor", [(3, 2), (2, 3), (8, 3)])
def test_heads_that_do_not_divide_are_refused(heads, tensor):
    with pytest.raises(ValueError, match=f"{heads} KV heads .* tensor axis of {tensor}.*--tp-size"):
        stored_kv_heads(heads, tensor)


def test_token_bytes_counts_k_and_v_apart():
    # MiMo-like: K 192, V 128, bf16; 9 FULL layers with 4 heads, on a tensor axis of 4 and of 8.
    assert token_bytes(9, 4, 192, 128, 2, 4) == 9 * 4 * 320 * 2
    assert token_bytes(9, 4, 192, 128, 2, 8) == 9 * 8 * 320 * 2
    assert token_bytes(0, 4, 192, 128, 2) == 0


# -- caps ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "page,extend,new,cap",
    [
        (1, 10, 5, 16),
        (4, 10, 5, 20),
        (4, 10, 2, 16),
        (256, 1, 1, 512),
        (256, 256, 0, 512),
        (2, 10, 4086, 4098),
    ],
)
def test_full_cap_is_pages_plus_the_margin(page, extend, new, cap):
    """D44."""
    assert full_request_cap(extend, new, CapRules(page)) == cap


@pytest.mark.parametrize(
    "extend,new,chunk,cap",
    [
        # P=4, W=6: residue 8+8=16, interval 4, decode peak ceil(6+4+8)=20, margin 4
        (3, 0, None, 4 + 4),
        (3, 2, None, 8 + 4),
        (3, 100, None, 20 + 4),
        (100, 100, None, 100 + 4),
        (100, 100, 16, 16 + 16 + 4),
        (16, 100, 16, 20 + 4),
        (17, 0, 16, 20 + 4),
        (1000, 0, 4, 4 + 16 + 4),
        (100_000, 100_000, 16, 16 + 16 + 4),
    ],
)
def test_swa_cap(extend, new, chunk, cap):
    """D47: bounded by chunk + window + pages whatever the prompt length."""
    assert swa_request_cap(extend, new, CapRules(4, 6, chunk)) == cap


def test_the_cap_of_the_reported_case():
    """D47: W=128, chunk 1024, prompt 100k fits a pool of 4096."""
    for page in (1, 128, 256):
        assert swa_request_cap(100_000, 1000, CapRules(page, 128, 1024)) <= 4096


def test_overlap_counts_the_chunk_in_flight():
    """Rule 9: reclaim follows the processed length, so two chunks may be live."""
    assert swa_request_cap(1000, 0, CapRules(4, 6, 16, chunks_in_flight=2)) == 32 + 16 + 4


def test_models_without_swa_layers_need_no_swa():
    rules = CapRules(4, None, 16)
    assert (swa_request_cap(100, 100, rules), rules.residue, rules.decode_peak) == (0, 0, 0)
    assert minimum_swa_tokens(1024, rules) == 0
    with pytest.raises(ValueError, match="needs a window"):
        chunk_within(100, rules)


@pytest.mark.parametrize("budget,chunk", [(0, 0), (20, 0), (23, 0), (24, 4), (27, 4), (28, 8), (100, 80)])
def test_a_budget_admits_what_is_left_after_residue_and_margin(budget, chunk):
    """D43: budget - P, never below 0."""
    rules = CapRules(4, 6, None)
    assert chunk_within(budget, rules) == chunk
    if chunk:
        assert swa_request_cap(10_000, 0, dataclasses.replace(rules, chunk_size=chunk)) <= budget


@pytest.mark.parametrize("page", [1, 4, 128, 256])
@pytest.mark.parametrize("window", [1, 6, 128, 1024])
@pytest.mark.parametrize("chunk", [None, 16, 512])
def test_the_cap_bounds_a_simulated_request(page, window, chunk):
    """D47: prefill in chunks with a reclaim before each, then decode with the reclaim interval."""
    from sgl_jax.srt.mem_cache.window import reclaim_boundary, reclaim_interval

    chunk = None if chunk is None else -(-chunk // page) * page
    rules = CapRules(page, window, chunk)
    prompt, output = 3 * window + 777, 2 * window + 300
    evicted = most = done = 0
    while done < prompt:
        evicted = reclaim_boundary(evicted, 0, done, window, page)[1]
        done = min(prompt, done + (chunk or prompt))
        most = max(most, -(-done // page) * page - evicted)
    interval = reclaim_interval(window, page)
    for step in range(output):
        if step % interval == 0:
            evicted = reclaim_boundary(evicted, 0, prompt + step, window, page)[1]
        most = max(most, -(-(prompt + step + 1) // page) * page - evicted)
    assert most <= swa_request_cap(prompt, output, rules)


# -- pools --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "page,dp,total,ratio,full,swa",
    [
        (1, 1, 1000, None, 1000, 800),
        (1, 2, 1001, None, 500, 400),
        (1, 1, 1000, 0.29, 1000, 290),
        (128, 1, 65536, 0.5, 65536, 32768),
        (128, 2, 65536, 0.5, 32768, 16384),
        (256, 1, 10_000, 0.3, 9984, 2816),
        (256, 2, 10_000, 0.5, 4864, 2304),
        (1, 1, 1000, 1.0, 1000, 1000),
    ],
)
def test_totals_are_floored_to_pages_times_ranks(page, dp, total, ratio, full, swa):
    """D77: an explicit ratio is used, whatever sizes the FULL pool."""
    plan = plan_pools(demand(page, dp, window=100), ratio=ratio, max_total_tokens=total)
    assert (plan.full_tokens, plan.swa_tokens) == (full, swa)
    assert (plan.total_full_tokens, plan.total_swa_tokens) == (full * dp, swa * dp)
    assert (plan.full_pages, plan.swa_pages) == (full // page, swa // page)
    assert f"--max-total-tokens {total}" in plan.sources[0]
    assert ("by default" if ratio is None else f"--swa-full-tokens-ratio {ratio}") in plan.sources[1]


@pytest.mark.parametrize("page", [1, 128, 256])
@pytest.mark.parametrize("ratio", [None, 0.3, 1.0])
def test_memory_is_filled_and_never_exceeded(page, ratio):
    d = demand(page, window=128, full=1000, swa=4000, context=100_000)
    for memory in (20_000_000, 33_333_333):
        plan = plan_pools(d, ratio=ratio, memory_bytes=memory)
        assert plan.rank_bytes == plan.full_bytes + plan.swa_bytes <= memory
        one_more = plan_pools(d, ratio=ratio, max_total_tokens=plan.full_tokens + page)
        assert one_more.rank_bytes > memory
        assert plan.full_bytes == (plan.full_tokens + page) * 1000
        assert f"{memory} bytes" in plan.sources[0]


def test_a_plain_model_has_one_pool():
    plan = plan_pools(demand(4, window=None, full=10), memory_bytes=1000)
    assert (plan.full_tokens, plan.swa_tokens, plan.swa_bytes, plan.rank_bytes) == (96, 0, 0, 1000)
    assert plan.largest_request == 92 and plan.concurrency == 96 / 92
    with pytest.raises(PoolConfigError, match=r"--swa-full-tokens-ratio 0\.5: the model has no SWA layers"):
        plan_pools(demand(4, window=None), ratio=0.5, memory_bytes=1000)


def test_a_total_that_does_not_fit_the_memory_is_refused_with_the_one_that_does():
    """D77: the explicit value wins or the start fails."""
    d = demand(4, window=6, full=10, swa=10)
    with pytest.raises(
        PoolConfigError, match=r"--max-total-tokens 1000: needs 18080 bytes.*9080 are"
    ) as caught:
        plan_pools(d, max_total_tokens=1000, memory_bytes=9080)
    assert "use at most --max-total-tokens 500" in caught.value.remedy
    assert plan_pools(d, max_total_tokens=500, memory_bytes=9080).full_tokens == 500


def test_the_reported_small_pool_is_refused_with_the_minimum_that_works():
    """D72: total 4096, ratio 0.1, P=256, W=128: the SWA pool was one page and warm-up hung."""
    d = demand(256, window=128, chunk=4096, context=32768)
    with pytest.raises(PoolConfigError) as caught:
        plan_pools(d, ratio=0.1, max_total_tokens=4096)
    error = caught.value
    assert (error.flag, error.value) == ("--max-total-tokens", 4096)
    assert "SWA 256 (minimum 1280 for window 128, page size 256)" in str(error)
    assert "--max-total-tokens 12800 or more" in str(error) and "--swa-full-tokens-ratio 0.313" in str(error)
    assert plan_pools(d, ratio=0.1, max_total_tokens=12800).swa_tokens == 1280
    assert plan_pools(d, ratio=0.313, max_total_tokens=4096).swa_tokens == 1280
    with pytest.raises(PoolConfigError):
        plan_pools(d, ratio=0.1, max_total_tokens=12799)
    with pytest.raises(PoolConfigError):
        plan_pools(d, ratio=0.312, max_total_tokens=4096)


@pytest.mark.parametrize("page", [1, 16, 128, 256])
@pytest.mark.parametrize("dp", [1, 2])
@pytest.mark.parametrize("window", [None, 4, 128, 1000])
@pytest.mark.parametrize("ratio", [0.1, 0.8, 1.0])
def test_the_named_minimum_is_exact(page, dp, window, ratio):
    """D72: what the message recommends starts, one page per rank less does not; the smallest pool admits a request."""
    d = demand(page, dp, window, chunk=512, context=50_000)
    given = None if window is None else ratio
    with pytest.raises(PoolConfigError) as caught:
        plan_pools(d, ratio=given, max_total_tokens=1)
    least = int(caught.value.remedy.split("--max-total-tokens ")[1].split()[0])
    plan = plan_pools(d, ratio=given, max_total_tokens=least)
    with pytest.raises(PoolConfigError):
        plan_pools(d, ratio=given, max_total_tokens=least - 1)
    assert plan.full_tokens >= minimum_full_tokens(d.rules)
    assert plan.swa_tokens >= minimum_swa_tokens(d.context_len, d.rules)
    assert full_request_cap(1, 1, d.rules) <= plan.full_tokens
    assert swa_request_cap(1, 1, d.rules) <= plan.swa_tokens or window is None
    assert plan.largest_request >= 2


def test_memory_too_small_names_the_memory_flag():
    with pytest.raises(
        PoolConfigError,
        match=r"--mem-fraction-static by default leaves 100 bytes.*raise --mem-fraction-static",
    ):
        plan_pools(demand(256, window=128), memory_bytes=100)
    with pytest.raises(PoolConfigError, match=r"--mem-fraction-static 0\.01 leaves 100 bytes"):
        plan_pools(demand(256, window=128), memory_bytes=100, memory_fraction=0.01)
    with pytest.raises(ValueError, match="--max-total-tokens or a memory budget"):
        plan_pools(demand())
    with pytest.raises(PoolConfigError, match="--swa-full-tokens-ratio 0: must be above 0"):
        plan_pools(demand(), ratio=0, max_total_tokens=100)
    with pytest.raises(ValueError, match="at least one attention layer"):
        plan_pools(demand(full=0, swa=0), memory_bytes=100)


@pytest.mark.parametrize(
    "total,ratio,chunk,largest",
    [
        (4096, 1.0, 512, 4094),  # FULL pool less the margin
        (100_000, 0.5, 512, 1024),  # context
        (1000, 0.1, 512, 998),  # a chunk of 512 does not fit 100 SWA tokens: it goes through in smaller ones
        (1000, 0.1, 16, 998),
        (1000, 0.1, None, 98),  # a whole prompt must fit the window pool
    ],
)
def test_the_largest_request_is_admissible_and_one_more_is_not(total, ratio, chunk, largest):
    """D44: entry and admission use one formula; alone on its rank a prompt is cut to the chunks that the window pool takes."""
    context = 1024 if total == 100_000 else 100_000
    d = PoolDemand(8, 8, 1, context, CapRules(2, 6, chunk))
    plan = plan_pools(d, ratio=ratio, max_total_tokens=total)
    assert plan.largest_request == largest
    room = chunk_within(plan.swa_tokens, d.rules)
    assert room >= 2
    rules = d.rules if chunk is None else dataclasses.replace(d.rules, chunk_size=min(chunk, room))

    def fits(length: int) -> bool:
        full, swa = full_request_cap(length, 0, rules), swa_request_cap(length, 0, rules)
        return length <= context and full <= plan.full_tokens and swa <= plan.swa_tokens

    assert fits(largest) and not fits(largest + 1)


def test_concurrency_is_decided_by_the_tighter_pool():
    d = PoolDemand(8, 8, 1, 1000, CapRules(1, 10, 64))  # decode peak 10 + 10 + 2 = 22
    assert plan_pools(d, ratio=1.0, max_total_tokens=10_000).concurrency == 10.0
    assert plan_pools(d, ratio=0.011, max_total_tokens=100_000).concurrency == 1100 / 22


def test_plans_are_values():
    plan = plan_pools(demand(), max_total_tokens=100)
    assert plan == plan_pools(demand(), max_total_tokens=100)
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.full_tokens = 1
