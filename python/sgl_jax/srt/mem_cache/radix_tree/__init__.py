"""Primitives every radix tree shares."""

from sgl_jax.srt.mem_cache.radix_tree.key import RadixKey, TokenBuffer, get_child_key, packed_child_key
from sgl_jax.srt.mem_cache.radix_tree.lru import LruIndex, get_and_increase_time_counter
from sgl_jax.srt.mem_cache.radix_tree.node import RadixNode
from sgl_jax.srt.mem_cache.radix_tree.request_key import build_radix_key, to_bigram_key

__all__ = [
    "LruIndex",
    "RadixKey",
    "RadixNode",
    "TokenBuffer",
    "build_radix_key",
    "get_and_increase_time_counter",
    "get_child_key",
    "packed_child_key",
    "to_bigram_key",
]
