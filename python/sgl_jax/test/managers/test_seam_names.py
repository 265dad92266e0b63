"""The names of sglang-jax (CONTRACT 11) over real pools: a batch driven by hand, the adder, the scheduler's checks."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from sgl_jax.srt.managers.io_struct import SamplingParams
from sgl_jax.srt.managers.schedule_batch import (
    FINISH_ABORT,
    Req,
    ScheduleBatch,
    ScheduleReqsInfo,
    get_last_loc,
    global_server_args_dict,
    swa_eviction_interval,
    swa_eviction_peak_tokens,
)
from sgl_jax.srt.managers.schedule_policy import AddReqResult, PrefillAdder
from sgl_jax.srt.managers.scheduler import Scheduler
from sgl_jax.srt.managers.scheduler_output_processor_mixin import SchedulerOutputProcessorMixin
from sgl_jax.srt.mem_cache.base_prefix_cache import BasePrefixCache, ReclaimSchedule
from sgl_jax.srt.model_executor.forward_inputs import ForwardMode
from sgl_jax.test.managers.world import CACHES, make_world

MODEL = SimpleNamespace(sliding_window=4)


def request(rid, length, rank=0, new=8):
    return Req(rid, "", list(range(3, 3 + length)), SamplingParams(max_new_tokens=new), dp_rank=rank)


def batch_of(cache, reqs, page=4, overlap=False):
    world = make_world(cache=cache, page=page)
    memory = world.scheduler.memory
    for req in reqs:
        req.init_next_round_input(memory.cache)
        result = memory.cache.inc_lock_ref(req.last_node)
        req.cache_lock_params = result.to_dec_params()
    batch = ScheduleBatch.init_new(reqs, memory.rows, memory.allocator, memory.cache, MODEL, overlap, 1)
    return batch, world


@pytest.mark.parametrize("cache", CACHES)
def test_extend_decode_and_release_by_hand(cache):
    """Slots for the prompt, then one per decode step; a released request gives everything back."""
    reqs = [request("a", 6), request("b", 5)]
    batch, world = batch_of(cache, reqs)
    batch.prepare_for_extend()
    assert batch.is_hybrid and batch.forward_mode.is_extend()
    assert batch.prefix_lens == [0, 0] and batch.extend_lens == [6, 5]
    assert world.scheduler.memory.rows.read(reqs[0].req_pool_idx, 6).tolist() == [4, 5, 6, 7, 8, 9]
    for req in reqs:
        world.scheduler.memory.cache.cache_unfinished_req(req)
        req.output_ids.append(9)
    assert batch.check_decode_mem()
    batch.prepare_for_decode()
    assert batch.out_cache_loc.shape == (2,)
    assert [req.kv_allocated_len for req in reqs] == [7, 6] and reqs[0].decode_batch_idx == 1
    assert batch.retract_all(None) == reqs
    assert all(
        req.req_pool_idx is None and req.cache_lock_params is None and req.is_retracted for req in reqs
    )
    world.check_balanced()


def test_retract_keeps_the_last_request():
    reqs = [request(rid, 8) for rid in "abc"]
    batch, world = batch_of("unified", reqs)
    batch.prepare_for_extend()
    for req, count in zip(reqs, (3, 1, 2)):
        req.output_ids = [9] * count
    allocator = world.scheduler.memory.allocator
    held = allocator.alloc(allocator.available_size(0) - 4, dp_rank=0)
    retracted = batch.retract_decode(None)
    assert [req.rid for req in retracted] == ["b"] and [req.rid for req in batch.reqs] == ["a", "c"]
    allocator.free(held, dp_rank=0)
    batch.retract_all(None)
    world.check_balanced()


def test_decode_out_of_memory_says_so_even_when_the_cache_cannot():
    batch, world = batch_of("unified", [request("a", 8)])
    batch.prepare_for_extend()
    allocator = world.scheduler.memory.allocator
    held = allocator.alloc(allocator.available_size(0), dp_rank=0)
    with pytest.raises(RuntimeError, match=r"Decode out of memory.*\n.*full tokens"):
        batch.prepare_for_decode()

    def unavailable(rank):
        raise ValueError("no statistics")

    batch.tree_cache.full_evictable_size = unavailable
    with pytest.raises(RuntimeError, match=r"Decode out of memory.*\nunavailable \(ValueError\)"):
        batch.prepare_for_decode()
    del batch.tree_cache.full_evictable_size
    allocator.free(held, dp_rank=0)
    batch.retract_all(None)


def test_a_hybrid_batch_needs_a_cache_with_swa_support():
    memory = make_world().scheduler.memory

    class Plain(BasePrefixCache):
        reset = match_prefix = cache_finished_req = cache_unfinished_req = evict = inc_lock_ref = (
            dec_lock_ref
        ) = None

    with pytest.raises(ValueError, match="Plain cannot serve a hybrid model"):
        ScheduleBatch.init_new([], memory.rows, memory.allocator, Plain(), MODEL, False, 1)


# ------------------------------------------------------------------------------------------------------------------ reclaim
UNIFIED, CHUNK, LEGACY = (
    ReclaimSchedule(0, 1, True),
    ReclaimSchedule(0, 0, True),
    ReclaimSchedule(1, 1, False),
)


def fake_batch(schedule, mode, req, *, overlap, prefix=20):
    calls = []
    cache = SimpleNamespace(
        reclaim_schedule=schedule,
        evict_req_swa=lambda req, pre_len, dp_rank: calls.append((req.rid, pre_len, dp_rank)),
    )
    batch = SimpleNamespace(
        is_hybrid=True,
        model_config=MODEL,
        token_to_kv_pool_allocator=SimpleNamespace(page_size=4),
        forward_mode=mode,
        reqs_info=[ScheduleReqsInfo(reqs=[req], prefix_lens=[prefix])],
        tree_cache=cache,
        enable_overlap=overlap,
    )
    ScheduleBatch.maybe_evict_swa(batch)
    return calls


@pytest.mark.parametrize(
    ("schedule", "overlap", "due"),
    [
        (UNIFIED, False, [0, 4, 8]),
        (UNIFIED, True, [1, 5, 9]),
        (CHUNK, True, [0, 4, 8]),
        (LEGACY, False, [1, 5, 9]),
    ],
)
def test_decode_reclaims_on_the_schedule_of_the_cache(schedule, overlap, due):
    req, seen = request("a", 30), []
    for step in range(10):
        req.decode_batch_idx = step
        if fake_batch(schedule, ForwardMode.DECODE, req, overlap=overlap):
            seen.append(step)
    assert seen == due
    req.decode_batch_idx = due[0]
    assert fake_batch(schedule, ForwardMode.DECODE, req, overlap=overlap) == [("a", 29, 0)]


def test_extend_reclaims_on_the_processed_prefix(monkeypatch):
    """D37: with overlap the newest chunk is in flight, so the first two extends reclaim nothing and later ones a chunk less."""
    req = request("a", 30)
    monkeypatch.setitem(global_server_args_dict, "chunked_prefill_size", 8)
    assert fake_batch(UNIFIED, ForwardMode.EXTEND, req, overlap=False) == [("a", 20, 0)]
    req.extend_batch_idx = 1
    assert fake_batch(UNIFIED, ForwardMode.EXTEND, req, overlap=True) == []
    req.extend_batch_idx = 2
    assert fake_batch(CHUNK, ForwardMode.EXTEND, req, overlap=True) == [("a", 12, 0)]
    assert fake_batch(LEGACY, ForwardMode.EXTEND, req, overlap=False) == []


def test_over_a_bare_dual_allocator_the_batch_frees_the_tail_itself():
    memory = make_world(page=1).scheduler.memory
    req = request("a", 16)
    memory.rows.alloc([req])
    memory.rows.write((req.req_pool_idx, slice(0, 16)), memory.allocator.alloc(16, dp_rank=0))
    batch = SimpleNamespace(
        tree_cache=None, req_to_token_pool=memory.rows, token_to_kv_pool_allocator=memory.allocator
    )
    ScheduleBatch._evict_swa(batch, req, 16, 4, 1, dp_rank=0)
    assert req.swa_evicted_seqlen == 11
    row = memory.rows.read(req.req_pool_idx, 16)
    assert memory.allocator.count_swa_mapped(row, 0) == 5


# -------------------------------------------------------------------------------------------------------------------- adder
def matched(memory, rid, length, new=8):
    req = request(rid, length, new=new)
    req.init_next_round_input(memory.cache)
    return req


def test_adder_admits_by_both_pools_and_chunks_the_last():
    memory = make_world(page=4, swa_pages=14).scheduler.memory
    adder = PrefillAdder(4, memory.cache, memory.allocator, None, 1.0, 1000, 24)
    assert adder._swa_budget_for_req(100) == 24 and adder._swa_budget_for_req(2) == 16
    assert adder.add_one_req(matched(memory, "a", 8)) is AddReqResult.CONTINUE
    assert adder.rem_swa_token_offset == [16]
    chunked = matched(memory, "b", 40)
    assert adder.add_one_req(chunked) is AddReqResult.OTHER
    assert adder.new_chunked_reqs == [chunked] and len(chunked.fill_ids) == 16
    assert [req.rid for req in adder.can_run_list[0]] == ["a", "b"]
    assert chunked.cache_lock_params is not None


def test_adder_refuses_without_a_trace():
    """D32, D38: no SWA room: the request, its lock and the offsets are as before."""
    memory = make_world(page=4, swa_pages=4).scheduler.memory
    adder = PrefillAdder(4, memory.cache, memory.allocator, None, 1.0, 1000, 24)
    first, second = matched(memory, "a", 8), matched(memory, "b", 8)
    assert adder.add_one_req(first) is AddReqResult.CONTINUE
    assert adder.add_one_req(second) is AddReqResult.NO_TOKEN
    assert second.cache_lock_params is None and adder.rem_swa_token_offset == [16]
    second.fill_ids, second.extend_input_len = list(range(8)), 8
    assert adder.add_chunked_req(second) is second
    assert second.fill_ids == [] and second.extend_input_len == 0


def test_running_requests_reserve_what_is_missing_to_their_peak():
    memory = make_world(page=4).scheduler.memory
    req = request("r", 20, new=100)
    req.kv_allocated_len, req.swa_evicted_seqlen = 20, 12
    batch = SimpleNamespace(reqs_info=[ScheduleReqsInfo(reqs=[req])])
    adder = PrefillAdder(4, memory.cache, memory.allocator, batch, 0.5, 1000, 24)
    assert adder.rem_swa_token_offset == [swa_eviction_peak_tokens(4, 4) - 8]
    assert adder.rem_total_token_offset == [50]


# ---------------------------------------------------------------------------------------------------------------- scheduler
def test_small_functions():
    assert swa_eviction_interval(128, 256) == 256 and swa_eviction_interval(300, 128) == 256
    assert swa_eviction_peak_tokens(8, 4) == 8 + 8 + 8
    table = np.arange(20, dtype=np.int32).reshape(2, 10)
    assert get_last_loc(table, np.array([0, 1]), np.array([0, 3])).tolist() == [-1, 12]
    assert FINISH_ABORT("gone", 400).status == 400


def test_scheduler_answers_by_its_old_names():
    world = make_world(page=4)
    scheduler = world.scheduler
    world.submit("a", [5, 6, 7, 8, 9], 3)
    world.step()
    ok, why, count = scheduler.flush_cache()
    assert (ok, count) == (False, 0) and "not flushed" in why and not scheduler.is_fully_idle()
    assert scheduler._snapshot_swa_cache_ledger(require_idle=False)[0]["dp_rank"] == 0
    with pytest.raises(ValueError, match="request_owned"):
        scheduler._snapshot_swa_cache_ledger(require_idle=True)
    world.run()
    scheduler.check_tree_cache()
    scheduler.on_idle()
    assert scheduler.flush_cache() == (True, "cache flushed", 48 * 4)


@pytest.mark.parametrize(
    ("full", "message"),
    [
        ((30, 0, 0), r"\[dp=0\]\[full\] .*page-aligned"),
        ((44, 0, 0), r"\[dp=0\]\[full\] available=44 is outside"),
        ((32, 9, 0), r"\[dp=0\]\[full\] owned=9, reserved_capacity=8"),
        ((32, 1, 0), r"\[dp=0\]\[full\] owned=1, reserved_pages=2"),
        ((36, 1, 0), None),
    ],
)
def test_check_memory_bounds(full, message):
    """One owned token in one reserved page of four is accepted; the ledger audit judges what counters cannot."""
    available, evictable, protected = full

    class Dual:
        page_size = 4
        full_attn_allocator = swa_attn_allocator = SimpleNamespace(pages_per_rank=10)

        def full_available_size(self, dp_rank=0):
            return available

        def swa_available_size(self, dp_rank=0):
            return 40

    scheduler = Scheduler.__new__(Scheduler)
    scheduler.dp_size = 1
    scheduler.token_to_kv_pool_allocator = Dual()
    scheduler.req_to_token_pool = SimpleNamespace(size=2, available_size=lambda: 2)
    scheduler.tree_cache = SimpleNamespace(
        full_evictable_size=lambda rank: evictable,
        full_protected_size=lambda rank: protected,
        swa_evictable_size=lambda rank: 0,
        swa_protected_size=lambda rank: 0,
    )
    if message is None:
        scheduler.check_memory()
        scheduler.req_to_token_pool.available_size = lambda: 1
        message = "1 of 2 request rows"
    with pytest.raises(ValueError, match=message):
        scheduler.check_memory()


def test_a_chunked_abort_clears_both_owner_lists():
    """D30: row, slots and lock return, and nobody remembers the request; doing it twice is harmless."""
    req = request("a", 8)
    batch, world = batch_of("unified", [req])
    batch.prepare_for_extend()
    batch.reqs_info[0].chunked_req = req
    owner = SchedulerOutputProcessorMixin()
    owner.tree_cache, owner.chunked_reqs, owner.running_batch = batch.tree_cache, [req], batch
    for _ in range(2):
        owner._finalize_chunked_abort(req, 0)
    assert owner.chunked_reqs == [None] and batch.reqs_info[0].chunked_req is None
    world.check_balanced()
