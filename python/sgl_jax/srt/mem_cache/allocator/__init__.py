"""Slot allocators: token, paged and dual-pool (FULL + SWA), with grouped frees. Importable without jax."""

from sgl_jax.srt.mem_cache.allocator.base import BaseTokenToKVPoolAllocator
from sgl_jax.srt.mem_cache.allocator.free_group import free_group
from sgl_jax.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sgl_jax.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
from sgl_jax.srt.mem_cache.allocator.token import TokenToKVPoolAllocator

__all__ = [
    "BaseTokenToKVPoolAllocator",
    "PagedTokenToKVPoolAllocator",
    "SWATokenToKVPoolAllocator",
    "TokenToKVPoolAllocator",
    "free_group",
]
