"""Caches without sharing (``--disable-radix-cache``): every request owns its slots alone, until it finishes.

::

    [0, kv_allocated_len)         request-owned FULL
    [cursor, kv_allocated_len)    request-owned SWA (hybrid models), cursor = swa_evicted_seqlen
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from sgl_jax.srt.mem_cache.base_prefix_cache import (
    BasePrefixCache,
    DecLockRefParams,
    EvictParams,
    EvictResult,
    IncLockRefResult,
    MatchPrefixParams,
    MatchResult,
    ReclaimSchedule,
)
from sgl_jax.srt.mem_cache.errors import Violation
from sgl_jax.srt.mem_cache.unified_cache_components.receipts import (
    committed_tail_end,
    own_rank,
    reclaim_rank,
    require_rank,
    store_receipt,
)
from sgl_jax.srt.mem_cache.window import reclaim_boundary

IntArray = npt.NDArray[np.int32]


class ChunkCache(BasePrefixCache):
    """Remembers nothing between requests; keeps a chunked request's slots between its chunks."""

    def __init__(self, req_to_token_pool: Any, token_to_kv_pool_allocator: Any, page_size: int) -> None:
        self.req_to_token_pool = req_to_token_pool
        self.token_to_kv_pool_allocator = token_to_kv_pool_allocator
        self.page_size = page_size
        self.disable = True

    def reset(self) -> None:
        """Nothing is remembered."""

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        """Always empty, with no node."""
        return MatchResult(np.empty((0,), np.int32), None, None)

    def cache_finished_req(self, req: Any, is_insert: bool = True, **kwargs: Any) -> None:
        """``[0, committed)`` and the rest of its last page → free; a receipt, which holds nothing here, is cleared."""
        committed = req.pop_committed_kv_cache()
        end = committed_tail_end(req, committed, self.page_size)
        if end:
            slots = np.array(self._row(req)[:end], np.int32)
            self.token_to_kv_pool_allocator.free(slots, dp_rank=own_rank(req))
        store_receipt(req, None)

    def cache_unfinished_req(self, req: Any, **kwargs: Any) -> None:
        """The next chunk continues on a copy of the row."""
        req.prefix_indices = self._row(req)[: len(req.fill_ids)].copy()

    def _row(self, req: Any) -> IntArray:
        row: IntArray = self.req_to_token_pool.req_to_token[req.req_pool_idx]
        return row

    def evict(self, params: EvictParams) -> EvictResult:
        return EvictResult()

    def inc_lock_ref(self, node: Any) -> IncLockRefResult:
        return IncLockRefResult(delta=0)

    def dec_lock_ref(self, node: Any, params: DecLockRefParams | None = None) -> int:
        return 0

    def total_size(self) -> int:
        return 0

    def check(self) -> list[Violation]:
        """Nothing is remembered, so nothing can be wrong here; rows and pools are the ledger's."""
        return []

    def pretty_print(self) -> str:
        return ""


class SWAChunkCache(ChunkCache):
    """``ChunkCache`` over a dual-pool allocator; owns the reclaim of request tails (RFC-0035 section 5)."""

    reclaim_schedule: ClassVar[ReclaimSchedule | None] = ReclaimSchedule(0, 0, True)
    dp_size = 1

    def __init__(
        self,
        req_to_token_pool: Any,
        token_to_kv_pool_allocator: Any,
        page_size: int,
        sliding_window_size: int,
    ) -> None:
        """Raises ValueError unless the window is positive."""
        super().__init__(req_to_token_pool, token_to_kv_pool_allocator, page_size)
        if sliding_window_size is None or sliding_window_size <= 0:
            raise ValueError(f"sliding_window_size={sliding_window_size}: a positive window is needed")
        self.sliding_window_size = sliding_window_size
        ranks = getattr(token_to_kv_pool_allocator, "dp_size", 1)
        self.dp_size = ranks if isinstance(ranks, int) else 1

    def supports_swa(self) -> bool:
        return True

    def evict_req_swa(self, req: Any, pre_len: int, dp_rank: int | None = None) -> None:
        """Free SWA of ``[cursor, floor_page(pre_len - W - P))``; nothing is tree-owned, so protected length 0.

        Raises ValueError when ``dp_rank`` is omitted with several ranks or is not the request's.
        """
        if req.req_pool_idx is None:
            return
        rank = reclaim_rank(req, dp_rank, self.dp_size)
        evicted = int(req.swa_evicted_seqlen)
        old, new = reclaim_boundary(evicted, 0, pre_len, self.sliding_window_size, self.page_size)
        if new > old:
            slots = np.array(self._row(req)[old:new], np.int32)
            self.token_to_kv_pool_allocator.free_swa(slots, dp_rank=rank)
        req.swa_evicted_seqlen = max(evicted, new)

    def cache_unfinished_req(self, req: Any, **kwargs: Any) -> None:
        """As the base, and the receipt is exchanged so that every cache leaves the same trail on a request."""
        super().cache_unfinished_req(req, **kwargs)
        node = getattr(req, "last_node", None)
        old = getattr(req, "cache_lock_params", None)
        if old is not None:
            self.dec_lock_ref(node, old)
        store_receipt(req, self.inc_lock_ref(node))

    def cache_finished_req(self, req: Any, is_insert: bool = True, **kwargs: Any) -> None:
        """As the base; releases the receipt first. Raises ValueError for a request without rank on several ranks."""
        require_rank(req, self.dp_size)
        receipt = getattr(req, "cache_lock_params", None)
        if receipt is not None:
            self.dec_lock_ref(getattr(req, "last_node", None), receipt)
        super().cache_finished_req(req, is_insert, **kwargs)

    def cache_ledger_snapshot(self, dp_rank: int, live_reqs: Iterable[Any]) -> dict[str, int]:
        """The ownership ledger of one rank (RFC-0035 section 6); read-only."""
        from sgl_jax.srt.mem_cache.ledger.snapshot import build_snapshot

        return build_snapshot(self, dp_rank, live_reqs)
