"""Device pool of attention layers of one kind: K and V apart, flat per layer.

::

    k_buffer[layer]   [dp_size * (pages_per_rank + 1), page_size, kv_heads * head_dim]     P("data", None, "tensor")
    v_buffer[layer]   [dp_size * (pages_per_rank + 1), page_size, kv_heads * v_head_dim]

Rank r owns the rows ``r * (pages_per_rank + 1)`` onward, its own padding page 0 first, so the slots the allocator hands
out index a rank's shard directly. K and V are separate because their dimensions may differ; flat because the TPU compiler
copies whole pools otherwise. Step functions take ``buffers()`` donated and give the result to ``replace_buffer``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from sgl_jax.srt.mem_cache.memory_pool.kv_cache import KVCache, PoolSizeError

if TYPE_CHECKING:
    from sgl_jax.srt.mem_cache.allocator.base import BaseTokenToKVPoolAllocator

_GIB = 1024**3


def merge_kv(k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Heads merged into the pool's last axis: ``[tokens, heads, dim] -> [tokens, heads * dim]``, K and V each."""
    return k.reshape(k.shape[0], -1), v.reshape(v.shape[0], -1)


def write_kv(
    k_pages: jax.Array,  # [pages, page_size, kv_heads * head_dim]
    v_pages: jax.Array,  # [pages, page_size, kv_heads * v_head_dim]
    loc: jax.Array,  # [tokens] slots of this shard
    k: jax.Array,  # [tokens, kv_heads * head_dim] or [tokens, kv_heads, head_dim]
    v: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Scatter K and V of tokens to their slots; in place when the pools are donated. Traceable, also in ``shard_map``.

    Padding goes to slot 0. A slot outside the shard is dropped, never clamped onto somebody's last slot (D59).
    """
    return _scatter(k_pages, loc, k), _scatter(v_pages, loc, v)


def _scatter(pages: jax.Array, loc: jax.Array, values: jax.Array) -> jax.Array:
    flat = pages.reshape(-1, pages.shape[-1])
    values = values.reshape(values.shape[0], -1).astype(pages.dtype)
    return flat.at[loc].set(values, mode="drop").reshape(pages.shape)


def update_fused_kv_cache_vectorized(
    k: jax.Array, v: jax.Array, loc: jax.Array, k_pages: jax.Array, v_pages: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """One call that writes K and V of all tokens: :func:`write_kv` in the argument order of the seam."""
    return write_kv(k_pages, v_pages, loc, k, v)


_write_donated = jax.jit(write_kv, donate_argnums=(0, 1))


@functools.lru_cache(maxsize=16)
def _zeros_maker(
    shape: tuple[int, ...], dtype: Any, sharding: NamedSharding | None
) -> Callable[[], jax.Array]:
    """A jitted maker of zero arrays that come into being sharded; layers of one shape share the compiled step."""
    make = functools.partial(jnp.zeros, shape, dtype)
    jitted: Callable[[], jax.Array] = (
        jax.jit(make) if sharding is None else jax.jit(make, out_shardings=sharding)
    )
    return jitted


class MHATokenToKVPool(KVCache):
    """K and V of ``layer_num`` layers with the same head count; ``size`` slots over all ranks.

    ``head_num`` counts KV heads after replication: for attention it is a multiple of the tensor axis (the model layer checks
    that; a pool alone only needs its flat width to divide). ``v_head_dim`` defaults to ``head_dim``. Raises PoolSizeError
    when ``size`` does not divide into whole pages per rank, when ``dp_size`` does not divide by the data axis, or the flat
    width not by the tensor axis.
    """

    def __init__(
        self,
        size: int,
        page_size: int,
        dtype: Any,
        head_num: int,
        head_dim: int,
        layer_num: int,
        mesh: Mesh | None,
        dp_size: int = 1,
        start_layer: int | None = None,
        end_layer: int | None = None,
        v_head_dim: int | None = None,
    ) -> None:
        super().__init__(size, page_size, dtype, layer_num, mesh, start_layer, end_layer)
        self.head_num = head_num
        self.head_dim = head_dim
        self.v_head_dim = head_dim if v_head_dim is None else v_head_dim
        self.dp_size = dp_size
        self._check_geometry()
        self.pages_per_rank = size // page_size // dp_size
        self.kv_partition_spec = P("data", None, "tensor")
        self.kv_sharding = None if mesh is None else NamedSharding(mesh, self.kv_partition_spec)
        rows = dp_size * (self.pages_per_rank + 1)
        self.k_buffer = self._create(rows, head_num * head_dim)
        self.v_buffer = self._create(rows, head_num * self.v_head_dim)
        self.mem_usage = sum(array.nbytes for array in (*self.k_buffer, *self.v_buffer)) / _GIB

    def _check_geometry(self) -> None:
        step = self.page_size * self.dp_size
        if self.size % step:
            raise PoolSizeError(
                f"KV pool size={self.size} must be a multiple of page_size * dp_size = {step}; "
                f"use {self.size // step * step}"
            )
        if self.mesh is None:
            return
        data, tensor = (self.mesh.shape.get(axis, 1) for axis in ("data", "tensor"))
        rows = self.size // self.page_size + self.dp_size
        if rows % data:
            raise PoolSizeError(
                f"KV pool of {rows} pages ({self.dp_size} of them padding) cannot be split over a data axis of {data}; "
                f"dp_size={self.dp_size} must be a multiple of it"
            )
        for name, width in (("head_dim", self.head_dim), ("v_head_dim", self.v_head_dim)):
            if self.head_num * width % tensor:
                raise PoolSizeError(
                    f"head_num={self.head_num} * {name}={width} cannot be split over a tensor axis of {tensor}; "
                    f"replicate the KV heads"
                )

    def _create(self, rows: int, features: int) -> list[jax.Array]:
        shape = (rows, self.page_size, features)
        make = _zeros_maker(shape, jnp.dtype(self.dtype), self.kv_sharding)
        return [make() for _ in range(self.layer_num)]

    @property
    def kv_buffer(self) -> list[tuple[jax.Array, jax.Array]]:
        """(K, V) per layer; what steps donate and ``replace_buffer`` takes."""
        return list(zip(self.k_buffer, self.v_buffer, strict=True))

    def buffers(self) -> list[tuple[jax.Array, jax.Array]]:
        """Alias of :attr:`kv_buffer` that reads well where buffers are handed to a step."""
        return self.kv_buffer

    def get_kv_buffer(self, layer_id: int) -> tuple[jax.Array, jax.Array]:
        return self.k_buffer[layer_id - self.start_layer], self.v_buffer[layer_id - self.start_layer]

    def get_key_buffer(self, layer_id: int) -> jax.Array:
        return self.k_buffer[layer_id - self.start_layer]

    def get_value_buffer(self, layer_id: int) -> jax.Array:
        return self.v_buffer[layer_id - self.start_layer]

    def set_kv_buffer(self, layer_id: int, loc: Any, cache_k: Any, cache_v: Any, dp_rank: int = 0) -> None:
        """Write tokens at rank-local slots, outside a step (tests, loaders). Raises PoolSizeError for a slot out of range.

        Args:
            loc: int ``[tokens]``; cache_k, cache_v: ``[tokens, kv_heads, dim]`` or flat.
        """
        slots = np.asarray(loc)
        per_rank = (self.pages_per_rank + 1) * self.page_size
        if slots.size and (slots.min() < 0 or slots.max() >= per_rank):
            bad = slots[(slots < 0) | (slots >= per_rank)][:16].tolist()
            raise PoolSizeError(
                f"layer {layer_id}: slots {bad} are outside 0..{per_rank - 1} of rank {dp_rank}"
            )
        index = layer_id - self.start_layer
        written = _write_donated(
            self.k_buffer[index],
            self.v_buffer[index],
            jnp.asarray(slots + dp_rank * per_rank, jnp.int32),
            jnp.asarray(cache_k),
            jnp.asarray(cache_v),
        )
        if self.kv_sharding is not None:
            written = jax.device_put(written, self.kv_sharding)
        self.k_buffer[index], self.v_buffer[index] = written

    def replace_buffer(self, kv_buffer: Sequence[Any]) -> None:
        """``kv_buffer``: (K, V) per layer, shapes as before. Raises PoolSizeError for another number of layers."""
        if len(kv_buffer) != self.layer_num:
            raise PoolSizeError(f"a step returned {len(kv_buffer)} layers for a pool of {self.layer_num}")
        self.k_buffer = [pair[0] for pair in kv_buffer]
        self.v_buffer = [pair[1] for pair in kv_buffer]

    def clear_buffers(self) -> None:
        """Zero all layers (tests); slots are not tracked here."""
        rows = self.dp_size * (self.pages_per_rank + 1)
        self.k_buffer = self._create(rows, self.head_num * self.head_dim)
        self.v_buffer = self._create(rows, self.head_num * self.v_head_dim)

    def check_allocator(self, allocator: BaseTokenToKVPoolAllocator) -> None:
        self.check_pages(allocator.size, allocator.page_size, allocator.dp_size, "KV")

    def check_pages(self, size: int, page_size: int, dp_size: int, pool: str) -> None:
        """Compare every layer's array with an allocator of ``size`` slots (all ranks); raise PoolSizeError on a difference."""
        rows = dp_size * (size // page_size // dp_size + 1)
        for kind, buffers in (("K", self.k_buffer), ("V", self.v_buffer)):
            for layer, array in enumerate(buffers, self.start_layer):
                if array.shape[:2] != (rows, page_size) or dp_size != self.dp_size:
                    raise PoolSizeError(
                        f"{pool} pool layer {layer} {kind}: array has {array.shape[0]} pages of {array.shape[1]} over "
                        f"{self.dp_size} ranks, the allocator hands out {rows} pages of {page_size} over {dp_size}; "
                        f"build both from one PoolPlan"
                    )

    def tree_flatten(self) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        aux = (
            self.size, self.page_size, self.dtype, self.head_num, self.head_dim, self.layer_num, self.mesh,
            self.dp_size, self.start_layer, self.end_layer, self.v_head_dim, self.mem_usage,
        )  # fmt: skip
        return (self.k_buffer, self.v_buffer), aux

    @classmethod
    def tree_unflatten(cls, aux: tuple[Any, ...], children: tuple[Any, ...]) -> MHATokenToKVPool:
        pool = cls.__new__(cls)
        (
            pool.size, pool.page_size, pool.dtype, pool.head_num, pool.head_dim, pool.layer_num, pool.mesh,
            pool.dp_size, pool.start_layer, pool.end_layer, pool.v_head_dim, pool.mem_usage,
        ) = aux  # fmt: skip
        pool.pages_per_rank = pool.size // pool.page_size // pool.dp_size
        pool.kv_partition_spec = P("data", None, "tensor")
        pool.kv_sharding = None if pool.mesh is None else NamedSharding(pool.mesh, pool.kv_partition_spec)
        pool.k_buffer, pool.v_buffer = children
        return pool
