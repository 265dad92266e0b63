"""Faults of server calls and counters, each as its smallest scenario on a whole scheduler (ids: docs/faults.md)."""

from __future__ import annotations

import pytest

from sgl_jax.srt.managers.io_struct import ControlReq
from sgl_jax.srt.mem_cache.errors import LedgerViolationError
from sgl_jax.test.managers.world import make_world, prompt, until


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


@pytest.mark.parametrize("left", ["mapping", "slot"])
def test_a_flush_that_leaves_something_behind_is_loud(tmp_path, left):
    """RFC 6, D66: after a flush every rank is cold again; a mapping entry or a slot that is still taken raises."""
    world = make_world(page=4, dp=2, crash_dir=str(tmp_path))
    world.submit("a", prompt(20), 3)
    world.run()
    allocator = world.scheduler.memory.allocator
    clear = allocator.clear

    def incomplete():
        clear()
        if left == "mapping":
            allocator.full_to_swa_index_mapping[1][4] = 4
        else:
            allocator.alloc(4, dp_rank=1)

    allocator.clear = incomplete
    with pytest.raises(LedgerViolationError, match="dp=1"):
        world.control("flush_cache")


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
