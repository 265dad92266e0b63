"""ModelWorker from server arguments: pools match the plan, warm steps, limits, one-pool mode, debug checks."""

import functools
import logging
from pathlib import Path

import jax
import numpy as np
import pytest

from sgl_jax.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, SWATokenToKVPoolAllocator
from sgl_jax.srt.mem_cache.memory_pool import PoolSizeError, SWAKVPool
from sgl_jax.srt.model_executor import compile_cache
from sgl_jax.srt.model_executor.forward_inputs import ForwardMode
from sgl_jax.srt.model_executor.memory_budget import DeviceMemory, make_plan
from sgl_jax.srt.model_executor.worker import ModelWorker, resolve_model_config, step_limits
from sgl_jax.srt.server_args import ServerArgs
from sgl_jax.test.model_executor.driver import Driver, Sequence

REFS = Path(__file__).parents[1] / "fixtures" / "refs"
TINY = {
    "page_size": 16,
    "max_total_tokens": 1024,
    "swa_full_tokens_ratio": 0.5,
    "max_running_requests": 4,
    "chunked_prefill_size": 64,
    "context_length": 256,
    "precompile_token_paddings": (64,),
    "precompile_bs_paddings": (4,),
    "device": "cpu",
}


def arguments(family="gemma4", **changes):
    return ServerArgs(model_path=str(REFS / f"{family}-tiny"), **(TINY | changes))


@functools.cache
def worker():
    return ModelWorker(arguments(debug_cache=True))


def _reference(family):
    with np.load(REFS / f"{family}-tiny" / "expected.npz") as data:
        return data["greedy_prompts"].tolist(), data["greedy_tokens"].tolist()


def test_worker_serves_the_reference_prompts():
    w = worker()
    assert (w.max_batch, w.max_extend_tokens, w.vocab_size) == (4, 64, 384)
    assert (w.plan.full_pages, w.plan.swa_pages) == (64, 32)
    prompts, want = _reference("gemma4")
    got = Driver(w.launch, 16, 32, 64, 32).generate([prompts], 12, chunk=16, overlap=True)
    assert got == [[t[:12] for t in want]]


def test_array_sizes_are_checked_against_the_allocator():
    """D59: an allocator that believes in one page more than the arrays have stops the start."""
    pool = worker().kv_pool
    worker().check_allocator(SWATokenToKVPoolAllocator(1024, 512, pool, page_size=16))
    with pytest.raises(PoolSizeError, match="SWA pool layer"):
        worker().check_allocator(SWATokenToKVPoolAllocator(1024, 528, pool, page_size=16))


def test_debug_checks_refuse_a_wrong_page():
    drive = Driver(worker().launch, 16, 32, 64, 32)
    seq = Sequence([5, 6, 7], 3)
    seq.full, seq.swa = [65], [1]
    with pytest.raises(ValueError, match=r"full page ids of sequence 0 are outside 1..64: \[65\]"):
        drive.step(ForwardMode.EXTEND, [[(seq, 3, False)]])


def test_precompile_reports_progress(caplog):
    """One line per shape; afterwards an ordinary step compiles nothing, and a rare one says so."""
    with caplog.at_level(logging.INFO, logger="sgl_jax"):
        w = ModelWorker(arguments())
    lines = [r.message for r in caplog.records if "precompile [" in r.message]
    assert [line.rsplit(":", 1)[0] for line in lines] == [
        "precompile [1/2] decode rows=4",
        "precompile [2/2] extend tokens=64 rows=4",
    ]
    caplog.clear()
    before = w.runner._forward._cache_size(), w.runner._sample._cache_size()
    with caplog.at_level(logging.INFO, logger="sgl_jax"):
        Driver(w.launch, 16, 32, 64, 32).generate([_reference("gemma4")[0]], 3, chunk=16)
    assert (w.runner._forward._cache_size(), w.runner._sample._cache_size()) == before
    assert not caplog.records
    with caplog.at_level(logging.INFO, logger="sgl_jax"):
        step = [[(Sequence([1, 2, 3], 3), 3, False)]]
        Driver(w.launch, 16, 32, 64, 32).step(ForwardMode.EXTEND, step, logprobs=True, top=2).result()
    assert [r.message.split(":")[0] for r in caplog.records] == ["compiled at run time"]


@pytest.mark.parametrize("family", ["gemma4", "qwen3"])
def test_one_pool_for_all_layers(family):
    """--disable-hybrid-swa-memory, and a plain model: one slot space, no SWA arrays in the step."""
    hybrid = {"disable_hybrid_swa_memory": True} if family == "gemma4" else {}
    given = {k: v for k, v in TINY.items() if not k.startswith(("swa_", "precompile_"))}
    args = ServerArgs(model_path=str(REFS / f"{family}-tiny"), disable_precompile=True, **given, **hybrid)
    w = ModelWorker(args)
    assert not w.plan.demand.hybrid and w.plan.swa_tokens == 0
    w.check_allocator(PagedTokenToKVPoolAllocator(1024, 16, w.kv_pool))
    with pytest.raises(PoolSizeError, match="KV pool layer"):
        w.check_allocator(PagedTokenToKVPoolAllocator(1040, 16, w.kv_pool))
    prompts, want = _reference(family)
    got = Driver(w.launch, 16, None, 64, 0).generate([prompts[:1]], 12, chunk=64, overlap=True)
    assert got == [[want[0][:12]]]


@pytest.mark.parametrize(
    ("changes", "limits"),
    [
        ({}, (4, 64)),
        ({"max_running_requests": None}, (64, 64)),
        ({"chunked_prefill_size": -1}, (4, 256)),
        ({"chunked_prefill_size": 4096}, (4, 512)),  # the SWA pool holds no more
        ({"tp_size": 2, "dp_size": 2, "max_running_requests": 5}, (3, 64)),
    ],
)
def test_step_limits(changes, limits):
    args = arguments(**changes)
    config = resolve_model_config(args)
    found = step_limits(
        args, config, make_plan(args, config, DeviceMemory("cpu", 1 << 34, 1 << 33)), on_cpu=True
    )
    assert (found.max_batch, found.max_extend_tokens) == limits


def test_unknown_backend_names_the_flag():
    """D63: a kernel that is not there is refused with the option to change."""
    with pytest.raises(ValueError, match="--attention-backend"):
        from sgl_jax.srt.models.registry import build_model

        build_model(resolve_model_config(arguments()), worker().mesh, "pallas")


def test_host_only_pool_is_enough_for_a_model_free_worker():
    from sgl_jax.srt.model_executor.noop_worker import NoOpWorker

    pool = SWAKVPool.host_only(64, 32, 16)
    assert NoOpWorker(384, kv_pool=pool).kv_pool is pool


def test_cache_is_off_for_a_subset_that_does_not_start_at_the_first_device(monkeypatch, caplog):
    """D73: and the message says why."""
    before = jax.config.jax_enable_compilation_cache

    class Second:
        id, platform = 1, "cpu"

    try:
        with caplog.at_level(logging.WARNING, logger="sgl_jax"):
            assert compile_cache.enable_compile_cache([Second()]) is None
        assert not jax.config.jax_enable_compilation_cache
        assert "devices [1], not the first of the platform" in caplog.text
    finally:
        jax.config.update("jax_enable_compilation_cache", before)
