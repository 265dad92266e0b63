"""Faults of admission, retraction and ranks, each as its smallest scenario on a whole scheduler (ids: docs/faults.md)."""

from __future__ import annotations

import numpy as np
import pytest

from sgl_jax.srt.managers.io_struct import GenerateReq, SamplingParams
from sgl_jax.srt.managers.request import RequestState, WaitReason
from sgl_jax.srt.mem_cache.base_prefix_cache import EvictParams
from sgl_jax.test.managers.world import CACHES, make_world, prompt, until


def test_admission_counts_each_request_once():
    """D38: the window pool takes one request's chunk, window and page, not two: the second waits, nobody is retracted."""
    world = make_world(page=4, window=16, chunk=16, swa_pages=24, full_pages=200, overlap=False)
    world.submit("a", prompt(60), 40)
    world.submit("b", prompt(60, first=200), 40)
    world.step()
    assert world.req("a").seat >= 0 and world.req("b").seat < 0
    until(world, lambda: world.scheduler.roster.chunked[0] is None)
    world.step()
    assert world.req("b").seat < 0 and world.req("b").wait_reason is WaitReason.SWA_POOL
    world.run()
    assert world.scheduler.counters.retracted == [0]
    assert world.outputs["b"] == world.expected("b", 40)


@pytest.mark.parametrize("pool", ["full", "swa"])
@pytest.mark.parametrize("overlap", [True, False])
def test_the_last_request_that_cannot_continue_is_ended(pool, overlap):
    """D39: one running request, no page left: it ends with an out-of-memory reason, and the server keeps serving."""
    world = make_world(page=4, window=8, overlap=overlap)
    allocator = world.scheduler.memory.allocator
    sub = getattr(allocator, f"{pool}_attn_allocator")
    world.submit("a", prompt(6), 60)
    until(world, lambda: "a" in world.outputs)
    held = sub.alloc(sub.available_size(0), dp_rank=0)
    until(world, lambda: "a" in world.ends)
    assert world.finish_type("a") == "abort"
    assert "out of memory" in world.ends["a"][0].finish.message
    assert f"{pool}: capacity" in world.ends["a"][0].finish.message
    sub.free(held, dp_rank=0)
    world.submit("b", prompt(6), 6)
    world.run()
    assert world.outputs["b"] == world.expected("b", 6)
    world.check_balanced()


@pytest.mark.parametrize("cache", CACHES)
def test_reclaim_comes_before_any_retraction(cache):
    """D40: the window pool is full, but every request holds out-of-window pages: a forced reclaim, zero retractions."""
    world = make_world(
        cache=cache, page=4, window=40, swa_pages=72, full_pages=200, chunk=64, overlap=False, seats=2
    )
    world.submit("a", prompt(4), 140)
    world.submit("b", prompt(4, first=300), 140)
    until(world, lambda: world.scheduler.roster.seats[0].processed.max() >= 60)
    memory = world.scheduler.memory
    seats = world.scheduler.roster.seats[0]
    assert seats.processed.max() - 40 - 4 - seats.reclaimed.min() >= 4, "nobody could give back a page"
    held = memory.allocator.swa_attn_allocator.alloc(memory.available(0).swa // 4 * 4, dp_rank=0)
    world.step(6)
    assert world.scheduler.counters.retracted == [0]
    assert world.scheduler.roster.running_count == 2
    memory.allocator.swa_attn_allocator.free(held, dp_rank=0)
    world.run()
    for rid in "ab":
        assert world.outputs[rid] == world.expected(rid, 140)


@pytest.mark.parametrize("cache", CACHES)
def test_a_prompt_larger_than_the_window_pool_is_chunked_down(cache):
    """D41: chunk 64 and a prompt of 60 over a window pool of 44 slots: cut to fit, and the short prompt behind it is answered."""
    world = make_world(cache=cache, page=4, window=4, chunk=64, swa_pages=11)
    world.submit("long", prompt(60), 3)
    world.submit("short", prompt(5, first=200), 3)
    world.run()
    for rid in ("long", "short"):
        assert world.outputs[rid] == world.expected(rid, 3)
    world.check_balanced()


def test_a_prompt_that_can_never_fit_is_refused_at_entry():
    """D41: without chunking the same prompt is a 400 with limit and flag, and nobody behind it starves."""
    world = make_world(page=4, window=4, chunk=None, swa_pages=11)
    world.submit("long", prompt(60), 3)
    world.submit("short", prompt(5), 3)
    (end,) = world.ends["long"]
    assert end.finish.status == 400 and "--swa-full-tokens-ratio" in end.finish.message
    world.run()
    assert world.outputs["short"] == world.expected("short", 3)


@pytest.mark.parametrize("overlap", [True, False])
def test_a_request_is_not_starved_by_slots_it_holds_itself(overlap):
    """D42: chunk cache, a window pool of less than two chunks and one long prompt: its own tail is reclaimed before it waits."""
    world = make_world(cache="chunk", page=4, window=4, chunk=32, swa_pages=12, overlap=overlap)
    world.submit("a", prompt(200), 4)
    world.run()
    assert world.outputs["a"] == world.expected("a", 4)
    world.check_balanced()


def test_an_extend_that_takes_all_that_is_left_can_be_allocated():
    """D43: room == chunk length at page 4: one page stays back, and allocation after admission never fails."""
    world = make_world(page=4, window=4, chunk=16, swa_pages=9, overlap=False)
    for i in range(6):
        world.submit(f"r{i}", prompt(37 + i, first=3 + 50 * i), 2)
    world.run()
    for i in range(6):
        assert world.outputs[f"r{i}"] == world.expected(f"r{i}", 2)
    world.check_balanced()


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("chunk", [None, 8])
@pytest.mark.parametrize(("page", "window", "swa_pages"), [(1, 2, 7), (4, 3, 5)])
def test_an_accepted_request_can_be_served_alone(cache, chunk, page, window, swa_pages):
    """D44: the smallest window pool the start accepts, a prompt that just fits it: decode goes on beside its own locked prompt."""
    length = swa_pages * page - page - (page > 1)
    world = make_world(
        cache=cache,
        page=page,
        window=window,
        chunk=chunk and chunk * page,
        swa_pages=swa_pages,
        full_pages=60,
    )
    world.submit("a", prompt(length), 20)
    world.run()
    assert world.outputs["a"] == world.expected("a", 20)
    world.submit("b", [*prompt(length - page), 990], 20)  # its match locks what the first one left
    world.run()
    assert world.outputs["b"] == world.expected("b", 20)
    assert world.scheduler.counters.retracted == [0]
    world.check_balanced()


@pytest.mark.parametrize("cache", CACHES)
def test_a_lock_of_nearly_two_windows_leaves_room_to_decode(cache):
    """D44: the smallest window pool, a short new leaf below a whole window: the lock of both is narrowed, nobody is ended."""
    world = make_world(cache=cache, page=4, window=5, chunk=64, swa_pages=6, full_pages=50, overlap=False)
    world.submit("seed", prompt(13), 1)
    world.run()
    world.submit("a", prompt(17), 40)
    world.run()
    assert world.outputs["a"] == world.expected("a", 40)
    world.check_balanced()


def test_what_a_retracted_request_generated_may_outgrow_a_step_without_chunking():
    """D44: prompt and output together exceed the window pool; on its return the request is prefilled in pieces, not ended."""
    world = make_world(page=1, window=4, chunk=None, swa_pages=24, full_pages=90)
    world.submit("a", prompt(20), 40)
    until(world, lambda: world.scheduler.roster.seats[0].generated.max() >= 20)
    world.control("pause", mode="retract")
    world.control("continue")
    world.run()
    assert world.outputs["a"] == world.expected("a", 40)
    world.check_balanced()


def test_output_is_clipped_to_what_admission_can_grant():
    """D44: pool 64, page 2, a large max output: accepted, admitted, and ended by length at what fits."""
    world = make_world(cache="plain", page=2, full_pages=32, context=4096)
    world.submit("a", prompt(10), 1 << 20)
    world.run()
    (end,) = world.ends["a"]
    assert (end.finish.type, end.completion_tokens) == ("length", 64 - 2 - 10)
    assert world.outputs["a"] == world.expected("a", 52)


def test_decode_demand_is_counted_in_pages():
    """D45: B requests all on a page boundary need B pages; B pages less one token are not enough."""
    memory = make_world(cache="plain", page=32, full_pages=16, chunk=32).scheduler.memory
    assert memory.decode_demand(np.array([33, 65, 97], np.int32)) == 96
    assert memory.decode_demand(np.array([32, 64, 34], np.int32)) == 0
    world = make_world(cache="plain", page=32, full_pages=16, chunk=32, overlap=False)
    for i in range(3):
        world.submit(f"r{i}", prompt(32, first=3 + 50 * i), 20)
    until(world, lambda: world.scheduler.roster.seats[0].decoding.sum() == 3)
    allocator = world.scheduler.memory.allocator
    held = allocator.alloc(allocator.available_size(0) - 64, dp_rank=0)
    world.step()
    assert world.scheduler.counters.retracted == [1]
    allocator.free(held, dp_rank=0)
    world.run()
    for i in range(3):
        assert world.outputs[f"r{i}"] == world.expected(f"r{i}", 20)


@pytest.mark.parametrize("cache", ["unified", "legacy"])
def test_resuming_evicts_what_it_counts_as_room(cache):
    """D46: the pools are full of evictable tree slots when a retracted request comes back: they are evicted, it goes on."""
    world = make_world(cache=cache, full_pages=80, swa_pages=60)
    world.submit("a", prompt(10), 20)
    until(world, lambda: len(world.outputs.get("a", [])) > 0)
    world.control("pause", mode="retract")
    world.control("continue")
    memory = world.scheduler.memory
    for i in range(6):
        world.submit(f"fill{i}", prompt(30, first=100 + 40 * i), 2)
    world.run()
    assert memory.evictable(0).full > 0
    assert world.outputs["a"] == world.expected("a", 20)
    world.submit("again", prompt(60, first=700), 4)
    world.run()
    assert world.outputs["again"] == world.expected("again", 4)
    world.check_balanced()


@pytest.mark.parametrize("overlap", [True, False])
def test_only_the_short_rank_retracts(overlap):
    """D48: rank 0 runs out, rank 1 has plenty and three requests: rank 1 loses nobody."""
    world = make_world(
        page=4, dp=2, full_pages=16, swa_pages=40, chunk=16, overlap=overlap, conservativeness=0.01
    )
    for i in range(3):
        world.submit(f"full{i}", prompt(8, first=3 + 60 * i), 40, dp_rank=0)
        world.submit(f"roomy{i}", prompt(4, first=400 + 60 * i), 10, dp_rank=1)
    world.run()
    assert world.scheduler.counters.retracted[0] > 0
    assert world.scheduler.counters.retracted[1] == 0
    for rid, new in [(f"full{i}", 40) for i in range(3)] + [(f"roomy{i}", 10) for i in range(3)]:
        assert world.outputs[rid] == world.expected(rid, new)
    world.check_balanced()


@pytest.mark.parametrize("wish", [7, -1, "1", True, 1.0])
def test_a_forged_rank_is_reassigned(wish, caplog):
    """D51: a rank outside the server's is never used to index anything; the reported rank is the scheduler's."""
    world = make_world(dp=2, dp_policy="min_running_queue")
    world.submit("busy", prompt(4), 3, dp_rank=0)

    message = GenerateReq(
        rid="a", input_ids=prompt(4), sampling=SamplingParams(max_new_tokens=2, temperature=0.0)
    )
    message.dp_rank = wish
    world.prompts["a"] = prompt(4)
    world.scheduler.handle(message)
    world.run()
    assert world.ends["a"][0].dp_rank == 1
    assert any("Reassigned" in record.message for record in caplog.records)


@pytest.mark.parametrize("cache", CACHES)
def test_concurrency_follows_the_live_window(cache):
    """D79: S = 100 windows and 50 long outputs: about S / (W + P + interval) run together, none is retracted (D32 with it)."""
    window = 8
    world = make_world(
        cache=cache,
        window=window,
        swa_pages=100 * window,
        full_pages=20_000,
        seats=64,
        context=2048,
        max_prefill=4096,
        chunk=64,
    )
    for i in range(50):
        world.submit(f"r{i}", prompt(4, first=3 + 7 * i), 80)
    world.step(60)
    running = world.scheduler.roster.running_count
    assert running >= 100 * window // (2 * window + 2) - 6
    world.run()
    assert world.scheduler.counters.retracted == [0]
    for i in range(50):
        assert world.outputs[f"r{i}"] == world.expected(f"r{i}", 80)


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize(("page", "window"), [(256, 128), (4, 3), (1, 6)])
def test_no_reclaim_call_frees_nothing(cache, page, window):
    """D80: over a thousand decode steps every reclaim gives back at least a page."""
    world = make_world(
        cache=cache,
        page=page,
        window=window,
        full_pages=1100 // page + 8,
        swa_pages=1100 // page + 8,
        context=2048,
        chunk=256,
        noop=True,
        max_prefill=256,
    )
    freed = []
    reclaim = world.scheduler.memory.reclaim

    def watch(req, processed, rank):
        before = req.swa_evicted_seqlen
        reclaim(req, processed, rank)
        if req.state is RequestState.DECODE:
            freed.append(req.swa_evicted_seqlen - before)

    world.scheduler.memory.reclaim = watch
    world.submit("a", prompt(20), 1000)
    world.run()
    assert freed and min(freed) >= page
    world.check_balanced()


def test_evictable_counts_are_evicted_before_admission_fails():
    """Rule 10, D27: a pool full of evictable tree slots admits a new prompt by evicting exactly what it counted."""
    world = make_world(page=4, full_pages=20, swa_pages=20)
    for i in range(6):
        world.submit(f"r{i}", prompt(20, first=3 + 50 * i), 3)
    world.run()
    memory = world.scheduler.memory
    assert memory.available(0).full < 40
    evicted = []
    evict = memory.cache.evict

    def watch(params: EvictParams):
        evicted.append((params.num_tokens, params.swa_num_tokens))
        return evict(params)

    memory.cache.evict = watch
    world.submit("new", prompt(30, first=600), 3)
    world.run()
    assert world.outputs["new"] == world.expected("new", 3)
    assert evicted and all(tokens % 4 == 0 for pair in evicted for tokens in pair)
