"""Registers every pool as a jax pytree; imported by the package as soon as one of its names is used."""

from __future__ import annotations

from jax.tree_util import register_pytree_node_class

from sgl_jax.srt.mem_cache.memory_pool.mha import MHATokenToKVPool
from sgl_jax.srt.mem_cache.memory_pool.pools import MemoryPools
from sgl_jax.srt.mem_cache.memory_pool.req_to_token import ReqToTokenPool
from sgl_jax.srt.mem_cache.memory_pool.swa import SWAKVPool

for _pool in (MHATokenToKVPool, MemoryPools, ReqToTokenPool, SWAKVPool):
    register_pytree_node_class(_pool)
