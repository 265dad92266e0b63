"""One FULL-backed radix tree with auxiliary components (RFC-0035)."""

from sgl_jax.srt.mem_cache.unified_cache_components.node import UnifiedTreeNode
from sgl_jax.srt.mem_cache.unified_radix_cache.cache import UnifiedRadixCache
from sgl_jax.srt.mem_cache.unified_radix_cache.construction import COMPONENT_REGISTRY
from sgl_jax.srt.mem_cache.unified_radix_cache.observe import OpRecord

__all__ = ["COMPONENT_REGISTRY", "OpRecord", "UnifiedRadixCache", "UnifiedTreeNode"]
