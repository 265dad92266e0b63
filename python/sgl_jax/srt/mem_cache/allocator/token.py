"""Page size 1: slots are handed out one by one."""

from __future__ import annotations

from typing import Any

import numpy as np

from sgl_jax.srt.mem_cache.allocator.rank_pool import IntArray
from sgl_jax.srt.mem_cache.allocator.single import SinglePoolAllocator


class TokenToKVPoolAllocator(SinglePoolAllocator):
    """Slots ``1..size // dp_size`` per rank. Freed slots are reused after the fresh ones, ascending."""

    def __init__(self, size: int, kvcache: Any, dp_size: int = 1, strict: bool = False) -> None:
        super().__init__(size, 1, kvcache, dp_size, strict)
        self.origin_size = size

    @property
    def free_slots(self) -> list[IntArray]:
        """Per rank, all free slots (copies)."""
        pairs = zip(self.free_pages, self.release_pages, strict=True)
        return [np.concatenate(pair) for pair in pairs]

    def alloc(self, need_size: int, dp_rank: int | None = None) -> IntArray | None:
        rank = self.rank_of(dp_rank)
        if need_size < 0:
            raise ValueError(f"need_size={need_size} must not be negative")
        slots = self._pools[rank].take(need_size)
        return None if slots is None else slots.copy()
