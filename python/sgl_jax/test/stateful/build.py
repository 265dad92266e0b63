"""Builds a real cache over pools without device arrays: the state machines and the soak need none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sgl_jax.srt.mem_cache.allocator import (
    PagedTokenToKVPoolAllocator,
    SWATokenToKVPoolAllocator,
    TokenToKVPoolAllocator,
)
from sgl_jax.srt.mem_cache.cache_init_params import CacheInitParams
from sgl_jax.srt.mem_cache.memory_pool import ReqToTokenPool, SWAKVPool


@dataclass(frozen=True, slots=True)
class WorldConfig:
    """One corner of the matrix. ``full_pages`` / ``swa_pages`` are per rank, ``blocks`` bounds prompts in pages.

    ``cache``: "unified" (FULL and SWA), "full" (the unified tree of a plain model) or "chunk" (SWAChunkCache).
    """

    page: int = 1
    window: int = 4
    dp: int = 1
    full_pages: int = 40
    swa_pages: int = 28
    rows: int = 6
    blocks: int = 10
    chunk: int = 8
    cache: str = "unified"

    def label(self) -> str:
        return f"{self.cache}-p{self.page}-w{self.window}-dp{self.dp}-f{self.full_pages}-s{self.swa_pages}-c{self.chunk}"


def build_allocator(page: int, full_pages: int, swa_pages: int, dp: int, strict: bool = True) -> Any:
    """A dual-pool allocator over a pool object that has the right class and nothing else."""
    kv = SWAKVPool.__new__(SWAKVPool)
    return SWATokenToKVPoolAllocator(
        full_pages * page * dp, swa_pages * page * dp, kv, page_size=page, dp_size=dp, strict=strict
    )


def build_plain_allocator(page: int, pages: int, dp: int) -> Any:
    """A single-pool allocator, strict."""
    if page == 1:
        return TokenToKVPoolAllocator(pages * dp, None, dp_size=dp, strict=True)
    return PagedTokenToKVPoolAllocator(pages * page * dp, page, None, dp_size=dp, strict=True)


def build_cache(kind: str, allocator: Any, page: int, window: int, rows: int, context: int) -> Any:
    """The cache under test with its request rows."""
    pool = ReqToTokenPool(rows, context)
    if kind == "chunk":
        from sgl_jax.srt.mem_cache.chunk_cache import SWAChunkCache

        return SWAChunkCache(pool, allocator, page, window)
    from sgl_jax.srt.mem_cache.unified_cache_components import ComponentType
    from sgl_jax.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    return UnifiedRadixCache(
        pool,
        allocator,
        page_size=page,
        tree_components=(ComponentType.FULL,) if kind == "full" else (ComponentType.FULL, ComponentType.SWA),
        component_init_params=CacheInitParams(
            pool, allocator, page, sliding_window_size=None if kind == "full" else window
        ),
    )
