"""A desk for worked examples: a real cache over real allocators without device arrays, and readable pictures of its tree.

At page size ``P`` an example is written in pages: token lists are built from page letters, a fresh allocator hands out page 1
first, and ``pages`` turns slots back into page numbers. So one literal expectation serves every page size.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from sgl_jax.srt.mem_cache.allocator import SWATokenToKVPoolAllocator
from sgl_jax.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, InsertResult, MatchPrefixParams
from sgl_jax.srt.mem_cache.cache_init_params import CacheInitParams
from sgl_jax.srt.mem_cache.memory_pool import ReqToTokenPool, SWAKVPool
from sgl_jax.srt.mem_cache.radix_tree.key import RadixKey
from sgl_jax.srt.mem_cache.unified_cache_components import ComponentType, UnifiedTreeNode
from sgl_jax.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

FULL, SWA = ComponentType.FULL, ComponentType.SWA
GEOMETRY = [(page, dp) for page in (1, 128, 256) for dp in (1, 2)]
GEOMETRY_IDS = [f"page{page}-dp{dp}" for page, dp in GEOMETRY]


def dual_allocator(
    page: int = 1, full_pages: int = 64, swa_pages: int = 64, dp: int = 1, strict: bool = True
) -> SWATokenToKVPoolAllocator:
    """Strict dual allocator with ``full_pages`` / ``swa_pages`` per rank."""
    return SWATokenToKVPoolAllocator(
        full_pages * page * dp,
        swa_pages * page * dp,
        SWAKVPool.__new__(SWAKVPool),
        page_size=page,
        dp_size=dp,
        strict=strict,
    )


class Desk:
    """One cache. ``window`` is in tokens; ``rank`` of every helper defaults to the last rank."""

    def __init__(
        self,
        page: int = 1,
        window: int = 4,
        dp: int = 1,
        full_pages: int = 64,
        swa_pages: int = 64,
        kinds: Sequence[ComponentType] = (FULL, SWA),
    ) -> None:
        self.page, self.window, self.rank = page, window, dp - 1
        self.allocator = dual_allocator(page, full_pages, swa_pages, dp)
        self.rows = ReqToTokenPool(8, full_pages * page + 64)
        self.cache = UnifiedRadixCache(
            self.rows,
            self.allocator,
            page_size=page,
            tree_components=kinds,
            component_init_params=CacheInitParams(
                self.rows, self.allocator, page, sliding_window_size=window
            ),
        )

    # tokens and slots
    def key(self, letters: str, drop: int = 0) -> RadixKey:
        """One page of equal tokens per letter; ``drop`` tokens are cut from the end."""
        ids = [ord(letter) for letter in letters for _ in range(self.page)]
        return RadixKey(ids[: len(ids) - drop], None, self.rank)

    def alloc(self, pages: int) -> Any:
        slots = self.allocator.alloc(pages * self.page, dp_rank=self.rank)
        assert slots is not None
        return slots

    def slots(self, *pages: int) -> Any:
        """The slots of these pages."""
        return np.concatenate([np.arange(p * self.page, (p + 1) * self.page, dtype=np.int32) for p in pages])

    def pages(self, slots: Any) -> list[int]:
        """Page numbers of whole pages of slots, in order."""
        ids = np.asarray(slots).reshape(-1, self.page)
        assert (ids == ids[:, :1] + np.arange(self.page)).all()
        return (ids[:, 0] // self.page).tolist()  # type: ignore[no-any-return]

    def mapped(self, *pages: int) -> list[int]:
        """SWA page of each FULL page; 0 = unmapped."""
        swa = self.allocator.translate_full_to_swa(
            self.slots(*pages), dp_rank=self.rank, require_mapped=False
        )
        return (swa.reshape(-1, self.page)[:, 0] // self.page).tolist()  # type: ignore[no-any-return]

    def available(self) -> tuple[int, int]:
        """Free pages of FULL and SWA."""
        a = self.allocator
        return a.full_available_size(self.rank) // self.page, a.swa_available_size(self.rank) // self.page

    # cache calls
    def insert(self, letters: str, slots: Any = None, prev: int = 0, cursor: int = 0) -> InsertResult:
        """Insert fresh slots (or ``slots``); ``prev`` and ``cursor`` in pages."""
        value = self.alloc(len(letters)) if slots is None else slots
        params = InsertParams(self.key(letters), value, prev * self.page, cursor * self.page)
        return self.cache.insert(params)

    def match(self, letters: str, drop: int = 0, full_only: bool = False) -> list[int]:
        params = MatchPrefixParams(self.key(letters, drop), full_only=full_only)
        return self.pages(self.cache.match_prefix(params).device_indices)

    def evict(self, full: int = 0, swa: int = 0) -> tuple[int, int]:
        """Evict pages; returns pages given back."""
        params = EvictParams(full * self.page, swa * self.page, self.rank)
        result = self.cache.evict(params)
        return result.num_tokens_evicted // self.page, result.swa_num_tokens_evicted // self.page

    def node(self, letters: str) -> UnifiedTreeNode:
        """The node that ends exactly after ``letters``."""
        at = self.cache.root_node
        rest = self.key(letters)
        while len(rest):
            at = at.children[self.cache.get_child_key_fn(rest)]
            assert rest.startswith(at.key), "no node ends here"
            rest = rest[len(at.key) :]
        return at

    def lock(self, letters: str) -> tuple[Any, Any]:
        node = self.node(letters)
        return node, self.cache.inc_lock_ref(node).to_dec_params()

    def tombstone(self, letters: str) -> None:
        """Internal SWA eviction of one node."""
        self.cache.components[SWA].evict_component(self.node(letters))

    # pictures
    def picture(self) -> list[str]:
        """Sorted ``path/own letters state``; S live, T tombstone."""
        out = []
        for node in self.cache.iter_nodes(self.rank):
            ids = node.key.token_ids[:: self.page]
            path, at = "", node.parent
            while at.parent is not None:
                path = "".join(chr(i) for i in at.key.token_ids[:: self.page]) + path
                at = at.parent
            own = "".join(chr(i) for i in ids)
            state = "S" if node.component_data[SWA].value is not None else "T"
            out.append(f"{path}/{own} {state}")
        return sorted(out)

    def sums(self) -> tuple[int, int, int, int]:
        """Pages: FULL evictable, FULL protected, SWA evictable, SWA protected."""
        c, r, p = self.cache, self.rank, self.page
        return (
            c.full_evictable_size(r) // p,
            c.full_protected_size(r) // p,
            c.swa_evictable_size(r) // p,
            c.swa_protected_size(r) // p,
        )

    def sound(self) -> None:
        assert [str(v) for v in self.cache.check() + self.allocator.check()] == []

    # requests
    def request(self, letters: str, rid: str = "r", tail: int = 0) -> SimpleNamespace:
        """An admitted request over ``letters`` plus ``tail`` extra tokens, everything computed, prefix matched and locked."""
        ids = self.key(letters).token_ids + [7] * tail
        matched = self.cache.match_prefix(MatchPrefixParams(RadixKey(ids[: len(ids) - 1], None, self.rank)))
        prefix = len(matched.device_indices)
        req = SimpleNamespace(
            rid=rid,
            origin_input_ids=ids,
            output_ids=[],
            fill_ids=ids,
            extra_key=None,
            dp_rank=self.rank,
            req_pool_idx=None,
            is_chunked=0,
            prefix_indices=matched.device_indices,
            last_node=matched.last_device_node,
            cache_protected_len=prefix,
            last_matched_prefix_len=prefix,
            swa_evicted_seqlen=0,
            swa_uuid_for_lock=None,
            cache_lock_params=None,
            kv_committed_len=len(ids),
            kv_allocated_len=len(ids),
        )
        req.pop_committed_kv_cache = lambda: req.kv_committed_len
        req.pop_overallocated_kv_cache = lambda: (req.kv_committed_len, req.kv_allocated_len)
        receipt = self.cache.inc_lock_ref(req.last_node)
        req.cache_lock_params, req.swa_uuid_for_lock = receipt.to_dec_params(), receipt.swa_uuid_for_lock
        self.rows.alloc([req])
        row = self.row(req)
        row[:prefix] = matched.device_indices
        pages = -(-(len(ids) - prefix) // self.page)
        if self.page == 1 or not tail:
            row[prefix : len(ids)] = self.alloc(pages)
        else:
            last = np.array([row[prefix - 1] if prefix else -1], np.int32)
            row[prefix : len(ids)] = self.allocator.alloc_extend(
                [prefix], [len(ids)], last, len(ids) - prefix, dp_rank=self.rank
            )
        return req

    def row(self, req: Any) -> Any:
        return self.rows.req_to_token[req.req_pool_idx]

    def row_pages(self, req: Any) -> list[int]:
        return self.pages(self.row(req)[: len(req.fill_ids) // self.page * self.page])
