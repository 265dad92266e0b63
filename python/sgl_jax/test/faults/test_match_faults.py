"""Faults D09-D14, D82, D85: what a look-up may accept."""

from __future__ import annotations

import numpy as np
import pytest

from sgl_jax.srt.mem_cache.base_prefix_cache import InsertParams
from sgl_jax.srt.mem_cache.radix_tree.key import RadixKey
from sgl_jax.test.faults.kit import Kit, seq
from sgl_jax.test.stateful.build import WorldConfig
from sgl_jax.test.stateful.replay import run_ops
from sgl_jax.test.stateful.world import World


def chain(kit: Kit, *ends: int) -> list[int]:
    """One chain with a node boundary at every end (page 1)."""
    tokens = seq(ends[-1])
    for end in ends:
        kit.insert(tokens[:end])
    return tokens


def test_the_live_counter_restarts_at_every_tombstone() -> None:
    """D09: A(3 live) - B(2 tombstone) - C(3 live), W=4: the answer is A's 3 tokens, live from the root."""
    kit = Kit(window=4)
    tokens = chain(kit, 3, 5, 8)
    hold = kit.cache.inc_lock_ref(kit.node(3))
    assert kit.evict(swa=1) == (0, 2)
    kit.cache.dec_lock_ref(kit.node(3), hold.to_dec_params())
    assert kit.shape() == [(0, 3, True), (3, 5, False), (5, 8, True)]
    assert kit.match(tokens) == [1, 2, 3]
    kit.assert_idle()


@pytest.mark.parametrize("page", [64, 128, 256])
def test_a_match_below_one_page_is_empty_and_changes_nothing(page: int) -> None:
    """D10, D11: 63 of 64 tokens match nothing; no zero-length node; the leaf can be evicted later."""
    kit = Kit(page=page, window=page, full=4 * page, swa=4 * page)
    tokens = seq(page)
    kit.insert(tokens)
    assert kit.match(tokens[:-1]) == [] and kit.match(tokens[:5]) == []
    assert kit.shape() == [(0, page, True)]
    assert kit.match(tokens) == list(range(page, 2 * page))
    assert kit.sums() == (page, 0, page, 0)
    kit.assert_cold_after_evicting_all()


def test_evictable_is_the_sum_over_nodes_for_odd_lengths() -> None:
    """D11: lengths that are trimmed to pages count owned slots, on insert and on removal alike."""
    kit = Kit(page=16, window=16, full=256, swa=256)
    for length in (17, 31, 33, 50):
        kit.insert(seq(length, start=1000 * length))
    assert kit.sums() == (16 + 16 + 32 + 48, 0, 112, 0)
    full, swa = kit.evict(full=1)
    assert full == swa and kit.sums() == (112 - full, 0, 112 - swa, 0)
    kit.assert_cold_after_evicting_all()


@pytest.mark.parametrize(("window", "hit"), [(4, 11), (8, 0), (16, 0)])
def test_the_window_decides_validity(window: int, hit: int) -> None:
    """D12: live suffix of 5 after a tombstone of 7 serves W=4, not a larger window."""
    kit = Kit(window=window)
    req = kit.admit(seq(12))
    kit.cache.evict_req_swa(req, 7 + window + 1, dp_rank=0)
    assert req.swa_evicted_seqlen == 7
    kit.commit(req)
    kit.finish(req)
    assert len(kit.match(seq(12)[:11])) == hit


@pytest.mark.parametrize(("page", "window", "length"), [(4, 2, 16), (4, 4, 16), (4, 9, 24), (256, 128, 1024)])
def test_an_exact_page_multiple_is_hit_again(page: int, window: int, length: int) -> None:
    """D13: prompt of exactly k*P tokens sent twice: N - P cached, also after the first run decoded far past it."""
    kit = Kit(page=page, window=window, full=8 * length, swa=8 * length)
    tokens = seq(length)
    first = kit.admit(tokens)
    kit.commit(first)
    for t in range(3 * page + window if page < 256 else 2):
        kit.cache.evict_req_swa(first, first.kv_committed_len, dp_rank=0)
        kit.decode(first, t)
    kit.finish(first)
    assert len(kit.match(tokens[:-1])) == length - page
    again = kit.admit(tokens)
    assert again.cache_protected_len == length - page
    kit.commit(again)
    kit.finish(again)
    kit.assert_cold_after_evicting_all()


def test_uncommitted_reclaim_keeps_a_window_before_the_largest_stop() -> None:
    """D13: P=4, W=2, one pass of 24 tokens, reclaim before finish: the boundary 20 still validates."""
    kit = Kit(page=4, window=2)
    req = kit.admit(seq(24))
    kit.cache.evict_req_swa(req, 24, dp_rank=0)
    assert req.swa_evicted_seqlen == 16
    kit.finish(req)
    assert len(kit.match(seq(24)[:23])) == 20


@pytest.mark.parametrize(
    "cfg",
    [WorldConfig(page=1), WorldConfig(page=4, window=6, full_pages=20, swa_pages=16, blocks=6, chunk=2)],
)
def test_a_hit_reads_the_kv_that_was_computed_for_it(cfg: WorldConfig) -> None:
    """D14: the poisoned device checks each slot a second request reads in another row, after other traffic."""
    world = World(cfg)
    ops = [
        ("admit", 0, 9, 0),
        ("commit", 0, 0, 0),
        ("next_chunk", 0, 0, 0),
        ("commit", 0, 0, 0),
        ("decode", 0, 1, 3),
    ]
    ops += [
        ("finish", 0, 0, 0),
        ("admit", 0, 7, 0x5555),
        ("commit", 0, 0, 0),
        ("admit", 0, 9, 0),
        ("commit", 1, 0, 0),
    ]
    for op in ops:
        world.step(*op)
    assert world.live[-1].protected > 0
    world.drain()


def test_a_shared_system_prompt_is_hit_at_its_branch_point() -> None:
    """D82: 64 shared tokens and another question: the hit reaches the branch point when there is no pressure."""
    kit = Kit(page=4, window=8, full=512, swa=512)
    system = seq(64)
    first = kit.admit(system + seq(24, start=1000))
    kit.commit(first)
    for t in range(40):
        kit.cache.evict_req_swa(first, first.kv_committed_len, dp_rank=0)
        kit.decode(first, t)
    kit.finish(first)
    assert len(kit.match(system + seq(24, start=2000))) == 64


@pytest.mark.parametrize("hit_pages", [0, 1, 2])
def test_hits_of_whole_pages_read_the_right_kv(hit_pages: int) -> None:
    """D85: hit lengths 0, P, 2P: the request's row is the tree's slots, then its own, every read checked."""
    cfg = WorldConfig(page=4, window=4, full_pages=20, swa_pages=16, blocks=6, chunk=4)
    shape = hit_pages + 7  # whole pages plus one token
    ops = [("admit", 0, shape, 0), ("commit", 0, 0, 0), ("finish", 0, 0, 0)] if hit_pages else []
    world = run_ops(cfg, [*ops, ("admit", 0, shape, 0)], drain=False)
    assert world.live[-1].protected == 4 * hit_pages
    world.step("decode", 0, 0, 3)
    world.drain()


def test_the_page_before_the_last_stop_is_kept_under_pressure() -> None:
    """D13, DECISIONS 2: W + P tokens are refreshed, so the look-up that stops one page short survives the eviction."""
    kit = Kit(page=4, window=4, full=128, swa=128)
    x, y = seq(16), seq(16, start=500)
    kit.insert(x)
    kit.insert(y)
    assert len(kit.match(x)) == 16
    assert kit.evict(swa=24)[1] == 24
    assert len(kit.match(x[:15])) == 12 and len(kit.match(x)) == 16
    assert kit.match(y) == []


def test_a_key_that_is_no_page_multiple_is_cut() -> None:
    """D10, D11: the direct insert takes whole pages only; the caller keeps the tail's slots."""
    kit = Kit(page=4, window=4)
    slots = kit.allocator.alloc_extend([0], [10], np.array([-1], np.int32), 10, dp_rank=0)
    result = kit.cache.insert(InsertParams(key=RadixKey(seq(10), None, 0), value=slots))
    assert result.prefix_len == 0 and kit.cache.total_size() == 8
    assert kit.shape() == [(0, 4, True), (4, 8, True)]
    assert kit.match(seq(10)) == list(range(4, 12)) and kit.match(seq(7)) == [4, 5, 6, 7]
    kit.allocator.free(slots[8:], dp_rank=0)
    kit.assert_cold_after_evicting_all()
