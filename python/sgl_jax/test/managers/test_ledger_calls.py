"""The ledger as the scheduler gives it: who owns a slot, proof that looking changed nothing, and what a violation leaves behind."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from sgl_jax.srt.managers.io_struct import SamplingParams
from sgl_jax.srt.managers.request import Req
from sgl_jax.srt.managers.scheduler import Scheduler
from sgl_jax.srt.mem_cache.errors import LedgerViolationError
from sgl_jax.test.managers.world import CACHES, make_world, prompt


# ------------------------------------------------------------------------------------------------------- who owns a slot
@pytest.mark.parametrize("cache", ["unified", "legacy"])
def test_the_owner_of_a_slot_is_named(cache):
    """FULL and SWA slots of rank 1: a tree node, a request with its position, a free page, padding, and beyond the pool."""
    world = make_world(cache=cache, page=4, dp=2, overlap=False)
    world.submit("a", prompt(10), 20, dp_rank=1)
    world.step(3)
    req, memory = world.req("a"), world.scheduler.memory
    row = memory.rows.read(req.req_pool_idx, 10)

    def owner(slot, pool="full", rank=1):
        answer = world.control("ledger", slot=int(slot), pool=pool, rank=rank).data["slot"]
        assert (answer["slot"], answer["pool"], answer["dp_rank"]) == (slot, pool, rank)
        assert answer["description"].startswith(f"rank {rank}, {pool} slot {slot} — ")
        (only,) = answer["owners"]
        return only["kind"], only["detail"]

    assert owner(row[0])[0] == owner(row[7])[0] == "tree"
    assert owner(row[9]) == ("request", f"rid a row {req.req_pool_idx} position 9")
    assert owner(memory.swa_slots(row[9:10], 1)[0], "swa") == (
        "request",
        f"rid a row {req.req_pool_idx} position 9",
    )
    assert owner(row[9], rank=0)[0] == "free"
    assert owner(0)[0] == "reserved" and owner(10**6)[0] == "out_of_range"
    assert "slot" not in world.control("ledger").data


@pytest.mark.parametrize(
    ("question", "says"),
    [
        ({"slot": "5"}, "slot is '5', must be an integer, 0 or more"),
        ({"slot": True}, "slot is True"),
        ({"slot": -1}, "slot is -1"),
        ({"slot": 5, "pool": "both"}, "pool is 'both', must be one of full, swa"),
        ({"slot": 5, "rank": 1}, "rank is 1, must be an integer in 0..0"),
        ({"slot": 5, "rank": None}, "rank is None"),
    ],
)
def test_a_question_that_cannot_be_asked_is_400(question, says):
    reply = make_world().control("ledger", **question)
    assert not reply.ok and reply.data["status"] == 400 and says in reply.data["message"]


# ------------------------------------------------------------------------------------------------------ looking is harmless
@pytest.mark.parametrize("cache", CACHES)
def test_a_snapshot_that_changes_ownership_is_found(cache):
    """The fingerprint before and after: a snapshot that moves a slot, a mapping entry or a cursor raises."""
    world = make_world(cache=cache, overlap=False)
    world.submit("a", prompt(10), 20)
    world.step(3)
    memory = world.scheduler.memory
    honest = memory.cache.cache_ledger_snapshot
    mapping = memory.allocator.full_to_swa_index_mapping
    entry = int(memory.rows.read(world.req("a").req_pool_idx, 10)[9])
    kept = int(mapping[entry])
    for change in (
        lambda: memory.allocator.full_attn_allocator.alloc(1, dp_rank=0),
        lambda: mapping.__setitem__(entry, 0),
        lambda: setattr(world.req("a"), "swa_evicted_seqlen", 12),
    ):

        def dishonest(rank, live, change=change):
            change()
            return honest(rank, live)

        memory.cache.cache_ledger_snapshot = dishonest
        for look in (world.scheduler.ledger_view, lambda: world.control("ledger")):
            with pytest.raises(RuntimeError, match="mutated cache ownership state"):
                look()
            mapping[entry] = kept
            world.req("a").swa_evicted_seqlen = 0


@pytest.mark.parametrize("where", ["queued", "seated"])
def test_two_live_objects_of_one_rid_are_refused(where):
    world = make_world(overlap=False)
    world.submit("a", prompt(10), 20)
    if where == "seated":
        world.step(2)
    world.scheduler.roster.waiting[0].append(Req("a", "", [5, 6], SamplingParams(), dp_rank=0))
    with pytest.raises(RuntimeError, match="Multiple live request objects share rid='a'"):
        world.scheduler._snapshot_swa_cache_ledger(require_idle=False)
    world.scheduler.roster.waiting[0].pop()
    world.scheduler._snapshot_swa_cache_ledger(require_idle=False)


# ------------------------------------------------------------------------------------------------------------ crash bundle
@pytest.mark.parametrize(
    ("cache", "tree"),
    [
        ("unified", ["root, 20 tokens", "dp=0 [0,", " S"]),
        ("legacy", ["live RadixKey", "full_lock=0 swa_lock=0", "evictable+protected: full 20+0"]),
        ("chunk", ["SWAChunkCache keeps no tree"]),
        ("plain", ["root, 20 tokens"]),
        ("plain_radix", ["tokens=20 lock=0", "total tokens: 20"]),
        ("plain_chunk", ["ChunkCache keeps no tree"]),
    ],
)
def test_the_bundle_holds_ledger_tree_operations_and_arguments(cache, tree, tmp_path, capsys):
    """Nothing goes to stdout; cache operations and the scheduler's calls are one log in their order."""
    world = make_world(cache=cache, page=4, window=8, crash_dir=str(tmp_path), chunk=32)
    world.submit("a", prompt(20), 3)
    world.run()
    memory = world.scheduler.memory
    pool = memory.allocator.full_attn_allocator if memory.hybrid else memory.allocator
    pool.alloc(4, dp_rank=0)  # a leak
    with pytest.raises(LedgerViolationError, match="crash bundle in"):
        world.scheduler.idle.audit(require_idle=True)
    (bundle,) = tmp_path.iterdir()
    text = (bundle / "tree.txt").read_text()
    assert [part for part in tree if part not in text] == []
    ledger = json.loads((bundle / "ledger.json").read_text())
    assert [entry["dp_rank"] for entry in ledger] == ([0] if memory.hybrid else [])
    lines = [json.loads(line) for line in (bundle / "operations.jsonl").read_text().splitlines()]
    names = [line["op"] if isinstance(line, dict) else line[0] for line in lines]
    wanted = ["alloc_extend", "release"]
    if cache in ("unified", "legacy", "plain"):
        wanted = ["match", "lock", "alloc_extend", "release", "insert", "unlock"]
        assert names.index("match") < names.index("alloc_extend") < names.index("insert")
    assert [name for name in wanted if name not in names] == []
    assert capsys.readouterr().out == ""


def test_the_log_keeps_the_last_thousand_operations():
    world = make_world(noop=True, full_pages=2000, swa_pages=2000, context=2048)
    world.submit("a", prompt(4), 1200)
    world.run()
    assert len(world.scheduler.memory.operations) == 1000


# ------------------------------------------------------------------------------------------------- sglang-jax's own names
def test_on_idle_of_a_bare_scheduler_checks_memory_then_tree_then_resets_the_ratio():
    scheduler, calls = Scheduler.__new__(Scheduler), []
    scheduler.is_fully_idle = lambda: calls.append("idle?") or True
    scheduler.check_memory = lambda: calls.append("memory")
    scheduler.check_tree_cache = lambda: calls.append(("tree", scheduler.new_token_ratio))
    scheduler.init_new_token_ratio, scheduler.new_token_ratio = 0.6, 0.2
    scheduler.on_idle()
    assert calls == ["idle?", "memory", ("tree", 0.2)] and scheduler.new_token_ratio == 0.6
    scheduler.new_token_ratio = 0.3
    scheduler.is_fully_idle = lambda: False
    scheduler.on_idle()
    assert len(calls) == 3 and scheduler.new_token_ratio == 0.3
    assert Scheduler.__new__(Scheduler).new_token_ratio == Scheduler.__new__(Scheduler).init_new_token_ratio


def test_on_idle_of_a_whole_scheduler_resets_its_ratio():
    world = make_world()
    world.submit("a", prompt(4), 30)
    world.step(9)
    ratio = world.scheduler.ratio
    assert ratio.value < ratio.initial
    world.scheduler.on_idle()
    assert world.scheduler.new_token_ratio == ratio.value < ratio.initial  # busy: nothing
    world.run()
    ratio.value = 0.2
    world.scheduler.on_idle()
    assert ratio.value == ratio.initial


@pytest.mark.parametrize("whole", [True, False])
def test_parked_chunks_are_stored_and_retracted_by_name(whole):
    """What a chunk computed enters the cache once; the retracted prompt is the next one of its queue."""
    world = make_world(page=4, overlap=False)
    world.submit("a", prompt(24), 4)
    world.step()
    req, memory = world.req("a"), world.scheduler.memory
    scheduler = world.scheduler
    if not whole:
        scheduler = Scheduler.__new__(Scheduler)
        scheduler.tree_cache, scheduler.waiting_queue = memory.cache, ["behind"]
        scheduler.chunked_reqs = [req]
    assert scheduler._prepare_chunked_reqs_to_exclude() == [req]
    assert req.cache_protected_len == 8 and len(req.prefix_indices) == 8
    memory.cache.cache_unfinished_req = None  # nothing new: not called again
    assert scheduler._prepare_chunked_reqs_to_exclude() == [req]
    del memory.cache.cache_unfinished_req
    assert scheduler._retract_parked_chunked_reqs() == [req] and scheduler.chunked_reqs == [None]
    assert scheduler._retract_parked_chunked_reqs() == []
    assert (req.req_pool_idx, req.cache_lock_params, req.is_retracted) == (None, None, True)
    assert memory.protected(0).full == 0
    if whole:
        world.run()
        assert world.outputs["a"] == world.expected("a", 4)
    else:
        assert scheduler.waiting_queue == [req, "behind"]


def test_live_requests_of_a_bare_scheduler_come_from_its_lists_and_batches():
    world = make_world(overlap=False)
    world.submit("a", prompt(10), 20)
    world.step(3)
    memory, req = world.scheduler.memory, world.req("a")
    world.scheduler.roster.live_requests(0)
    bare = Scheduler.__new__(Scheduler)
    bare.tree_cache, bare.waiting_queue = memory.cache, []
    info = SimpleNamespace(reqs=[req], chunked_req=None)
    bare.running_batch = bare.last_batch = SimpleNamespace(reqs_info=[info])
    bare.chunked_reqs = [None]
    (snapshot,) = bare._snapshot_swa_cache_ledger(require_idle=False)
    assert snapshot["full_request_owned"] > 0
    assert bare._cache_ledger_readonly_fingerprint([req]) == bare._cache_ledger_readonly_fingerprint([req])
    bare.waiting_queue = [Req("a", "", [5], SamplingParams())]
    with pytest.raises(RuntimeError, match="Multiple live request objects share rid='a'"):
        bare._snapshot_swa_cache_ledger(require_idle=False)
