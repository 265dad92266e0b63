"""Allocators over pools without device arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sgl_jax.srt.mem_cache.allocator import SWATokenToKVPoolAllocator
from sgl_jax.srt.mem_cache.memory_pool.swa import SWAKVPool

#: The RFC's matrix: page size x DP ranks.
matrix = pytest.mark.parametrize("page,dp", [(p, dp) for p in (1, 128, 256) for dp in (1, 2)])


def dual(
    page: int, full_pages: int, swa_pages: int, dp: int = 1, strict: bool = True
) -> SWATokenToKVPoolAllocator:
    """``full_pages`` and ``swa_pages`` per rank."""
    full, swa = full_pages * page * dp, swa_pages * page * dp
    pool = SWAKVPool.host_only(full, swa, page, dp)
    return SWATokenToKVPoolAllocator(full, swa, pool, page_size=page, dp_size=dp, strict=strict)


def ids(*values: int) -> Any:
    return np.array(values, np.int32)


def span(start: int, stop: int) -> Any:
    return np.arange(start, stop, dtype=np.int32)


def mapping_of(allocator: SWATokenToKVPoolAllocator, rank: int = 0) -> Any:
    mapping = allocator.full_to_swa_index_mapping
    return mapping[rank] if isinstance(mapping, list) else mapping


def sizes(allocator: SWATokenToKVPoolAllocator, rank: int = 0) -> tuple[int, int]:
    """(FULL, SWA) available tokens of a rank."""
    return allocator.full_available_size(rank), allocator.swa_available_size(rank)


def image(allocator: SWATokenToKVPoolAllocator) -> dict[str, Any]:
    """Everything observable about both pools and the mapping, for before/after comparisons."""
    subs = {"full": allocator.full_attn_allocator, "swa": allocator.swa_attn_allocator}
    picture: dict[str, Any] = {}
    for name, sub in subs.items():
        picture[f"{name}.free"] = [a.tolist() for a in sub.free_pages]
        picture[f"{name}.released"] = [a.tolist() for a in sub.release_pages]
        for rank in range(allocator.dp_size):
            picture[f"{name}.free_mask.{rank}"] = sub.free_mask(rank).tolist()
            picture[f"{name}.pending.{rank}"] = sub.pending_mask(rank).tolist()
    for rank in range(allocator.dp_size):
        picture[f"mapping.{rank}"] = mapping_of(allocator, rank).tolist()
    return picture
