"""One FULL-backed radix tree with auxiliary components (RFC-0035)."""

from sgl_jax.srt.mem_cache.unified_cache_components.node import UnifiedTreeNode
from sgl_jax.srt.mem_cache.unified_radix_cache.cache import OpRecord, UnifiedRadixCache
from sgl_jax.srt.mem_cache.unified_radix_cache.construction import COMPONENT_REGISTRY

__all__ = ["COMPONENT_REGISTRY", "OpRecord", "UnifiedRadixCache", "UnifiedTreeNode"]
