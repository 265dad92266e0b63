"""The same 31 keys from every SWA-capable cache, sound through a request's life (RFC-0035 section 6)."""

import numpy as np
import pytest

from sgl_jax.srt.mem_cache.base_prefix_cache import BasePrefixCache, EvictParams, MatchPrefixParams
from sgl_jax.srt.mem_cache.ledger import (
    LEDGER_FIELDS,
    audit_cache,
    readonly_fingerprint,
    validate_swa_cache_ledger,
)
from sgl_jax.srt.mem_cache.memory_pool import ReqToTokenPool
from sgl_jax.srt.mem_cache.radix_tree.key import RadixKey
from sgl_jax.srt.mem_cache.swa_radix_cache import SWARadixCache
from sgl_jax.test.mem_cache.legacy.kit import seq
from sgl_jax.test.stateful.build import build_allocator, build_cache
from sgl_jax.test.stateful.sim_request import SimReq

PAGE, WINDOW = 8, 16


def make(kind, dp):
    allocator = build_allocator(PAGE, 40, 30, dp)
    if kind == "legacy":
        return SWARadixCache(ReqToTokenPool(4, 400), allocator, WINDOW, PAGE)
    return build_cache(kind, allocator, PAGE, WINDOW, 4, 400)


def audit(cache, rank, live, idle=False):
    snapshot = cache.cache_ledger_snapshot(rank, live)
    assert tuple(snapshot) == LEDGER_FIELDS
    validate_swa_cache_ledger(snapshot, require_idle=idle)
    assert [str(v) for v in audit_cache(cache, rank, live, require_idle=idle)] == []
    return snapshot


def grow(cache, req, end):
    row, start = cache.req_to_token_pool.req_to_token[req.req_pool_idx], req.kv_committed_len
    last = np.array([row[start - 1] if start else -1], np.int32)
    out = cache.token_to_kv_pool_allocator.alloc_extend(
        [start], [end], last, end - start, dp_rank=req.dp_rank
    )
    row[start:end] = out
    req.kv_committed_len = req.kv_allocated_len = end
    req.fill_ids = req.tokens()[:end]


@pytest.mark.parametrize("kind", ["unified", "legacy", "chunk"])
@pytest.mark.parametrize("dp", [1, 2])
def test_one_schema_through_a_life(kind, dp):
    cache, rank = make(kind, dp), dp - 1
    pools = {name: audit(cache, rank, [], idle=True)[f"{name}_capacity"] for name in ("full", "swa")}
    assert pools == {"full": 320, "swa": 240}
    req = SimReq("r", seq(70), rank)
    found = cache.match_prefix(MatchPrefixParams(RadixKey(seq(69), None, rank)))
    req.last_node = found.last_device_node
    req.cache_lock_params = cache.inc_lock_ref(req.last_node).to_dec_params()
    cache.req_to_token_pool.alloc([req])
    for end in (30, 70):
        grow(cache, req, end)
        assert audit(cache, rank, [req])["full_request_owned"] == end - req.cache_protected_len
        cache.cache_unfinished_req(req)
        audit(cache, rank, [req])
    for token in range(50):
        req.output_ids.append(token)
        grow(cache, req, req.kv_committed_len + 1)
        cache.evict_req_swa(req, req.seqlen - 1, dp_rank=rank)
        mark = readonly_fingerprint(cache, [req])
        audit(cache, rank, [req])
        assert readonly_fingerprint(cache, [req]) == mark
    cache.cache_finished_req(req)
    cache.req_to_token_pool.free(req)
    audit(cache, rank, [], idle=True)
    cache.evict(EvictParams(1000, 1000, rank))
    end = audit(cache, rank, [], idle=True)
    assert (end["full_available"], end["swa_available"]) == (320, 240)


def test_the_base_has_no_ledger_and_supports_swa_is_callable_on_the_class():
    assert BasePrefixCache.supports_swa(BasePrefixCache) is False
    with pytest.raises(NotImplementedError):
        BasePrefixCache.cache_ledger_snapshot(BasePrefixCache, 0, [])
