"""Two device pools for hybrid models, FULL and SWA, addressed by model layer id. Importable without jax."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from sgl_jax.srt.mem_cache.memory_pool.kv_cache import KVCache, PoolSizeError

if TYPE_CHECKING:
    from sgl_jax.srt.mem_cache.allocator.base import BaseTokenToKVPoolAllocator

IntArray = npt.NDArray[np.int32]


class SWAKVPool(KVCache):
    """``full_kv_pool`` and ``swa_kv_pool``; ``layers_mapping[layer_id] = (index in its pool, is_swa)``.

    ``full_to_swa_index_mapping`` is set by the dual allocator (the same object, not a copy): one int32 array, or a list of
    one per rank at ``dp_size > 1``. SWA layers may have their own head count and dimensions.

    Keywords ``mesh``, ``dtype``, ``head_num``, ``head_dim``, ``dp_size``, ``v_head_dim`` describe the FULL layers and are
    handed to ``token_to_kv_pool_class`` (MHATokenToKVPool unless given).
    """

    def __init__(
        self,
        size: int,
        size_swa: int,
        page_size: int,
        swa_attention_layer_ids: Sequence[int],
        full_attention_layer_ids: Sequence[int],
        token_to_kv_pool_class: type[Any] | None = None,
        swa_head_num: int | None = None,
        swa_head_dim: int | None = None,
        swa_v_head_dim: int | None = None,
        **kwargs: Any,
    ) -> None:
        if token_to_kv_pool_class is None:
            from sgl_jax.srt.mem_cache.memory_pool.mha import MHATokenToKVPool

            token_to_kv_pool_class = MHATokenToKVPool
        self._set_layout(size, size_swa, page_size, swa_attention_layer_ids, full_attention_layer_ids)
        self.dp_size = int(kwargs.get("dp_size", 1))
        self.mesh = kwargs["mesh"]
        self.dtype = kwargs.get("dtype")
        swa_kwargs = dict(kwargs)
        if swa_head_num is not None:
            swa_kwargs["head_num"] = swa_head_num
        if swa_head_dim is not None:
            swa_kwargs["head_dim"] = swa_head_dim
            swa_kwargs["v_head_dim"] = swa_head_dim
        if swa_v_head_dim is not None:
            swa_kwargs["v_head_dim"] = swa_v_head_dim
        self.full_kv_pool = token_to_kv_pool_class(
            size=size, page_size=page_size, layer_num=len(full_attention_layer_ids), **kwargs
        )
        self.swa_kv_pool = token_to_kv_pool_class(
            size=size_swa, page_size=page_size, layer_num=len(swa_attention_layer_ids), **swa_kwargs
        )
        self.mem_usage = self.full_kv_pool.mem_usage + self.swa_kv_pool.mem_usage

    @classmethod
    def host_only(cls, size: int, size_swa: int, page_size: int = 1, dp_size: int = 1) -> SWAKVPool:
        """A pool without device arrays, for tools and tests that follow ownership and never compute."""
        pool = cls.__new__(cls)
        pool._set_layout(size, size_swa, page_size, (), ())
        pool.dp_size, pool.mesh, pool.dtype = dp_size, None, None
        pool.full_kv_pool = pool.swa_kv_pool = None
        pool.mem_usage = 0.0
        return pool

    def _set_layout(
        self, size: int, size_swa: int, page_size: int, swa_ids: Sequence[int], full_ids: Sequence[int]
    ) -> None:
        both = set(swa_ids) & set(full_ids)
        if both:
            raise PoolSizeError(
                f"layers {sorted(both)} are listed as SWA and as FULL; a layer is of one kind"
            )
        self.size = size
        self.size_swa = size_swa
        self.page_size = page_size
        self.layers_mapping: dict[int, tuple[int, bool]] = {
            layer: (local, is_swa)
            for ids, is_swa in ((full_ids, False), (swa_ids, True))
            for local, layer in enumerate(ids)
        }
        self.layer_num = len(self.layers_mapping)
        self.start_layer = min(self.layers_mapping, default=0)
        self.end_layer = max(self.layers_mapping, default=-1)
        self.full_to_swa_index_mapping: IntArray | list[IntArray] | None = None

    def _pool(self, layer_id: int) -> tuple[Any, int]:
        local, is_swa = self.layers_mapping[layer_id]
        return (self.swa_kv_pool if is_swa else self.full_kv_pool), local

    def get_kv_buffer(self, layer_id: int) -> tuple[Any, Any]:
        pool, local = self._pool(layer_id)
        pair: tuple[Any, Any] = pool.get_kv_buffer(local + pool.start_layer)
        return pair

    def set_kv_buffer(self, layer_id: int, loc: Any, cache_k: Any, cache_v: Any, dp_rank: int = 0) -> None:
        """``loc``: FULL slots; an SWA layer writes at the mapped SWA slots."""
        pool, local = self._pool(layer_id)
        slots = self.remap_cache_loc(loc, layer_id, dp_rank)
        pool.set_kv_buffer(local + pool.start_layer, slots, cache_k, cache_v, dp_rank)

    def remap_cache_loc(self, loc: Any, layer_id: int, dp_rank: int = 0) -> Any:
        """``loc`` for a FULL layer; for an SWA layer the mapped SWA slots (0 where unmapped)."""
        if not self.layers_mapping[layer_id][1]:
            return loc
        mapping = self.full_to_swa_index_mapping
        if mapping is None:
            raise PoolSizeError("the FULL to SWA mapping is set by SWATokenToKVPoolAllocator; build it first")
        return (mapping[dp_rank] if isinstance(mapping, list) else mapping)[np.asarray(loc)]

    @property
    def kv_buffer(self) -> list[tuple[Any, Any]]:
        """(K, V) of every layer in layer order."""
        return [self.get_kv_buffer(layer) for layer in sorted(self.layers_mapping)]

    def buffers(self) -> list[tuple[Any, Any]]:
        """Alias of :attr:`kv_buffer` that reads well where buffers are handed to a step."""
        return self.kv_buffer

    def replace_buffer(self, kv_buffer: Sequence[Any]) -> None:
        """``kv_buffer``: (K, V) of every layer in layer order."""
        layers = sorted(self.layers_mapping)
        if len(kv_buffer) != len(layers):
            raise PoolSizeError(f"a step returned {len(kv_buffer)} layers for a pool of {len(layers)}")
        of_layer = dict(zip(layers, kv_buffer, strict=True))
        for is_swa, pool in ((False, self.full_kv_pool), (True, self.swa_kv_pool)):
            ids = [layer for layer, (_, swa) in self.layers_mapping.items() if swa == is_swa]
            pool.replace_buffer([of_layer[layer] for layer in ids])

    def check_allocator(self, allocator: BaseTokenToKVPoolAllocator) -> None:
        """Both pools against the dual allocator's ``size_full`` and ``size_swa``."""
        size_swa = getattr(allocator, "size_swa", None)
        if size_swa is None:
            raise PoolSizeError(f"a SWAKVPool needs the dual allocator, got {type(allocator).__name__}")
        page_size, dp_size = allocator.page_size, allocator.dp_size
        self.full_kv_pool.check_pages(allocator.size, page_size, dp_size, "FULL")
        self.swa_kv_pool.check_pages(size_swa, page_size, dp_size, "SWA")

    def tree_flatten(self) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        layers = tuple(self.layers_mapping.items())
        aux = (
            self.size,
            self.size_swa,
            self.page_size,
            self.dp_size,
            self.mesh,
            self.dtype,
            layers,
            self.mem_usage,
        )
        return (self.full_kv_pool, self.swa_kv_pool, self.full_to_swa_index_mapping), aux

    @classmethod
    def tree_unflatten(cls, aux: tuple[Any, ...], children: tuple[Any, ...]) -> SWAKVPool:
        size, size_swa, page_size, dp_size, mesh, dtype, layers, mem_usage = aux
        pool = cls.host_only(size, size_swa, page_size, dp_size)
        pool.mesh, pool.dtype, pool.mem_usage = mesh, dtype, mem_usage
        pool.layers_mapping = dict(layers)
        pool.layer_num = len(layers)
        pool.start_layer = min(pool.layers_mapping, default=0)
        pool.end_layer = max(pool.layers_mapping, default=-1)
        pool.full_kv_pool, pool.swa_kv_pool, pool.full_to_swa_index_mapping = children
        return pool
