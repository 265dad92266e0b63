"""Faults of the request lifecycle, each as its smallest scenario on a whole scheduler (ids: docs/faults.md)."""

from __future__ import annotations

import numpy as np
import pytest

from sgl_jax.srt.managers.request import RequestState
from sgl_jax.test.managers.world import CACHES, make_world, prompt


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
    assert world.scheduler.prefill.plan() == [[]]
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
