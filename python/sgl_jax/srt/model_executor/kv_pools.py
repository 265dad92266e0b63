"""Device pools of a model, built from a plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from jax.sharding import Mesh

from sgl_jax.srt.configs.layer_spec import LayerKind
from sgl_jax.srt.configs.model_config import ModelConfig
from sgl_jax.srt.mem_cache.memory_pool import MHATokenToKVPool, PoolSizeError, SWAKVPool
from sgl_jax.srt.mem_cache.sizing import PoolPlan
from sgl_jax.srt.model_executor.mesh import TENSOR_AXIS

if TYPE_CHECKING:
    from sgl_jax.srt.mem_cache.allocator.base import BaseTokenToKVPoolAllocator


class OneSizeKVPool:
    """All layers in pools of one size under ``--disable-hybrid-swa-memory``: one slot id serves FULL and window layers.

    The layer kinds of a hybrid model may differ in heads and dimensions, so each kind keeps its own arrays.
    """

    def __init__(self, pattern: Sequence[LayerKind], pools: dict[LayerKind, MHATokenToKVPool]) -> None:
        self._pattern = tuple(pattern)
        self._pools = pools
        first = next(iter(pools.values()))
        self.size, self.page_size, self.dp_size = first.size, first.page_size, first.dp_size
        self.mem_usage = sum(pool.mem_usage for pool in pools.values())

    def buffers(self) -> list[tuple[Any, Any]]:
        """(K, V) of every layer in layer order."""
        layers = {kind: iter(pool.buffers()) for kind, pool in self._pools.items()}
        return [next(layers[kind]) for kind in self._pattern]

    def replace_buffer(self, kv_buffer: Sequence[Any]) -> None:
        """Take over the arrays a step returned for the donated ones. Raises PoolSizeError for another number of layers."""
        if len(kv_buffer) != len(self._pattern):
            raise PoolSizeError(f"a step returned {len(kv_buffer)} layers for a pool of {len(self._pattern)}")
        for kind, pool in self._pools.items():
            pool.replace_buffer([pair for pair, k in zip(kv_buffer, self._pattern, strict=True) if k is kind])

    def check_allocator(self, allocator: BaseTokenToKVPoolAllocator) -> None:
        """Raise PoolSizeError when the allocator can hand out a slot that an array does not have (D59)."""
        for pool in self._pools.values():
            pool.check_allocator(allocator)


def build_kv_pool(config: ModelConfig, plan: PoolPlan, mesh: Mesh) -> Any:
    """The pool object the allocators are built over: SWAKVPool for a hybrid plan, else one pool for all layers.

    Raises:
        PoolSizeError: the plan does not fit the mesh.
    """
    tensor = mesh.shape[TENSOR_AXIS]
    dtype = jnp.dtype(config.dtype)
    if plan.demand.hybrid:
        full, swa = config.spec(LayerKind.FULL), config.spec(LayerKind.SWA)
        return SWAKVPool(
            plan.total_full_tokens,
            plan.total_swa_tokens,
            plan.page_size,
            config.swa_attention_layer_ids,
            config.full_attention_layer_ids,
            swa_head_num=swa.kv_heads_stored(tensor),
            swa_head_dim=swa.head_dim,
            swa_v_head_dim=swa.v_head_dim,
            mesh=mesh,
            dtype=dtype,
            dp_size=plan.dp_size,
            head_num=full.kv_heads_stored(tensor),
            head_dim=full.head_dim,
            v_head_dim=full.v_head_dim,
        )
    pools = {kind: _uniform_pool(config, kind, plan, mesh) for kind in dict.fromkeys(config.layer_pattern)}
    if len(pools) == 1:
        return next(iter(pools.values()))
    return OneSizeKVPool(config.layer_pattern, pools)


def _uniform_pool(config: ModelConfig, kind: LayerKind, plan: PoolPlan, mesh: Mesh) -> MHATokenToKVPool:
    spec = config.spec(kind)
    return MHATokenToKVPool(
        size=plan.total_full_tokens,
        page_size=plan.page_size,
        dtype=jnp.dtype(config.dtype),
        head_num=spec.kv_heads_stored(mesh.shape[TENSOR_AXIS]),
        head_dim=spec.head_dim,
        layer_num=config.layer_pattern.count(kind),
        mesh=mesh,
        dp_size=plan.dp_size,
        v_head_dim=spec.v_head_dim,
    )
