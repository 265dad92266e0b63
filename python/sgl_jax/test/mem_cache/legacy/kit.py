"""A desk for the legacy caches: bare pools, one cache and requests driven step by step."""

from __future__ import annotations

from typing import Any

import numpy as np

from sgl_jax.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sgl_jax.srt.mem_cache.ledger import audit_cache, validate_swa_cache_ledger
from sgl_jax.srt.mem_cache.memory_pool import ReqToTokenPool
from sgl_jax.srt.mem_cache.radix_tree.key import RadixKey
from sgl_jax.srt.mem_cache.swa_radix_cache import SWARadixCache
from sgl_jax.test.stateful.build import build_allocator
from sgl_jax.test.stateful.sim_request import SimReq


def seq(count: int, start: int = 100) -> list[int]:
    return list(range(start, start + count))


class Desk:
    """``full`` / ``swa``: tokens per rank. Fresh slots ascend from slot 1 (page 1)."""

    def __init__(
        self, page: int = 1, window: int = 4, full: int = 64, swa: int = 64, dp: int = 1, rows: int = 6
    ) -> None:
        self.page, self.window, self.dp = page, window, dp
        self.allocator = build_allocator(page, full // page, swa // page, dp)
        self.pool = ReqToTokenPool(rows, full + 64)
        self.cache = SWARadixCache(self.pool, self.allocator, window, page)
        self.live: list[SimReq] = []

    # -- requests
    def admit(self, tokens: list[int], rank: int = 0, end: int | None = None) -> SimReq:
        """Match all but the last token, lock, take a row, compute up to ``end`` (default: all)."""
        req = SimReq(f"r{len(self.live)}", list(tokens), rank)
        found = self.cache.match_prefix(MatchPrefixParams(key=RadixKey(tokens[:-1], None, rank)))
        req.last_node = found.last_device_node
        cached = len(found.device_indices)
        req.cache_protected_len = req.last_matched_prefix_len = req.kv_committed_len = cached
        receipt = self.cache.inc_lock_ref(req.last_node)
        req.cache_lock_params = receipt.to_dec_params()
        req.swa_uuid_for_lock = receipt.swa_uuid_for_lock
        assert self.pool.alloc([req]) is not None
        self.row(req)[:cached] = found.device_indices
        self.live.append(req)
        self.extend(req, len(tokens) if end is None else end)
        return req

    def need(self, req: SimReq, end: int) -> int:
        pages = -(-end // self.page) - -(-req.kv_committed_len // self.page)
        return pages * self.page

    def extend(self, req: SimReq, end: int) -> list[int]:
        """Compute ``[committed, end)``; evicts on both pools first when they are short."""
        start, row, rank = req.kv_committed_len, self.row(req), req.dp_rank or 0
        need = self.need(req, end)
        short = [
            need - self.allocator.full_available_size(rank),
            need - self.allocator.swa_available_size(rank),
        ]
        if max(short) > 0:
            self.evict(max(short[0], 0), max(short[1], 0), rank)
        if self.page == 1:
            out = self.allocator.alloc(end - start, dp_rank=rank)
        else:
            last = np.array([row[start - 1] if start else -1], np.int32)
            out = self.allocator.alloc_extend([start], [end], last, end - start, dp_rank=rank)
        assert out is not None, "out of memory"
        row[start:end] = out
        req.kv_committed_len = req.kv_allocated_len = end
        req.fill_ids = req.tokens()[:end]
        return [int(slot) for slot in out]

    def decode(self, req: SimReq, token: int) -> None:
        req.output_ids.append(token)
        self.extend(req, req.kv_committed_len + 1)

    def commit(self, req: SimReq) -> None:
        self.cache.cache_unfinished_req(req, chunked=True)

    def reclaim(self, req: SimReq, pre_len: int) -> None:
        self.cache.evict_req_swa(req, pre_len, dp_rank=req.dp_rank)

    def finish(self, req: SimReq, is_insert: bool = True) -> None:
        self.cache.cache_finished_req(req, is_insert=is_insert)
        self.pool.free(req)
        self.live.remove(req)

    def store(self, tokens: list[int], rank: int = 0) -> None:
        self.finish(self.admit(tokens, rank))

    def row(self, req: SimReq) -> np.ndarray:  # type: ignore[type-arg]
        return self.pool.req_to_token[req.req_pool_idx]

    def slots(self, req: SimReq) -> list[int]:
        return self.row(req)[: req.kv_allocated_len].tolist()  # type: ignore[no-any-return]

    # -- tree
    def insert(self, tokens: list[int], rank: int = 0, prev: int = 0, cursor: int = 0) -> int:
        """Insert freshly allocated slots directly."""
        value = self.allocator.alloc(len(tokens), dp_rank=rank)
        if cursor:
            self.allocator.free_swa(value[:cursor], dp_rank=rank)
        key = RadixKey(tokens, None, rank)
        return self.cache.insert(InsertParams(key, value, prev, cursor))

    def match(self, tokens: list[int], rank: int = 0) -> Any:
        return self.cache.match_prefix(MatchPrefixParams(key=RadixKey(tokens, None, rank)))

    def evict(self, full: int = 0, swa: int = 0, rank: int = 0) -> tuple[int, int]:
        out = self.cache.evict(EvictParams(num_tokens=full, swa_num_tokens=swa, dp_rank=rank))
        return out.num_tokens_evicted, out.swa_num_tokens_evicted

    def shape(self) -> list[tuple[int, int, bool]]:
        """(start, end, live) of every node, sorted."""
        nodes = self.cache._tree.nodes()
        return sorted((n.end - len(n.value), n.end, not n.swa_tombstone) for n in nodes)

    def node(self, end: int) -> Any:
        (found,) = [n for n in self.cache._tree.nodes() if n.end == end]
        return found

    def sums(self, rank: int = 0) -> tuple[int, int, int, int]:
        """FULL evictable, FULL protected, SWA evictable, SWA protected."""
        c = self.cache
        return (
            c.full_evictable_size(rank),
            c.full_protected_size(rank),
            c.swa_evictable_size(rank),
            c.swa_protected_size(rank),
        )

    def available(self, rank: int = 0) -> tuple[int, int]:
        return self.allocator.full_available_size(rank), self.allocator.swa_available_size(rank)

    # -- verdicts
    def assert_sound(self, require_idle: bool = False) -> None:
        """Tree, allocator and ledger of every rank without a violation."""
        found = [str(v) for v in self.cache.check() + self.allocator.check()]
        for rank in range(self.dp):
            snapshot = self.cache.cache_ledger_snapshot(rank, self.live)
            validate_swa_cache_ledger(snapshot, require_idle=require_idle)
            found += [str(v) for v in audit_cache(self.cache, rank, self.live, require_idle=require_idle)]
        assert found == []

    def assert_cold_after_evicting_all(self) -> None:
        self.assert_sound(require_idle=True)
        for rank in range(self.dp):
            self.evict(1 << 30, 1 << 30, rank)
            assert self.available(rank) == (
                self.allocator.size_full // self.dp,
                self.allocator.size_swa // self.dp,
            )
        assert list(self.cache._tree.nodes()) == []
