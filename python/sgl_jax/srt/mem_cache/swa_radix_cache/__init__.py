"""Legacy hybrid cache: the baseline and rollback path (RFC-0035 section 7)."""

from sgl_jax.srt.mem_cache.swa_radix_cache.cache import SWARadixCache
from sgl_jax.srt.mem_cache.swa_radix_cache.node import SWATreeNode as TreeNode

__all__ = ["SWARadixCache", "TreeNode"]
