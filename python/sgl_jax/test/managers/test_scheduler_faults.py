"""Scheduler faults that users of such servers met, each as its smallest scenario on a whole scheduler (ids: docs/faults.md)."""

from __future__ import annotations

import numpy as np
import pytest

from sgl_jax.srt.managers.io_struct import ControlReq
from sgl_jax.srt.managers.request import RequestState, WaitReason
from sgl_jax.srt.mem_cache.base_prefix_cache import EvictParams
from sgl_jax.test.managers.world import CACHES, VOCAB, make_world


def prompt(length, first=3):
    return [first + i % (VOCAB - first) for i in range(length)]


def until(world, condition, limit=2000):
    for _ in range(limit):
        if condition():
            return
        world.step()
    raise AssertionError("condition not reached")


# ------------------------------------------------------------------------------------------------------ request lifecycle
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("how", ["abort", "abort_all", "pause_abort"])
def test_abort_between_chunks_releases_everything(cache, overlap, how):
    """D30: a prompt of three chunks, aborted after the first: row, both pools and locks return; one terminal message."""
    world = make_world(cache=cache, page=4, overlap=overlap)
    world.submit("a", prompt(24))
    world.step()
    assert world.req("a").state is RequestState.PREFILL
    if how == "abort":
        world.abort("a")
    elif how == "abort_all":
        world.abort(abort_all=True)
    else:
        world.control("pause", mode="abort")
        world.control("continue")
    world.run()
    assert world.finish_type("a") == "abort"
    world.check_balanced()


@pytest.mark.parametrize("cache", CACHES)
def test_retract_between_chunks_returns_everything(cache):
    """D30: pause with mode retract meets a request between its chunks; it starts over and ends as if nothing happened."""
    world = make_world(cache=cache, page=4)
    world.submit("a", prompt(24), 6)
    world.step(2)
    world.control("pause", mode="retract")
    assert world.req("a").state is RequestState.WAITING and world.scheduler.roster.running_count == 0
    world.check_books()
    world.control("continue")
    world.run()
    assert world.outputs["a"] == world.expected("a", 6)
    world.check_balanced()


@pytest.mark.parametrize("cache", ["unified", "legacy"])
def test_an_abort_leaves_the_shared_prefix_to_the_tree(cache):
    """D31: chunk 1 is in the tree; the abort frees only what is behind it, so a later hit on it reads the right tokens."""
    world = make_world(cache=cache, overlap=False)
    world.submit("a", prompt(24))
    world.step(2)
    world.abort("a")
    world.submit("other", prompt(40, first=500), 4)
    world.submit("b", prompt(24), 4)
    world.run()
    assert world.ends["b"][0].cached_tokens > 0
    assert world.outputs["b"] == world.expected("b", 4)
    world.check_balanced()


@pytest.mark.parametrize("overlap", [True, False])
def test_a_refused_chunk_leaves_the_request_as_it_was(overlap):
    """D32: no SWA room for the next chunk: nothing of it is marked as computed, nothing of length zero is launched."""
    world = make_world(page=4, window=4, chunk=8, swa_pages=24, overlap=overlap)
    lengths = []
    launch = world.worker.launch

    def watch(step):
        lengths.extend(int(n) for rank in step.ranks for n in rank.extend_lens)
        return launch(step)

    world.worker.launch = watch
    allocator = world.scheduler.memory.allocator
    world.submit("a", prompt(40), 4)
    world.step()
    held = allocator.swa_attn_allocator.alloc(allocator.swa_available_size(0), dp_rank=0)
    request = world.req("a")
    world.scheduler.drain()
    before = list(request.fill_ids)
    assert world.scheduler.prefill.plan() == [[]] or len(world.req("a").fill_ids) > len(before)
    while world.scheduler.prefill.plan() != [[]]:
        pytest.fail("a chunk was planned without room")
    assert request.fill_ids == before and request.kv_allocated_len == len(before)
    allocator.swa_attn_allocator.free(held, dp_rank=0)
    world.run()
    assert world.outputs["a"] == world.expected("a", 4)
    assert 0 not in lengths
    world.check_balanced()


@pytest.mark.parametrize("overlap", [True, False])
def test_a_chunked_request_keeps_its_row(overlap):
    """D33: two rows, three requests, one in chunks: its row stays its own, and launched steps hold copies."""
    world = make_world(seats=2, chunk=8, overlap=overlap)
    seen = []
    launch = world.worker.launch

    def keep(step):
        seen.extend(
            (rank.full_pages, rank.full_pages.copy(), rank.full_loc, rank.full_loc.copy())
            for rank in step.ranks
        )
        return launch(step)

    world.worker.launch = keep
    for rid, length in (("a", 30), ("b", 5), ("c", 6)):
        world.submit(rid, prompt(length, first=3 + 40 * ord(rid[0]) % 300), 5)
    world.step()
    row = world.req("a").req_pool_idx
    while world.req("a").state is RequestState.PREFILL:
        assert world.req("a").req_pool_idx == row
        world.step()
    world.run()
    for rid in "abc":
        assert world.outputs[rid] == world.expected(rid, 5)
    for pages, pages_then, loc, loc_then in seen:
        assert np.array_equal(pages, pages_then) and np.array_equal(loc, loc_then)
    assert not any(np.shares_memory(pages, world.scheduler.memory.table) for pages, *_ in seen)
    world.check_balanced()


def test_flush_waits_for_the_result_in_flight():
    """D34: the last token was launched but not processed: not idle. The flush itself settles the step, then flushes."""
    world = make_world()
    world.submit("a", prompt(4), 1)
    world.step()
    assert len(world.scheduler.pipeline) == 1
    assert not world.scheduler.idle.is_fully_idle()
    assert "1 launched step(s) not processed yet" in world.scheduler.idle.pending()
    assert world.control("flush_cache").ok
    assert world.outputs["a"] == world.expected("a", 1)
    world.check_balanced()


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("again", [False, True])
def test_an_abort_waits_for_the_chunk_in_flight(cache, again):
    """D36: launch a chunk, abort, deliver the result: one clean-up, nothing of it enters the tree, one terminal message."""
    world = make_world(cache=cache, overlap=True)
    world.submit("a", prompt(24))
    world.step()
    assert world.scheduler.pipeline.carries(world.req("a"))
    tree_before = world.scheduler.memory.cache.total_size()
    world.abort("a")
    if again:
        world.abort("a")
    assert "a" not in world.ends
    world.run()
    world.abort("a")
    world.run()
    assert world.finish_type("a") == "abort"
    assert world.scheduler.memory.cache.total_size() == tree_before
    world.check_balanced()


@pytest.mark.parametrize("page", [1, 4])
@pytest.mark.parametrize("cache", CACHES)
def test_reclaim_never_runs_ahead_of_the_device(cache, page):
    """D37: with a step in flight the reclaim basis is the processed length, so overlap on and off generate the same."""
    outputs = []
    for overlap in (True, False):
        world = make_world(cache=cache, page=page, window=3, swa_pages=40, chunk=8, overlap=overlap)
        bases = []
        reclaim = world.scheduler.memory.reclaim

        def watch(req, processed, rank, world=world, bases=bases, reclaim=reclaim):
            in_flight = world.scheduler.pipeline.carries(req)
            known = len(req.origin_input_ids) + len(req.output_ids)
            bases.append((processed, known - 1 if req.output_ids else req.kv_allocated_len, in_flight))
            reclaim(req, processed, rank)

        world.scheduler.memory.reclaim = watch
        for i in range(4):
            world.submit(f"r{i}", prompt(10 + 7 * i, first=3 + 100 * i), 30)
        world.run()
        assert bases and all(processed <= known for processed, known, _ in bases)
        outputs.append(world.outputs)
        for i in range(4):
            assert world.outputs[f"r{i}"] == world.expected(f"r{i}", 30)
    assert outputs[0] == outputs[1]


# --------------------------------------------------------------------------------------------------------------- admission
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
    world.run() if pool == "never" else until(world, lambda: "a" in world.ends)
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
    world.scheduler.control.paused = True
    memory = world.scheduler.memory
    world.scheduler.control.paused = False
    for i in range(6):
        world.submit(f"fill{i}", prompt(30, first=100 + 40 * i), 2)
    world.run()
    assert memory.evictable(0).full > 0
    assert world.outputs["a"] == world.expected("a", 20)
    world.submit("again", prompt(60, first=700), 4)
    world.run()
    assert world.outputs["again"] == world.expected("again", 4)
    world.check_balanced()


# ----------------------------------------------------------------------------------------------------------------- DP ranks
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
    request = world.scheduler
    from sgl_jax.srt.managers.io_struct import GenerateReq, SamplingParams

    message = GenerateReq(
        rid="a", input_ids=prompt(4), sampling=SamplingParams(max_new_tokens=2, temperature=0.0)
    )
    message.dp_rank = wish
    world.prompts["a"] = prompt(4)
    request.handle(message)
    world.run()
    assert world.ends["a"][0].dp_rank == 1
    assert any("Reassigned" in record.message for record in caplog.records)


# ------------------------------------------------------------------------------------------------------------ server calls
def test_flush_answers_when_idle_and_when_busy():
    """D64: idle: ok and nothing leaked; busy: refused with a reason; an unknown call is answered, too."""
    world = make_world()
    assert world.control("flush_cache").ok
    world.submit("a", prompt(4), 30)
    world.step(3)
    busy = world.control("flush_cache")
    assert not busy.ok and "1 running request(s)" in busy.data["message"]
    assert "timeout" in busy.data["message"]
    unknown = world.control("no_such_call")
    assert not unknown.ok and "flush_cache" in unknown.data["message"]
    world.run()
    assert world.control("flush_cache").ok


@pytest.mark.parametrize("overlap", [True, False])
def test_generate_then_flush_a_hundred_times(overlap):
    """D65: a client that has its last token may flush at once: what is left in flight is settled, never called busy."""
    world = make_world(overlap=overlap)
    for i in range(100):
        world.submit(f"r{i}", prompt(6), 3)
        until(world, lambda i=i: f"r{i}" in world.ends)
        assert world.control("flush_cache").ok


def test_flush_resets_every_cache_like_state():
    """D66: after a flush availability is the cold capacity on every rank, mappings are empty, counters go on."""
    world = make_world(page=4, dp=2)
    for i in range(6):
        world.submit(f"r{i}", prompt(20, first=3 + 40 * i), 9)
    world.run()
    before = world.scheduler.counters.totals()
    reply = world.control("flush_cache")
    memory = world.scheduler.memory
    for rank in range(2):
        assert memory.available(rank) == memory.capacity(rank)
        assert memory.evictable(rank).full == memory.evictable(rank).swa == 0
        assert not memory.allocator.full_to_swa_index_mapping[rank].any()
        pools = reply.data["ranks"][rank]["pools"]
        assert pools["full"]["leaked"] == pools["swa"]["leaked"] == 0
        assert pools["full"]["available"] == pools["full"]["capacity"] == 256
    assert sum(reply.data["ranks"][r]["pools"]["full"]["freed"] for r in range(2)) > 0
    assert memory.rows.available_size() == memory.rows.size
    assert world.scheduler.counters.totals() == before


def test_a_full_queue_refuses_at_once():
    """D67: every request beyond the queue limit gets its 503 now; none stays open."""
    world = make_world(seats=1, max_queued=1)
    for i in range(12):
        world.submit(f"r{i}", prompt(4), 20)
        if i == 0:
            world.step()
    refused = [rid for rid, ends in world.ends.items() if ends[0].finish.status == 503]
    assert len(refused) == 10 and "--max-queued-requests" in world.ends[refused[0]][0].finish.message
    world.run()
    assert len(world.ends) == 12


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize(
    "when", ["waiting", "first_chunk", "between_chunks", "decoding", "last_in_flight", "finished"]
)
def test_a_disconnect_frees_within_a_step(when, overlap):
    """D68: the abort of a vanished client works before the first token, between chunks and mid-decode, once or twice."""
    world = make_world(page=4, overlap=overlap, seats=2)
    world.submit("keep", prompt(5, first=200), 30)
    steps = {
        "waiting": 0,
        "first_chunk": 1,
        "between_chunks": 2,
        "decoding": 7,
        "last_in_flight": 7,
        "finished": 60,
    }
    world.submit("a", prompt(24), 2 if when == "last_in_flight" else 20)
    world.step(steps[when])
    world.abort("a")
    world.abort("a")
    world.step(2)
    assert "a" not in world.scheduler.roster.by_rid
    assert len(world.ends["a"]) == 1
    world.check_books()
    world.run()
    assert world.outputs["keep"] == world.expected("keep", 30)
    world.check_balanced()


def test_one_pending_flush_at_a_time():
    """D69: a second flush is refused as already in progress; expiry leaves the server working."""
    world = make_world(full_pages=400)
    world.submit("a", prompt(4), 300)
    world.step(3)
    world.scheduler.handle(ControlReq(kind="flush_cache", req_id="one", args={"timeout": 10}))
    assert world.replies == []
    world.scheduler.handle(ControlReq(kind="flush_cache", req_id="two", args={"timeout": 10}))
    assert world.replies[-1].req_id == "two" and "already in progress" in world.replies[-1].data["message"]
    world.now += 11
    world.step()
    assert world.replies[-1].req_id == "one" and not world.replies[-1].ok
    assert "running request(s)" in world.replies[-1].data["message"]
    world.scheduler.handle(ControlReq(kind="flush_cache", req_id="three", args={"timeout": 10}))
    world.run()
    world.step()
    assert world.replies[-1].req_id == "three" and world.replies[-1].ok
    assert world.outputs["a"] == world.expected("a", 300)


# ----------------------------------------------------------------------------------------------------------------- metrics
def test_readmission_is_not_a_hit():
    """D70: random prompts and forced retractions: the hit counter stays at zero; the re-found tokens are counted apart."""
    world = make_world(page=1, window=64, swa_pages=900, full_pages=900, chunk=64)
    for i in range(4):
        world.submit(f"r{i}", prompt(30, first=3 + 200 * i), 40)
    world.step(8)
    world.control("pause", mode="retract")
    world.control("continue")
    world.run()
    counters = world.scheduler.counters
    assert counters.cached_tokens == [0] and counters.prompt_tokens == [120]
    assert counters.retracted == [4] and counters.readmitted_cached_tokens[0] > 0
    assert {end.cached_tokens for (end,) in world.ends.values()} == {0}


def test_hit_counters_are_monotonic():
    """D71: one warm prefill, then many decode steps: the counters never go back and say the same at every scrape."""
    world = make_world()
    world.submit("a", prompt(20), 2)
    world.run()
    world.submit("b", prompt(20), 100)
    world.step(3)
    hit = world.scheduler.heartbeat().stats["counters"]["cached_tokens_total"]
    assert hit[0] > 0
    for _ in range(90):
        world.step()
        assert world.scheduler.heartbeat().stats["counters"]["cached_tokens_total"] == hit


# ------------------------------------------------------------------------------------------------------------- performance
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
