"""Costs by counting: calls made, nodes visited, bytes kept. Never seconds (fault 10, D81, D83, G7-G12)."""

from __future__ import annotations

import numpy as np
import pytest

from sgl_jax.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sgl_jax.srt.mem_cache.radix_tree.key import RadixKey, TokenBuffer
from sgl_jax.test.counting import count_calls
from sgl_jax.test.mem_cache.unified.desk import FULL, SWA, Desk


def long_desk(pages: int, page: int = 16) -> tuple[Desk, RadixKey]:
    desk = Desk(page, 4 * page, full_pages=2 * pages + 64, swa_pages=2 * pages + 64)
    key = RadixKey(np.arange(pages * page, dtype=np.int32), None, 0)
    desk.cache.insert(InsertParams(key, desk.alloc(pages)))
    return desk, key


def many_leaves(count: int, dp: int = 1) -> Desk:
    desk = Desk(1, 1, dp=dp, full_pages=count + 8, swa_pages=count + 8)
    for i in range(count):
        desk.cache.insert(InsertParams(RadixKey([i], None, desk.rank), desk.alloc(1)))
    desk.cache.accounts.oldest_leaf(desk.rank)  # files what the inserts left
    return desk


def test_insert_is_linear() -> None:
    """Fault 10: the leaf is cut in one pass."""
    costs = []
    for pages in (64, 256):
        desk = Desk(16, 64, full_pages=pages, swa_pages=pages)
        key = RadixKey(np.arange(pages * 16, dtype=np.int32), None, 0)
        slots = desk.alloc(pages)
        costs.append(
            count_calls(lambda desk=desk, key=key, slots=slots: desk.cache.insert(InsertParams(key, slots)))
        )
    assert costs[1] < 4.4 * costs[0]


def test_match_is_linear_in_nodes() -> None:
    costs = []
    for pages in (64, 256):
        desk, key = long_desk(pages)
        costs.append(count_calls(lambda desk=desk, key=key: desk.cache.match_prefix(MatchPrefixParams(key))))
    assert costs[1] < 4.4 * costs[0]


@pytest.mark.parametrize("want", [{"num_tokens": 1}, {"swa_num_tokens": 1}])
def test_evicting_one_costs_the_same_in_any_tree(want: dict[str, int]) -> None:
    """D83, G9, G10: no scan, no heap over all leaves."""
    costs = [
        count_calls(lambda desk=desk: desk.cache.evict(EvictParams(**want, dp_rank=0)))
        for desk in (many_leaves(50), many_leaves(800))
    ]
    assert costs[1] <= costs[0] + 4


def test_evicting_skips_locked_nodes_for_free() -> None:
    """D83: hundreds of locked leaves older than the free one are not even looked at."""
    costs = []
    for locked in (10, 300):
        desk = many_leaves(locked + 1)
        for i in range(locked):
            node = desk.cache.root_node.children[desk.cache.get_child_key_fn(RadixKey([i], None, 0))]
            desk.cache.inc_lock_ref(node)
        assert desk.cache.accounts.oldest_leaf(0) is not None  # files what the locks changed, paid by them
        costs.append(count_calls(lambda desk=desk: desk.cache.evict(EvictParams(num_tokens=1, dp_rank=0))))
        assert desk.sums() == (0, locked, 0, locked)
    assert costs[1] <= costs[0] + 4


def test_evicting_ignores_the_other_rank() -> None:
    """G11."""
    few, many = (
        Desk(1, 1, dp=2, full_pages=900, swa_pages=900),
        Desk(1, 1, dp=2, full_pages=900, swa_pages=900),
    )
    for desk, others in ((few, 10), (many, 800)):
        desk.rank = 1
        for i in range(others):
            desk.cache.insert(InsertParams(RadixKey([i], None, 1), desk.alloc(1)))
        desk.rank = 0
        for i in range(5):
            desk.cache.insert(InsertParams(RadixKey([i], None, 0), desk.alloc(1)))
    costs = [
        count_calls(lambda d=d: d.cache.evict(EvictParams(num_tokens=1, dp_rank=0))) for d in (few, many)
    ]
    assert costs[0] == costs[1]


def test_a_lock_on_a_locked_path_costs_the_window() -> None:
    """G12: the walk stops at the first ancestor that is locked already."""
    costs = []
    for pages in (64, 512):
        desk, key = long_desk(pages)
        node = desk.cache.match_prefix(MatchPrefixParams(key)).last_device_node
        desk.cache.inc_lock_ref(node)
        costs.append(count_calls(lambda desk=desk, node=node: desk.cache.inc_lock_ref(node)))
    assert costs[0] == costs[1]


def test_a_chunk_commit_does_not_depend_on_the_history() -> None:
    """G8: work starts at the request's own node; nothing walks or copies what is committed already."""
    costs = []
    for pages in (32, 256):
        desk = Desk(16, 64, full_pages=pages + 64, swa_pages=pages + 64)
        ids = list(range((pages + 4) * 16))
        req = desk.request("", tail=0)
        req.origin_input_ids, req.radix_tokens = ids, TokenBuffer(ids)
        for low, high in ((0, pages), (pages, pages + 4)):
            desk.row(req)[low * 16 : high * 16] = desk.alloc(high - low)
            req.fill_ids = range(high * 16)
            req.kv_committed_len = req.kv_allocated_len = high * 16
            desk.cache.accounts.oldest_leaf(0)  # files what earlier changes left
            cost = count_calls(lambda desk=desk, req=req: desk.cache.cache_unfinished_req(req))
        costs.append(cost)
        desk.sound()
    assert costs[1] <= costs[0] + 8


def test_split_nodes_keep_no_memory_of_the_whole() -> None:
    """D81: values and keys of both halves own exactly their tokens."""
    desk = Desk(1, 64)
    desk.insert("abcdefghijklmnop")
    desk.match("abcd")
    desk.match("abcdefgh")
    for node in desk.cache.iter_nodes():
        for ct in (FULL, SWA):
            value = node.component_data[ct].value
            assert (value.base is None and len(value) == 4) or len(value) == 8
        assert len(node.key.packed) == 4 * len(node.key)
