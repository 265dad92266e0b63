"""Budgets and plans with literal numbers: CPU default, fractions, explicit totals, refusals."""

from pathlib import Path

import pytest

from sgl_jax.srt.configs.model_config import ModelConfig, ModelConfigError
from sgl_jax.srt.mem_cache.sizing import PoolConfigError
from sgl_jax.srt.model_executor.memory_budget import (
    DeviceMemory,
    cap_rules,
    kv_budget,
    make_plan,
    plan_text,
    pool_demand,
    weight_bytes,
)
from sgl_jax.srt.server_args import ServerArgs

REFS = Path(__file__).parents[1] / "fixtures" / "refs"
GIB = 1 << 30
HOST = DeviceMemory("cpu", 16 * GIB, 8 * GIB)


def config(family="gemma4", **override):
    return ModelConfig.from_path(REFS / f"{family}-tiny", override)


def args(family="gemma4", **given):
    return ServerArgs(model_path=str(REFS / f"{family}-tiny"), **given)


def test_token_bytes_of_both_kinds():
    """Gemma 4 tiny, float32: 4 SWA layers of 4 heads x (16 + 16), 2 FULL layers of 2 heads x (32 + 32)."""
    demand = pool_demand(args(), config())
    assert (demand.full_token_bytes, demand.swa_token_bytes) == (2 * 2 * 64 * 4, 4 * 4 * 32 * 4)
    replicated = pool_demand(args(tp_size=4), config())
    assert replicated.full_token_bytes == 2 * 4 * 64 * 4  # two KV heads on four devices: each twice
    one_pool = pool_demand(args(disable_hybrid_swa_memory=True), config())
    assert (one_pool.full_token_bytes, one_pool.swa_token_bytes) == (1024 + 2048, 0)
    assert not one_pool.hybrid


@pytest.mark.parametrize(("overlap_off", "flight"), [(False, 2), (True, 1)])
def test_cap_rules_follow_the_flags(overlap_off, flight):
    rules = cap_rules(args(page_size=16, disable_overlap_schedule=overlap_off), config())
    assert (rules.page_size, rules.window, rules.chunk_size, rules.chunks_in_flight) == (16, 32, 4096, flight)
    assert cap_rules(args("llama", chunked_prefill_size=-1), config("llama")).chunk_size is None


def test_cpu_default_is_modest():
    a, c = args(), config()
    budget = kv_budget(a, c, pool_demand(a, c), HOST)
    assert budget.rank_bytes == 256 << 20
    two = args(tp_size=2, dp_size=2)
    assert kv_budget(two, c, pool_demand(two, c), HOST).rank_bytes == 128 << 20
    small = DeviceMemory("cpu", GIB, 400 << 20)
    assert kv_budget(a, c, pool_demand(a, c), small).rank_bytes == 100 << 20


def test_fraction_of_a_device():
    """Four devices, tensor axis 2: two devices' share less their weights make one rank's budget."""
    a, c = args(tp_size=4, dp_size=2, mem_fraction_static=0.5, device="tpu"), config()
    weights = weight_bytes(c, 4, 2)
    budget = kv_budget(a, c, pool_demand(a, c), DeviceMemory("tpu", GIB))
    assert budget.rank_bytes == 2 * (GIB // 2 - weights)
    assert "0.5 (from --mem-fraction-static) of 1.00 GiB tpu memory" in budget.source
    default = kv_budget(args(device="tpu"), c, pool_demand(a, c), DeviceMemory("tpu", GIB))
    assert "0.88 (by default)" in default.source


def test_weights_on_one_device():
    """345,926 float32 parameters; on a tensor axis of 2 the big ones are split, norms are not."""
    whole, half = weight_bytes(config(), 1, 1), weight_bytes(config(), 2, 1)
    assert whole == 345_926 * 4
    assert whole / 2 < half < whole * 0.52


def test_total_tokens_win():
    plan = make_plan(args(max_total_tokens=1000, page_size=16, swa_full_tokens_ratio=0.5), config(), HOST)
    assert (plan.full_tokens, plan.swa_tokens) == (992, 496)
    assert "FULL tokens from --max-total-tokens 1000" in plan.sources
    assert "SWA/FULL ratio from --swa-full-tokens-ratio 0.5" in plan.sources


def test_pool_too_small_is_refused_with_the_minimum():
    """D72: a small total that could never admit a request stops the start and names the minimum."""
    with pytest.raises(
        PoolConfigError, match=r"--max-total-tokens 512: .*minimum.*use --max-total-tokens \d+ or more"
    ):
        make_plan(args(max_total_tokens=512, page_size=256, swa_full_tokens_ratio=0.1), config(), HOST)


def test_total_beyond_the_memory_is_refused():
    with pytest.raises(PoolConfigError, match=r"--max-total-tokens 100000000: needs .* use at most"):
        make_plan(args(max_total_tokens=100_000_000), config(), HOST)


def test_fraction_that_leaves_nothing_is_refused():
    with pytest.raises(PoolConfigError, match=r"--mem-fraction-static 0.001: leaves no memory for KV"):
        make_plan(args(mem_fraction_static=0.001), config(), DeviceMemory("tpu", 64 << 20))


def test_a_tensor_axis_that_does_not_divide_is_refused_by_the_plan():
    """8 query heads on 16 devices: the dry run says so, not only the start."""
    with pytest.raises(
        ModelConfigError, match=r"8 query heads do not divide over a tensor axis of 16 \(--tp"
    ):
        make_plan(args(tp_size=16), config(), HOST)


def test_ratio_without_window_layers_is_refused():
    """D77: an explicit ratio is never ignored."""
    with pytest.raises(PoolConfigError, match=r"--swa-full-tokens-ratio 0.5: the model has no SWA layers"):
        make_plan(args("llama", swa_full_tokens_ratio=0.5), config("llama"), HOST)


def test_unknown_device_memory_needs_a_total():
    silent = DeviceMemory("gpu", None)
    with pytest.raises(PoolConfigError, match="gpu does not report its memory size; use --max-total-tokens"):
        make_plan(args(), config(), silent)
    assert make_plan(args(max_total_tokens=4096), config(), silent).full_tokens == 4096


def test_plan_text():
    plan = make_plan(args(max_total_tokens=1024, page_size=16), config(), HOST)
    assert plan_text(plan).splitlines() == [
        "KV plan: page size 16, 1 rank, 2.6 MiB per rank",
        "  FULL     1.0 MiB / 1.0 KiB per token -> 1,024 tokens per rank (64 pages + 1 for padding)",
        "  SWA      1.6 MiB / 2.0 KiB per token -> 816 tokens per rank (51 pages + 1 for padding)",
        "  window 32: a decoding request holds at most 96 SWA tokens",
        "  largest request 1,008 tokens (context length 4,096); 1.0 of them at once per rank",
        "  - FULL tokens from --max-total-tokens 1024",
        "  - SWA/FULL ratio 0.8 by default",
        "  - bounded by 8.00 GiB of free host memory",
    ]
