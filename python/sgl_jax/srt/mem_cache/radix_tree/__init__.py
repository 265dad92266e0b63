"""Primitives every radix tree shares."""

from sgl_jax.srt.mem_cache.radix_tree.key import RadixKey, TokenBuffer, get_child_key

__all__ = ["RadixKey", "TokenBuffer", "get_child_key"]
