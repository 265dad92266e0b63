"""Request rows and KV pools.

Names resolve on first use, so that host code which imports a submodule (request rows, ``SWAKVPool`` for its class) starts
without jax; a name taken from this package is registered as a pytree.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sgl_jax.srt.mem_cache.memory_pool.kv_cache import KVCache, PoolSizeError
    from sgl_jax.srt.mem_cache.memory_pool.mha import (
        MHATokenToKVPool,
        merge_kv,
        update_fused_kv_cache_vectorized,
        write_kv,
    )
    from sgl_jax.srt.mem_cache.memory_pool.pools import MemoryPools
    from sgl_jax.srt.mem_cache.memory_pool.req_to_token import ReqToTokenPool
    from sgl_jax.srt.mem_cache.memory_pool.swa import SWAKVPool

__all__ = [
    "KVCache",
    "MHATokenToKVPool",
    "MemoryPools",
    "PoolSizeError",
    "ReqToTokenPool",
    "SWAKVPool",
    "merge_kv",
    "update_fused_kv_cache_vectorized",
    "write_kv",
]

_MODULE_OF = {
    "KVCache": "kv_cache",
    "PoolSizeError": "kv_cache",
    "MHATokenToKVPool": "mha",
    "merge_kv": "mha",
    "update_fused_kv_cache_vectorized": "mha",
    "write_kv": "mha",
    "MemoryPools": "pools",
    "ReqToTokenPool": "req_to_token",
    "SWAKVPool": "swa",
}


def __getattr__(name: str) -> Any:
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    importlib.import_module(f"{__name__}.pytree")
    value = getattr(importlib.import_module(f"{__name__}.{module}"), name)
    globals()[name] = value
    return value
