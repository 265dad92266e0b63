"""Rows and slots of both pools behind one face: what is free, what can be evicted, and the allocations of a step.

Everything is per rank. ``room`` counts what eviction can give back, and every allocation evicts exactly that first (rule 10,
D27, D46). Nothing here knows a cache class; SWA is a capability (``supports_swa``).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from sgl_jax.srt.managers.admission import UNLIMITED, Room
from sgl_jax.srt.managers.memory_checks import pool_capacity
from sgl_jax.srt.managers.request import EMPTY_SLOTS, Req
from sgl_jax.srt.mem_cache.allocator.free_group import free_group
from sgl_jax.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sgl_jax.srt.mem_cache.common import evict_from_tree_cache, release_kv_cache
from sgl_jax.srt.mem_cache.errors import LockReceiptError
from sgl_jax.srt.mem_cache.page import floor_page, new_pages

Int32 = npt.NDArray[np.int32]

#: Operations a crash bundle shows.
OPERATIONS_KEPT = 1000


class KVMemory:
    """The cache, its allocator and the request rows.

    ``hybrid``: the model has a window pool of its own. Slot arrays are int32 and rank-local. ``operations`` keeps the last
    thousand operations for the crash bundle: the cache's own log where it keeps one, with the calls from here in their order.
    """

    def __init__(self, cache: Any, allocator: Any, rows: Any, page_size: int, dp_size: int) -> None:
        self.cache = cache
        self.allocator = allocator
        self.rows = rows
        self.page_size = page_size
        self.dp_size = dp_size
        self.hybrid: bool = cache.supports_swa()
        log: deque[tuple[Any, ...]] | None = getattr(cache, "op_log", None)
        self.operations = deque(maxlen=OPERATIONS_KEPT) if log is None else log

    def match_length(self, req: Req, rank: int) -> int:
        """Tokens of the request's prompt that a rank's cache holds. Takes no lock."""
        key = req.radix_tokens.key(req.adjust_max_prefix_ids(), req.extra_key, rank)
        return len(self.cache.match_prefix(MatchPrefixParams(key=key)).device_indices)

    # ------------------------------------------------------------------------------------------------------------- sizes
    def capacity(self, rank: int) -> Room:
        """Usable slots per pool of a rank, whole pages."""
        del rank  # pools are split evenly
        if not self.hybrid:
            return Room(pool_capacity(self.allocator, self.page_size), UNLIMITED)
        pools = (self.allocator.full_attn_allocator, self.allocator.swa_attn_allocator)
        return Room(*(pool_capacity(pool, self.page_size) for pool in pools))

    def available(self, rank: int) -> Room:
        if not self.hybrid:
            return Room(int(self.allocator.available_size(rank)), UNLIMITED)
        return Room(
            int(self.allocator.full_available_size(rank)), int(self.allocator.swa_available_size(rank))
        )

    def evictable(self, rank: int) -> Room:
        swa = int(self.cache.swa_evictable_size(rank)) if self.hybrid else 0
        return Room(int(self.cache.full_evictable_size(rank)), swa)

    def protected(self, rank: int) -> Room:
        swa = int(self.cache.swa_protected_size(rank)) if self.hybrid else 0
        return Room(int(self.cache.full_protected_size(rank)), swa)

    def room(self, rank: int) -> Room:
        """Available plus evictable, whole pages per pool."""
        free, evictable = self.available(rank), self.evictable(rank)
        swa = floor_page(free.swa + evictable.swa, self.page_size) if self.hybrid else UNLIMITED
        return Room(floor_page(free.full + evictable.full, self.page_size), swa)

    def has_room(self, tokens: int, rank: int) -> bool:
        """Whether each pool can give ``tokens`` (whole pages), evicting if it has to."""
        if tokens <= 0 or tokens <= self.allocator.available_size(rank):
            return True
        room = self.room(rank)
        return tokens <= min(room.full, room.swa)

    def report(self, rank: int) -> str:
        """The numbers behind a shortage, for messages."""
        parts = []
        capacity, free, evictable, held = (
            self.capacity(rank),
            self.available(rank),
            self.evictable(rank),
            self.protected(rank),
        )
        for pool in ("full", "swa") if self.hybrid else ("full",):
            numbers = (getattr(part, pool) for part in (capacity, free, evictable, held))
            parts.append("{}: capacity {}, available {}, evictable {}, protected {}".format(pool, *numbers))
        return f"rank {rank}; " + "; ".join(parts)

    # ------------------------------------------------------------------------------------------------------- allocations
    def alloc_extend(self, start: int, end: int, last_slot: int, rank: int) -> Int32 | None:
        """Slots of both pools for positions ``[start, end)`` of one request; None (and no change) when short."""
        self.operations.append(("alloc_extend", rank, start, end))
        needed = new_pages(start, end, self.page_size) * self.page_size
        evict_from_tree_cache(self.cache, needed, dp_rank=rank)
        slots: Int32 | None
        if self.page_size == 1:
            slots = self.allocator.alloc(end - start, dp_rank=rank)
        else:
            slots = self.allocator.alloc_extend(
                np.array([start], np.int32),
                np.array([end], np.int32),
                np.array([last_slot], np.int32),
                end - start,
                dp_rank=rank,
            )
        return slots

    def alloc_decode(self, seq_lens: Int32, last_slots: Int32, rank: int) -> Int32 | None:
        """One slot per row; ``seq_lens`` includes the new token. None (and no change) when short."""
        self.operations.append(("alloc_decode", rank, len(seq_lens)))
        evict_from_tree_cache(self.cache, self.decode_demand(seq_lens), dp_rank=rank)
        slots: Int32 | None
        if self.page_size == 1:
            slots = self.allocator.alloc(len(seq_lens), dp_rank=rank)
        else:
            slots = self.allocator.alloc_decode(seq_lens, last_slots, dp_rank=rank)
        return slots

    def decode_demand(self, seq_lens: Int32) -> int:
        """Tokens a decode step takes from each pool: whole pages for the rows that cross a boundary (D45)."""
        return int(np.count_nonzero((seq_lens - 1) % self.page_size == 0)) * self.page_size

    def alloc_row(self, req: Req) -> bool:
        """Give the request a row; False when all rows are taken."""
        return self.rows.alloc([req]) is not None

    def free_row(self, req: Req) -> None:
        self.rows.free(req)

    def write_row(self, req: Req, start: int, slots: Int32) -> None:
        self.rows.write((req.req_pool_idx, slice(start, start + len(slots))), slots)

    @property
    def table(self) -> Int32:
        """All rows, ``[rows, max_context_len]`` int32."""
        table: Int32 = self.rows.req_to_token
        return table

    def swa_slots(self, full: Int32, rank: int) -> Int32:
        """Window-pool slots of FULL slots; 0 where unmapped."""
        if not len(full):
            return EMPTY_SLOTS
        slots: Int32 = self.allocator.translate_full_to_swa(full, dp_rank=rank, require_mapped=False)
        return slots

    # ------------------------------------------------------------------------------------------------------------ release
    def release(self, req: Req, *, insert: bool) -> None:
        """The one release path: rows, slots of both pools and the lock receipt. Idempotent.

        Raises LockReceiptError when the cache left the receipt on the request: the lock would never be released.
        """
        self.operations.append(
            ("release", req.rid, req.dp_rank, insert, req.kv_committed_len, req.kv_allocated_len)
        )
        release_kv_cache(req, self.cache, is_insert=insert, allow_overallocated=True)
        if req.cache_lock_params is not None:
            raise LockReceiptError(f"request {req.rid} was released but still carries its lock receipt")

    @contextmanager
    def free_group(self) -> Iterator[None]:
        with free_group(self.allocator):
            yield

    def store_unfinished(self, req: Req) -> None:
        """Offer the computed part to the cache; the row is re-pointed and the receipt exchanged."""
        self.operations.append(("store", req.rid, req.dp_rank, len(req.fill_ids), req.swa_evicted_seqlen))
        self.cache.cache_unfinished_req(req)

    def reclaim(self, req: Req, processed: int, rank: int) -> None:
        """Give back the request's own slots that fell out of its window; the basis is the processed length (rule 9, D37)."""
        if self.reclaims:
            self.operations.append(("reclaim", req.rid, rank, processed))
            self.cache.evict_req_swa(req, processed, rank)

    def narrow_lock(self, req: Req) -> bool:
        """Under pressure: give back what the request's lock holds beyond its window; whether that was anything."""
        return self.hybrid and bool(self.cache.narrow_lock(req))

    @property
    def reclaims(self) -> bool:
        return self.hybrid and self.cache.reclaim_schedule is not None
