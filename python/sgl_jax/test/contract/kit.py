"""Pools on a real mesh, allocators, caches and request fakes for the contract tests. Host mesh of one CPU device."""

from __future__ import annotations

import types
from typing import Any

import jax.numpy as jnp
import numpy as np

from sgl_jax.srt.mem_cache.allocator import SWATokenToKVPoolAllocator
from sgl_jax.srt.mem_cache.cache_init_params import CacheInitParams
from sgl_jax.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool, SWAKVPool
from sgl_jax.srt.mem_cache.unified_cache_components import ComponentType
from sgl_jax.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sgl_jax.srt.utils.mesh_utils import create_device_mesh

mesh = create_device_mesh(ici_parallelism=[1, -1], dcn_parallelism=[1, 1])

FULL, SWA = ComponentType.FULL, ComponentType.SWA


def ids(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def swa_pool(size: int, size_swa: int, page_size: int = 1, dp_size: int = 1) -> SWAKVPool:
    return SWAKVPool(
        size=size,
        size_swa=size_swa,
        page_size=page_size,
        swa_attention_layer_ids=[0],
        full_attention_layer_ids=[1],
        token_to_kv_pool_class=MHATokenToKVPool,
        dtype=jnp.bfloat16,
        head_num=2,
        head_dim=8,
        mesh=mesh,
        dp_size=dp_size,
    )


def swa_allocator(
    size: int = 64, size_swa: int = 32, page_size: int = 1, dp_size: int = 1
) -> SWATokenToKVPoolAllocator:
    pool = swa_pool(size, size_swa, page_size, dp_size)
    return SWATokenToKVPoolAllocator(size, size_swa, pool, page_size=page_size, dp_size=dp_size)


def unified(
    allocator: Any,
    page_size: int = 1,
    window: int | None = 4,
    pool: Any = None,
    kinds: tuple[ComponentType, ...] = (FULL, SWA),
    **kwargs: Any,
) -> UnifiedRadixCache:
    pool = ReqToTokenPool(8, 128) if pool is None else pool
    params = CacheInitParams(
        req_to_token_pool=pool,
        token_to_kv_pool_allocator=allocator,
        page_size=page_size,
        sliding_window_size=window,
    )
    return UnifiedRadixCache(
        req_to_token_pool=pool,
        token_to_kv_pool_allocator=allocator,
        page_size=page_size,
        tree_components=kinds,
        component_init_params=params,
        **kwargs,
    )


def fake_req(**fields: Any) -> types.SimpleNamespace:
    """A request of the newer generation; drop fields with ``without``."""
    known: dict[str, Any] = {
        "rid": "r",
        "origin_input_ids": [],
        "output_ids": [],
        "fill_ids": [],
        "extra_key": None,
        "dp_rank": 0,
        "req_pool_idx": 0,
        "prefix_indices": np.empty((0,), np.int32),
        "last_node": None,
        "cache_protected_len": 0,
        "last_matched_prefix_len": 0,
        "kv_committed_len": 0,
        "kv_allocated_len": 0,
        "swa_evicted_seqlen": 0,
        "swa_uuid_for_lock": None,
        "cache_lock_params": None,
        **fields,
    }
    req = types.SimpleNamespace(**known)
    req.pop_committed_kv_cache = lambda: req.kv_committed_len
    req.pop_overallocated_kv_cache = lambda: (req.kv_committed_len, req.kv_allocated_len)
    return req


def without(req: types.SimpleNamespace, *names: str) -> types.SimpleNamespace:
    for name in names:
        delattr(req, name)
    return req
