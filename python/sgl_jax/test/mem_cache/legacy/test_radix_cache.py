"""RadixCache, the plain cache with the flag off: helper names, match, insert, locks, eviction, requests."""

import numpy as np
import pytest

from sgl_jax.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
from sgl_jax.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sgl_jax.srt.mem_cache.errors import LockReceiptError
from sgl_jax.srt.mem_cache.memory_pool import ReqToTokenPool
from sgl_jax.srt.mem_cache.radix_cache import (
    CandidateQueue,
    RadixCache,
    RadixKey,
    TreeNode,
    _convert_to_bigram_key,
    _key_match_page_size1,
    _key_match_paged,
    build_radix_key,
    get_child_key,
)
from sgl_jax.test.mem_cache.legacy.kit import seq
from sgl_jax.test.stateful.sim_request import SimReq


def make(page=1, size=64, dp=1, **kw):
    if page == 1:
        allocator = TokenToKVPoolAllocator(size * dp, None, dp)
    else:
        allocator = PagedTokenToKVPoolAllocator(size * dp, page, None, dp_size=dp)
    allocator.strict = True
    return RadixCache(ReqToTokenPool(4, 128), allocator, page_size=page, **kw)


def put(cache, tokens, rank=0):
    value = cache.token_to_kv_pool_allocator.alloc(len(tokens), dp_rank=rank)
    kept = cache.insert(InsertParams(RadixKey(tokens, None, rank), value))
    if kept:
        cache.token_to_kv_pool_allocator.free(value[:kept], dp_rank=rank)
    return kept


def match(cache, tokens, rank=0):
    return cache.match_prefix(MatchPrefixParams(RadixKey(tokens, None, rank)))


# ------------------------------------------------------------------------------------------------------------- helpers
def test_key_match_refuses_keys_of_different_namespaces():
    a, b = RadixKey([1, 2, 3]), RadixKey([1, 2, 4])
    assert (
        _key_match_page_size1(a, b) == 2 and _key_match_paged(a, b, 2) == 2 and _key_match_paged(a, b, 4) == 0
    )
    for other in (RadixKey([1], extra_key="x"), RadixKey([1], dp_rank=1)):
        with pytest.raises(ValueError, match="namespace"):
            _key_match_page_size1(a, other)
        with pytest.raises(ValueError, match="namespace"):
            _key_match_paged(a, other, 1)


def test_child_key_and_bigrams():
    assert get_child_key(RadixKey([5, 6])) == 5 and get_child_key(RadixKey([5, 6, 7]), 2) == (5, 6)
    assert get_child_key(RadixKey([5], "a")) == ("a", 5) and get_child_key(RadixKey([5], None, 1)) == (1, 5)
    assert get_child_key(RadixKey([5], "a", 1)) == (("a", 1), 5)
    assert _convert_to_bigram_key([1, 2, 3]) == [(1, 2), (2, 3)] and _convert_to_bigram_key([1]) == []


def test_build_radix_key_takes_prompt_then_outputs_in_the_requests_namespace():
    req = SimReq("r", [1, 2, 3], 1, "adapter", output_ids=[4, 5])
    key = build_radix_key(req, 4)
    assert (key.token_ids, key.extra_key, key.dp_rank) == ([1, 2, 3, 4], "adapter", 1)


def test_nodes_order_by_recency_and_number_themselves():
    a, b = TreeNode(), TreeNode()
    assert b.id == a.id + 1 and a < b and a.evicted and not a.backuped
    a.last_access_time = b.last_access_time + 1
    assert b < a


def test_candidate_queue_pops_oldest_and_stays_small():
    queue, nodes = CandidateQueue(), [TreeNode() for _ in range(3)]
    for stamp in range(1000):
        for i, node in enumerate(nodes):
            queue.add(node, 10 * stamp - i)
    assert queue.oldest() is nodes[2] and len(queue) == 3 and len(queue._heap) < 100
    queue.discard(nodes[2])
    assert queue.oldest() is nodes[1] and nodes[2] not in queue


# ---------------------------------------------------------------------------------------------------------------- tree
def test_insert_match_split_with_literal_slots():
    cache = make()
    assert put(cache, seq(6)) == 0
    assert put(cache, seq(4) + [7, 8]) == 4
    assert match(cache, seq(6)).device_indices.tolist() == [1, 2, 3, 4, 5, 6]
    assert match(cache, seq(4) + [7, 8]).device_indices.tolist() == [1, 2, 3, 4, 11, 12]
    assert match(cache, [1]).device_indices.tolist() == [] and cache.total_size() == 8
    assert cache.check() == []


def test_list_keys_and_missing_values_are_accepted():
    cache = make()
    assert cache.insert(InsertParams([3, 4, 5])) == 0  # type: ignore[arg-type]
    assert cache.match_prefix(MatchPrefixParams([3, 4])).device_indices.tolist() == [3, 4]  # type: ignore[arg-type]
    assert "tokens=2" in cache.pretty_print()


def test_pages_are_matched_whole():
    """D10: 63 tokens against a 64-token node return whole pages, below one page nothing."""
    cache = make(page=4)
    put(cache, seq(8))
    assert match(cache, seq(7)).device_indices.tolist() == [4, 5, 6, 7]
    assert match(cache, seq(3)).device_indices.tolist() == []
    assert cache.check() == []


def test_namespaces_do_not_share():
    cache = make(dp=2)
    put(cache, seq(3), 0)
    assert match(cache, seq(3), 1).device_indices.tolist() == []
    cache.insert(InsertParams(RadixKey(seq(3), "a", 0), cache.token_to_kv_pool_allocator.alloc(3, dp_rank=0)))
    assert match(cache, seq(3), 0).device_indices.tolist() == [1, 2, 3]
    assert (cache.evictable_size(0), cache.evictable_size(1)) == (6, 0)


def test_locks_walk_to_the_root_and_report_deltas():
    cache = make()
    put(cache, seq(4))
    put(cache, seq(6))
    node = match(cache, seq(6)).last_device_node
    assert cache.inc_lock_ref(node).delta == -6 and cache.inc_lock_ref(node).delta == 0
    assert (node.lock_ref, node.parent.lock_ref) == (2, 2) and (
        cache.evictable_size(),
        cache.protected_size(),
    ) == (0, 6)
    assert cache.evict(EvictParams(num_tokens=9, dp_rank=0)).num_tokens_evicted == 0
    assert cache.dec_lock_ref(node) == 0 and cache.dec_lock_ref(node) == 6
    with pytest.raises(LockReceiptError, match="released before"):
        cache.dec_lock_ref(node)
    assert cache.check() == []


def test_eviction_is_least_recently_used_leaves_of_one_rank():
    cache = make(dp=2)
    for rank in (0, 1):
        put(cache, seq(3, 100), rank)
        put(cache, seq(3, 200), rank)
    match(cache, seq(3, 100), 0)
    assert cache.evict(EvictParams(num_tokens=2, dp_rank=0)).num_tokens_evicted == 3
    assert len(match(cache, seq(3, 200), 0).device_indices) == 0
    assert len(match(cache, seq(3, 200), 1).device_indices) == 3
    assert cache.token_to_kv_pool_allocator.available_size(0) == 61
    assert cache.evict(EvictParams(num_tokens=99, dp_rank=0)).num_tokens_evicted == 3
    assert cache.check() == []


def test_evicting_a_leaf_makes_its_parent_the_next_candidate():
    cache = make()
    put(cache, seq(4))
    put(cache, seq(6))
    assert cache.evict(EvictParams(num_tokens=1)).num_tokens_evicted == 2
    assert cache.evict(EvictParams(num_tokens=1)).num_tokens_evicted == 4
    assert cache.total_size() == 0 and cache.token_to_kv_pool_allocator.available_size() == 64


def test_bigram_keys_of_an_eagle_cache_are_one_shorter():
    cache = make(is_eagle=True)
    cache.insert(InsertParams(RadixKey([1, 2, 3, 4]), np.array([1, 2, 3], np.int32)))
    assert cache.match_prefix(MatchPrefixParams(RadixKey([1, 2, 3]))).device_indices.tolist() == [1, 2]


def test_disabled_cache():
    cache = make(disable=True)
    assert cache.insert(InsertParams(RadixKey(seq(3)), np.array([1, 2, 3], np.int32))) == 0
    found = match(cache, seq(3))
    assert len(found.device_indices) == 0 and found.last_device_node is cache.root_node
    assert cache.evict(EvictParams(num_tokens=3)).num_tokens_evicted == 0
    assert not cache.supports_swa()


# ------------------------------------------------------------------------------------------------------------ requests
def admit(cache, tokens, end, rank=0):
    req = SimReq("r", list(tokens), rank)
    found = match(cache, tokens[:-1], rank)
    start = req.cache_protected_len = len(found.device_indices)
    req.last_node = found.last_device_node
    cache.inc_lock_ref(req.last_node)
    assert cache.req_to_token_pool.alloc([req]) is not None
    row = cache.req_to_token_pool.req_to_token[req.req_pool_idx]
    row[:start] = found.device_indices
    grow(cache, req, start, end)
    return req


def grow(cache, req, start, end):
    allocator, row = cache.token_to_kv_pool_allocator, cache.req_to_token_pool.req_to_token[req.req_pool_idx]
    if cache.page_size == 1:
        row[start:end] = allocator.alloc(end - start, dp_rank=req.dp_rank)
    else:
        last = np.array([row[start - 1] if start else -1], np.int32)
        row[start:end] = allocator.alloc_extend([start], [end], last, end - start, dp_rank=req.dp_rank)
    req.kv_committed_len = req.kv_allocated_len = end
    req.fill_ids = req.tokens()[:end]


def done(cache, req, is_insert=True):
    cache.cache_finished_req(req, is_insert=is_insert)
    cache.req_to_token_pool.free(req)


@pytest.mark.parametrize("page", [1, 4])
@pytest.mark.parametrize("is_insert", [True, False])
def test_a_request_in_two_chunks_returns_everything(page, is_insert):
    """D06, D31: chunks, finish or abort, then evict all: the pool is cold again."""
    cache = make(page=page)
    req = admit(cache, seq(11), 6)
    cache.cache_unfinished_req(req)
    assert req.cache_protected_len == 6 // page * page and len(req.prefix_indices) == 6
    grow(cache, req, 6, 11)
    done(cache, req, is_insert)
    assert cache.check() == [] and cache.protected_size() == 0
    assert cache.total_size() == ((11 if is_insert else 6) // page * page)
    cache.evict(EvictParams(num_tokens=99, dp_rank=0))
    assert cache.token_to_kv_pool_allocator.available_size() == 64


def test_the_row_is_repointed_before_duplicates_are_freed():
    """D35."""
    cache = make()
    a, b = admit(cache, seq(5), 5), admit(cache, seq(5), 5)
    cache.cache_unfinished_req(a)
    cache.cache_unfinished_req(b)
    rows = cache.req_to_token_pool.req_to_token
    assert rows[b.req_pool_idx, :5].tolist() == [1, 2, 3, 4, 5]
    assert cache.token_to_kv_pool_allocator.available_size() == 59
    done(cache, a)
    done(cache, b)
    assert cache.check() == [] and cache.evictable_size() == 5
