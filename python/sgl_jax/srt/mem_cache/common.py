"""Allocation with eviction, and the one release path (shared by every cache and by the scheduler)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from sgl_jax.srt.mem_cache.base_prefix_cache import EvictParams
from sgl_jax.srt.mem_cache.errors import OwnershipError
from sgl_jax.srt.mem_cache.page import ceil_page
from sgl_jax.srt.mem_cache.unified_cache_components.receipts import own_rank

IntArray = npt.NDArray[np.int32]
Lens = Sequence[int] | npt.NDArray[np.integer[Any]]


class OverAllocationError(OwnershipError, AssertionError):
    """A request ended with slots beyond its committed length, which only some callers may leave behind."""


def _is_dual(allocator: Any) -> bool:
    """Whether the allocator joins a FULL and an SWA pool (a pool-layout question, not a cache class)."""
    return hasattr(allocator.__class__, "swa_available_size")


def evict_from_tree_cache(tree_cache: Any, num_tokens: int, dp_rank: int = 0) -> None:
    """Evict what each pool of ``dp_rank`` lacks to hand out ``num_tokens`` (D27). No-op without a cache, a demand or a
    shortfall.

    A cache that remembers nothing evicts nothing.
    """
    if tree_cache is None or num_tokens <= 0:
        return
    allocator = tree_cache.token_to_kv_pool_allocator
    if _is_dual(allocator):
        full = max(0, num_tokens - allocator.full_available_size(dp_rank=dp_rank))
        swa = max(0, num_tokens - allocator.swa_available_size(dp_rank=dp_rank))
    else:
        full, swa = max(0, num_tokens - allocator.available_size(dp_rank=dp_rank)), 0
    if full or swa:
        tree_cache.evict(EvictParams(num_tokens=full, swa_num_tokens=swa, dp_rank=dp_rank))


def available_and_evictable_str(tree_cache: Any, dp_rank: int = 0) -> str:
    """What an out-of-memory message shows: available and evictable tokens per pool of one rank."""
    allocator = tree_cache.token_to_kv_pool_allocator
    if not _is_dual(allocator):
        available = allocator.available_size(dp_rank=dp_rank)
        evictable = tree_cache.evictable_size(dp_rank)
        return f"Available tokens: {available + evictable} ({available=} + {evictable=}, {dp_rank=})\n"
    lines = []
    for name in ("full", "swa"):
        available = getattr(allocator, f"{name}_available_size")(dp_rank=dp_rank)
        evictable = getattr(tree_cache, f"{name}_evictable_size")(dp_rank)
        lines.append(
            f"Available {name} tokens: {available + evictable} ({available=} + {evictable=}, {dp_rank=})\n"
        )
    return "".join(lines)


def _out_of_memory(head: str, tree_cache: Any, wanted: int, dp_rank: int) -> RuntimeError:
    state = "" if tree_cache is None else available_and_evictable_str(tree_cache, dp_rank)
    return RuntimeError(f"{head}. Tried to allocate {wanted} tokens on dp_rank={dp_rank}.\n{state}")


def alloc_token_slots(
    tree_cache: Any, num_tokens: int, backup_state: bool = False, dp_rank: int = 0
) -> IntArray | tuple[IntArray, Any]:
    """``num_tokens`` slots at page size 1, evicting when short. With ``backup_state`` also the allocator's state before.

    Raises RuntimeError ("Out of memory") when eviction does not yield enough.
    """
    allocator = tree_cache.token_to_kv_pool_allocator
    evict_from_tree_cache(tree_cache, num_tokens, dp_rank)
    state = allocator.backup_state() if backup_state else None
    slots: IntArray | None = allocator.alloc(num_tokens, dp_rank=dp_rank)
    if slots is None:
        raise _out_of_memory("Out of memory", tree_cache, num_tokens, dp_rank)
    return (slots, state) if backup_state else slots


def extend_demand(prefix_lens: Lens, seq_lens: Lens, page_size: int) -> int:
    """Tokens of whole new pages that extending each sequence from ``prefix`` to ``seq`` takes (D45)."""
    prefix = np.asarray(prefix_lens, np.int64)
    seq = np.asarray(seq_lens, np.int64)
    pages = -(-seq // page_size) - -(-prefix // page_size)
    return int(pages.sum()) * page_size


def alloc_paged_token_slots_extend(
    tree_cache: Any,
    prefix_lens: Lens,
    seq_lens: Lens,
    last_loc: Lens,
    extend_num_tokens: int,
    backup_state: bool = False,
    dp_rank: int = 0,
) -> IntArray | tuple[IntArray, Any]:
    """Slots for ``[prefix, seq)`` of every sequence, evicting exactly what the new pages lack.

    Raises RuntimeError ("Prefill out of memory") when eviction does not yield enough.
    """
    allocator = tree_cache.token_to_kv_pool_allocator
    evict_from_tree_cache(tree_cache, extend_demand(prefix_lens, seq_lens, allocator.page_size), dp_rank)
    state = allocator.backup_state() if backup_state else None
    slots: IntArray | None = allocator.alloc_extend(
        prefix_lens, seq_lens, last_loc, extend_num_tokens, dp_rank=dp_rank
    )
    if slots is None:
        raise _out_of_memory("Prefill out of memory", tree_cache, extend_num_tokens, dp_rank)
    return (slots, state) if backup_state else slots


def release_kv_cache(
    req: Any, tree_cache: Any, is_insert: bool = True, allow_overallocated: bool = False
) -> None:
    """The one way a request gives up its row: finish, abort and retract alike. No-op without a row.

    ::

        [0, committed) and the rest of its page       → the cache (insert, or free from the protected length on)
        [ceil_page(committed), kv_allocated_len)      → free
        the row                                       → free

    Raises OverAllocationError when slots beyond the committed length exist and ``allow_overallocated`` is False; everything
    is released all the same.
    """
    if req.req_pool_idx is None:
        return
    tree_cache.cache_finished_req(req, is_insert=is_insert)
    committed, allocated = req.pop_overallocated_kv_cache()
    over = committed < allocated
    start = ceil_page(committed, tree_cache.page_size) if over else allocated
    if start < allocated:
        row = tree_cache.req_to_token_pool.req_to_token[req.req_pool_idx]
        slots = np.array(row[start:allocated], np.int32)
        tree_cache.token_to_kv_pool_allocator.free(slots, dp_rank=own_rank(req))
    tree_cache.req_to_token_pool.free(req)
    if over and not allow_overallocated:
        raise OverAllocationError(
            f"request {getattr(req, 'rid', '?')} ended with {allocated} slots allocated and {committed} committed"
        )
