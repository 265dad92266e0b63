"""What every KV pool offers: per-layer buffers, addressed by layer id and rank-local slot."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from sgl_jax.srt.mem_cache.allocator.base import BaseTokenToKVPoolAllocator


class PoolSizeError(ValueError, AssertionError):
    """A pool's arrays do not fit the page size, the mesh or the allocator. Names the numbers and the remedy."""


class KVCache(abc.ABC):
    """``size`` slots over all ranks, for layers ``start_layer .. end_layer`` (inclusive) of the model."""

    def __init__(
        self,
        size: int,
        page_size: int,
        dtype: Any,
        layer_num: int,
        mesh: Mesh | None,
        start_layer: int | None = None,
        end_layer: int | None = None,
    ) -> None:
        self.size = size
        self.page_size = page_size
        self.dtype = dtype
        self.layer_num = layer_num
        self.mesh = mesh
        self.start_layer = start_layer or 0
        self.end_layer = self.start_layer + layer_num - 1 if end_layer is None else end_layer
        self.mem_usage = 0.0

    @abc.abstractmethod
    def get_kv_buffer(self, layer_id: int) -> tuple[Any, Any]:
        """(K, V) arrays of one layer."""

    def get_fused_kv_buffer(self, layer_id: int) -> tuple[Any, Any]:
        """The seam's name for what attention takes; K and V are separate arrays here, so it is the same pair."""
        return self.get_kv_buffer(layer_id)

    @abc.abstractmethod
    def set_kv_buffer(self, layer_id: int, loc: Any, cache_k: Any, cache_v: Any, dp_rank: int = 0) -> None:
        """Write K and V of tokens at rank-local slots."""

    @abc.abstractmethod
    def replace_buffer(self, kv_buffer: Sequence[Any]) -> None:
        """Take over the arrays a jitted step returned for the donated ones."""

    def check_allocator(self, allocator: BaseTokenToKVPoolAllocator) -> None:
        """Raise PoolSizeError when the allocator can hand out a slot that an array does not have (D59)."""
        raise NotImplementedError(f"{type(self).__name__} does not know the shape of its arrays")
