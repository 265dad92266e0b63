"""What a request hands to the tree and gets back: unfinished, finished, reclaim (RFC-0035 section 5).

A request's row, ``p = cache_protected_len``, ``c = swa_evicted_seqlen``, ``a`` = last full page of what is cached now::

    [0, p)                 tree-owned, locked by the request
    [p, a)                 request-owned → offered to the tree
    [a, kv_allocated_len)  request-owned; on finish → free
    [max(p, c), ...)       where the request's own positions still have SWA
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from sgl_jax.srt.mem_cache.base_prefix_cache import InsertParams
from sgl_jax.srt.mem_cache.errors import LockReceiptError, TreeInvariantError
from sgl_jax.srt.mem_cache.page import floor_page
from sgl_jax.srt.mem_cache.radix_tree.key import RadixKey
from sgl_jax.srt.mem_cache.radix_tree.request_key import build_radix_key, to_bigram_key
from sgl_jax.srt.mem_cache.unified_cache_components.node import UnifiedTreeNode
from sgl_jax.srt.mem_cache.unified_cache_components.receipts import (
    committed_tail_end,
    own_rank,
    require_rank,
    rid_of,
    store_receipt,
)
from sgl_jax.srt.mem_cache.unified_cache_components.tree_component import overriders
from sgl_jax.srt.mem_cache.window import reclaim_boundary

if TYPE_CHECKING:
    from sgl_jax.srt.mem_cache.unified_radix_cache.cache import UnifiedRadixCache

IntArray = npt.NDArray[np.int32]


class RequestLifecycle:
    """Transactions of one unified cache. Every path releases or replaces the request's receipt (rule 3).

    Before anything changes, each raises ValueError for a request without ``dp_rank`` where SWA has several ranks (fault 7) and
    LockReceiptError for one whose node left the tree, by a reset for instance: its slots may be somebody else's by now (D34).
    """

    def __init__(self, cache: UnifiedRadixCache) -> None:
        self._cache = cache
        self._preparers = overriders(cache.components.values(), "prepare_for_caching_req")
        self._cleaners = overriders(cache.components.values(), "cleanup_after_caching_req")

    def _row(self, req: Any) -> IntArray:
        row: IntArray = self._cache.req_to_token_pool.req_to_token[req.req_pool_idx]
        return row

    def _require_current(self, req: Any) -> None:
        cache, node = self._cache, req.last_node
        if cache.has_swa:
            require_rank(req, cache.dp_size)
        if cache.disable or node is None or node is cache.root_node:
            return
        if node.parent is None or not cache.tree.owns(node):
            raise LockReceiptError(
                f"request {rid_of(req)}: its node {node.id} is not in the tree any more; nothing was released"
            )

    def _prepare(self, req: Any, length: int, is_finished: bool) -> tuple[InsertParams, int]:
        """Insert parameters filled by the components, and how many tokens they allow."""
        params = InsertParams(prev_prefix_len=int(req.cache_protected_len))
        for component in self._preparers:
            cap = component.prepare_for_caching_req(req, params, length, is_finished)
            length = length if cap is None else min(length, cap)
        return params, length

    def _key(self, req: Any, length: int) -> RadixKey:
        """Page-aligned key of the request's first ``length`` tokens."""
        page_size = self._cache.page_size
        if not self._cache.is_eagle:
            return build_radix_key(req, floor_page(length, page_size))
        key = to_bigram_key(build_radix_key(req, length))
        return key[: floor_page(key.length, page_size)]

    def _start_node(self, req: Any, key: RadixKey) -> UnifiedTreeNode:
        """Where the insert may begin: the request's locked node when it ends at the protected length, else the root.

        The node is locked, so its path stands and is spelled by the request's own tokens; only new pages are walked.
        """
        cache, node = self._cache, req.last_node
        end = int(req.cache_protected_len)
        if node is None or node is cache.root_node or node.parent is None or not cache.tree.owns(node):
            return cache.root_node
        if not node.full_data.locked or node.end != end or end > key.length:
            return cache.root_node
        own = node.key
        spelled = own.extra_key == key.extra_key and own.dp_rank == key.dp_rank
        return node if spelled and key.startswith(own, end - own.length) else cache.root_node

    def unfinished(self, req: Any) -> None:
        """One transaction: insert, re-point the row, exchange the receipt (rule 2, D35)::

        [0, p)   as it was
        [p, a)   → tree; the row shows the tree's slots, duplicates → free
        [a, ..)  stays the request's; prefix_indices shows the whole row
        """
        cache = self._cache
        self._require_current(req)
        length = len(req.fill_ids)
        row = self._row(req)
        if cache.disable:
            req.prefix_indices = row[:length].copy()
            store_receipt(req, cache.inc_lock_ref(req.last_node))
            return
        params, cap = self._prepare(req, length, False)
        if cap <= 0:
            req.prefix_indices = row[:length].copy()
            return
        key = self._key(req, cap)
        protected = params.prev_prefix_len
        params.key, params.value = key, row[: key.length]
        with cache.applier.transaction():
            facts = cache.insert_below(self._start_node(req, key), params, keep_leaf=True, rid=rid_of(req))
            self._free_single(facts.result.prefix_len, params, key)
            if facts.result.prefix_len > protected:
                self._repoint(row, facts.end, protected)
            for component in self._cleaners:
                component.cleanup_after_caching_req(req, False, facts.result, params)
            self._exchange_lock(req, facts.end)
        matched = facts.end.path_len()
        req.last_matched_prefix_len = req.cache_protected_len = matched
        shown = row[:length]
        shown.flags.writeable = (
            False  # a view: the row changes under its owner only, and never through this name
        )
        req.prefix_indices = shown

    def _free_single(self, prefix_len: int, params: InsertParams, key: RadixKey) -> None:
        """With one component the core leaves ``[p, prefix_len)`` to the caller."""
        if len(self._cache._components_tuple) == 1 and params.value is not None:
            duplicates = params.value[params.prev_prefix_len : prefix_len]
            self._cache.applier.free(duplicates, key.dp_rank or 0)

    @staticmethod
    def _repoint(row: IntArray, end: UnifiedTreeNode, protected: int) -> None:
        """Row positions from ``protected`` on show the slots of the tree; walks the new nodes only.

        Needed where the tree held part of what was inserted: a new leaf has its slots from this row.
        """
        at = end
        while at.parent is not None and at.path_len() > protected:
            low = max(at.start, protected)
            row[low : at.path_len()] = at.full_data.value[low - at.start :]
            at = at.parent

    def _exchange_lock(self, req: Any, node: UnifiedTreeNode) -> None:
        """Lock the new node, then release the old receipt: the shared part is protected throughout."""
        cache, old = self._cache, req.last_node
        receipt = getattr(req, "cache_lock_params", None)
        result = cache.inc_lock_ref(node)
        if old is not None:
            cache.dec_lock_ref(old, receipt)
        req.last_node = node
        store_receipt(req, result)

    def narrow(self, req: Any) -> bool:
        """Exchange the request's lock for a smaller one of the same node, where a component can make one."""
        node, receipt = req.last_node, getattr(req, "cache_lock_params", None)
        if node is None or receipt is None:
            return False
        cut = [component.cut_lock(node, receipt) for component in self._cache._components_tuple]
        if any(cut):
            self._exchange_lock(req, node)
        return any(cut)

    def finished(self, req: Any, is_insert: bool) -> None:
        """The request's last word, in one transaction (D31: release starts at ``p``)::

        [0, p)     stays the tree's
        [p, a)     → tree (is_insert) or free
        [a, end)   unaligned tail → free, with the rest of its page
        """
        cache = self._cache
        self._require_current(req)
        committed = req.pop_committed_kv_cache()
        row = self._row(req)
        rank = own_rank(req)
        end = committed_tail_end(req, committed, cache.page_size)
        if cache.disable:
            with cache.applier.transaction():
                slots = row[:end]
                cache.applier.free(slots[slots != 0], rank)
            store_receipt(req, None)
            return
        params, cap = self._prepare(req, committed, True)
        key = self._key(req, max(cap, 0))
        kept = max(key.length, params.prev_prefix_len)
        with cache.applier.transaction():
            result = None
            if is_insert and key.length:
                params.key, params.value = key, row[: key.length]
                facts = cache.insert_below(
                    self._start_node(req, key), params, keep_leaf=False, rid=rid_of(req)
                )
                result = facts.result
                self._free_single(result.prefix_len, params, key)
            else:
                cache.applier.free(row[params.prev_prefix_len : kept], rank)
            cache.applier.free(row[kept:end], rank)
            for component in self._cleaners:
                component.cleanup_after_caching_req(req, True, result, params)
            if req.last_node is not None:
                cache.dec_lock_ref(req.last_node, getattr(req, "cache_lock_params", None))
        store_receipt(req, None)

    def reclaim(self, req: Any, pre_len: int, rank: int, window: int) -> None:
        """Give back the request's SWA tail that no query will read again (RFC-0035 section 5)::

        [0, p)        tree-owned, never touched; p = path length of the request's node
        [old, new)    SWA → free
        [new, ...)    kept: at least W + P before ``pre_len``
        """
        cache = self._cache
        if req.req_pool_idx is None:
            return
        node = req.last_node
        protected = 0 if cache.disable or node is None else node.path_len()
        if protected % cache.page_size:
            raise TreeInvariantError(
                f"request {getattr(req, 'rid', '?')}: protected length {protected} is no multiple of {cache.page_size}"
            )
        evicted = int(req.swa_evicted_seqlen)
        old, new = reclaim_boundary(evicted, protected, pre_len, window, cache.page_size)
        if new > old:
            cache.applier.free_swa(self._row(req)[old:new], rank)
        req.swa_evicted_seqlen = max(evicted, new)
