"""Components of the unified tree: FULL (the base) and SWA. RECURRENT has its type and hooks, and no component yet."""

from sgl_jax.srt.mem_cache.base_prefix_cache import InsertResult
from sgl_jax.srt.mem_cache.unified_cache_components.component_types import (
    _NUM_COMPONENT_TYPES,
    BASE_COMPONENT_TYPE,
    CacheTransferPhase,
    ComponentData,
    ComponentType,
    EvictLayer,
    LRURefreshPhase,
    get_and_increase_time_counter,
    next_component_uuid,
)
from sgl_jax.srt.mem_cache.unified_cache_components.full_component import FullComponent
from sgl_jax.srt.mem_cache.unified_cache_components.node import UnifiedTreeNode
from sgl_jax.srt.mem_cache.unified_cache_components.swa_component import SWAComponent
from sgl_jax.srt.mem_cache.unified_cache_components.tree_component import TreeComponent

__all__ = [
    "BASE_COMPONENT_TYPE",
    "_NUM_COMPONENT_TYPES",
    "CacheTransferPhase",
    "ComponentData",
    "ComponentType",
    "EvictLayer",
    "FullComponent",
    "InsertResult",
    "LRURefreshPhase",
    "SWAComponent",
    "TreeComponent",
    "UnifiedTreeNode",
    "get_and_increase_time_counter",
    "next_component_uuid",
]
