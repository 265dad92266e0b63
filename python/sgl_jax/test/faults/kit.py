"""A small desk: one real cache over bare pools and a request simulator, so that examples stay three lines long."""

from __future__ import annotations

from typing import Any

import numpy as np

from sgl_jax.srt.mem_cache.base_prefix_cache import EvictParams, EvictResult, MatchPrefixParams
from sgl_jax.srt.mem_cache.common import alloc_paged_token_slots_extend, alloc_token_slots, release_kv_cache
from sgl_jax.srt.mem_cache.radix_tree.key import RadixKey
from sgl_jax.test.oracle.observe import NodeView, walk
from sgl_jax.test.stateful.build import build_allocator, build_cache
from sgl_jax.test.stateful.sim_request import SimReq


class Kit:
    """Cache, allocator, request rows. Token ids are the caller's; slots start at 1 (page 1)."""

    def __init__(
        self, page: int = 1, window: int = 4, full: int = 64, swa: int = 64, dp: int = 1, rows: int = 8
    ) -> None:
        """``full`` / ``swa``: tokens per rank."""
        self.page, self.window = page, window
        self.capacity = (full // page * page, swa // page * page)
        self.allocator = build_allocator(page, full // page, swa // page, dp)
        self.cache = build_cache("unified", self.allocator, page, window, rows, full + 64)
        self.pool = self.cache.req_to_token_pool
        self.serial = 0

    # requests ---------------------------------------------------------------
    def admit(self, tokens: list[int], rank: int = 0, end: int | None = None) -> SimReq:
        """Match all but the last token, lock, take a row, compute up to ``end`` (default: everything)."""
        self.serial += 1
        req = SimReq(f"r{self.serial}", list(tokens), rank)
        result = self.cache.match_prefix(MatchPrefixParams(key=RadixKey(tokens[:-1], None, rank)))
        req.prefix_indices = np.asarray(result.device_indices).copy()
        req.last_node = result.last_device_node
        req.cache_protected_len = req.last_matched_prefix_len = len(req.prefix_indices)
        locked = self.cache.inc_lock_ref(req.last_node)
        req.cache_lock_params = locked.to_dec_params()
        req.swa_uuid_for_lock = locked.swa_uuid_for_lock
        self.pool.alloc([req])
        req.is_chunked = 1
        self.row(req)[: len(req.prefix_indices)] = req.prefix_indices
        req.kv_committed_len = len(req.prefix_indices)
        self.extend(req, len(tokens) if end is None else end)
        return req

    def extend(self, req: SimReq, end: int) -> list[int]:
        """Compute ``[committed, end)``. Returns the new FULL slots."""
        start, row, rank = req.kv_committed_len, self.row(req), req.dp_rank or 0
        if self.page == 1:
            out = alloc_token_slots(self.cache, end - start, dp_rank=rank)
        else:
            last = np.array([row[start - 1] if start else -1], np.int32)
            out = alloc_paged_token_slots_extend(self.cache, [start], [end], last, end - start, dp_rank=rank)
        row[start:end] = out
        req.kv_committed_len = req.kv_allocated_len = end
        req.fill_ids = req.tokens()[:end]
        return np.asarray(out).tolist()  # type: ignore[no-any-return]

    def decode(self, req: SimReq, token: int) -> None:
        """The KV of one generated token."""
        req.output_ids.append(token)
        self.extend(req, req.kv_committed_len + 1)

    def commit(self, req: SimReq) -> None:
        self.cache.cache_unfinished_req(req)

    def finish(self, req: SimReq) -> None:
        release_kv_cache(req, self.cache)

    def abort(self, req: SimReq) -> None:
        release_kv_cache(req, self.cache, is_insert=False)

    def insert(self, tokens: list[int], rank: int = 0) -> None:
        """A request computes ``tokens`` and finishes."""
        self.finish(self.admit(tokens, rank))

    def row(self, req: SimReq) -> np.ndarray:  # type: ignore[type-arg]
        return self.pool.req_to_token[req.req_pool_idx]

    def slots(self, req: SimReq) -> list[int]:
        return self.row(req)[: req.kv_allocated_len].tolist()  # type: ignore[no-any-return]

    # tree -------------------------------------------------------------------
    def match(self, tokens: list[int], rank: int = 0) -> list[int]:
        result = self.cache.match_prefix(MatchPrefixParams(key=RadixKey(tokens, None, rank)))
        return np.asarray(result.device_indices).tolist()  # type: ignore[no-any-return]

    def evict(self, full: int = 0, swa: int = 0, rank: int = 0) -> tuple[int, int]:
        result: EvictResult = self.cache.evict(EvictParams(num_tokens=full, swa_num_tokens=swa, dp_rank=rank))
        return result.num_tokens_evicted, result.swa_num_tokens_evicted

    def views(self) -> list[NodeView]:
        return walk(self.cache)

    def shape(self) -> list[tuple[int, int, bool]]:
        """Sorted (start, end, live) of all nodes: readable for a single chain."""
        return sorted((v.start, v.end, v.swa is not None) for v in self.views())

    def node(self, end: int) -> Any:
        """The node of a single chain that ends at token ``end``."""
        (view,) = [v for v in self.views() if v.end == end]
        return view.node

    # pools ------------------------------------------------------------------
    def available(self, rank: int = 0) -> tuple[int, int]:
        return self.allocator.full_available_size(rank), self.allocator.swa_available_size(rank)

    def sums(self, rank: int = 0) -> tuple[int, int, int, int]:
        """FULL evictable, FULL protected, SWA evictable, SWA protected."""
        c = self.cache
        return (
            c.full_evictable_size(rank),
            c.full_protected_size(rank),
            c.swa_evictable_size(rank),
            c.swa_protected_size(rank),
        )

    def assert_idle(self, rank: int = 0) -> None:
        """No locks; each pool is available + evictable == capacity; no violation anywhere."""
        full_e, full_p, swa_e, swa_p = self.sums(rank)
        assert (full_p, swa_p) == (0, 0)
        full, swa = self.available(rank)
        assert (full + full_e, swa + swa_e) == self.capacity
        self.assert_sound()

    def assert_sound(self) -> None:
        assert [str(v) for v in self.allocator.check() + self.cache.check()] == []

    def assert_cold_after_evicting_all(self, rank: int = 0) -> None:
        self.assert_idle(rank)
        self.evict(full=self.capacity[0], swa=self.capacity[1], rank=rank)
        assert self.available(rank) == self.capacity
        assert self.views() == [] or rank != 0


def seq(count: int, start: int = 100) -> list[int]:
    """``count`` distinct token ids."""
    return list(range(start, start + count))
