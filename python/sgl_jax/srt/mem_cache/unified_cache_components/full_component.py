"""FULL: the base value of every node. Its locks protect whole paths, its order drives leaf eviction."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from sgl_jax.srt.mem_cache.base_prefix_cache import (
    DecLockRefParams,
    EvictParams,
    IncLockRefResult,
    InsertParams,
    InsertResult,
)
from sgl_jax.srt.mem_cache.radix_tree.lru import get_and_increase_time_counter
from sgl_jax.srt.mem_cache.unified_cache_components.component_types import (
    ComponentType,
    EvictLayer,
    LRURefreshPhase,
)
from sgl_jax.srt.mem_cache.unified_cache_components.node import UnifiedTreeNode
from sgl_jax.srt.mem_cache.unified_cache_components.tree_component import Tracker, TreeComponent, leaf_pieces

FULL = ComponentType.FULL


class FullComponent(TreeComponent):
    """FULL slots per node: int32 [node length]. Never a tombstone while only the device tier exists."""

    component_type: ClassVar[ComponentType] = FULL
    refreshes_on_walk: ClassVar[bool] = True

    def create_match_validator(self, match_device_only: bool = False) -> Callable[[UnifiedTreeNode], bool]:
        """A FULL value is required; a host copy counts unless ``match_device_only``."""
        if match_device_only:
            return lambda node: node.full_data.value is not None
        return lambda node: node.full_data.value is not None or node.full_data.host_value is not None

    def refresh_lru(self, phase: LRURefreshPhase, node: UnifiedTreeNode, root_node: UnifiedTreeNode) -> None:
        """Every node of a walk is used (its descendants pass their age on when they go, so ancestors need no stamp)."""
        if phase is LRURefreshPhase.WALKDOWN:
            node.access_time = get_and_increase_time_counter()
            if not node.children and node.full_data.value is not None and node.observer is not None:
                node.observer(node, FULL)

    def commit_insert_component_data(
        self, node: UnifiedTreeNode, is_new_leaf: bool, params: InsertParams, result: InsertResult
    ) -> None:
        """``value[prefix_len:]`` → the new leaf."""
        if is_new_leaf:
            assert params.value is not None
            for piece, low, high in leaf_pieces(node, result.prefix_len):
                self.cache.accounts.set_value(piece, FULL, params.value[low:high].copy())

    def redistribute_on_node_split(self, new_parent: UnifiedTreeNode, child: UnifiedTreeNode) -> None:
        """As the default, with locks ending at the child left there: the new parent is locked through it."""
        upper, lower = new_parent.full_data, child.full_data
        cut = new_parent.key.length
        if lower.value is not None:
            upper.value = lower.value[:cut]
            lower.value = lower.value[cut:]
        upper.own = 0
        upper.below = 1 if lower.locked else 0
        new_parent.access_time = child.access_time

    def evict_component(
        self, node: UnifiedTreeNode, target: EvictLayer = EvictLayer.DEVICE
    ) -> tuple[int, int]:
        """Free the FULL slots, nothing else. The value stays for the components after this one; the core clears it."""
        value = node.full_data.value
        if value is None or target is EvictLayer.HOST:
            return 0, 0
        rank = self.rank_of(node)
        self.cache.applier.free_full(value, rank)
        self.cache.note_event(rank, "full_evicted_total", len(value))
        return len(value), 0

    def eviction_priority(self, is_leaf: bool) -> int:
        return 0 if is_leaf else 2

    def drive_eviction(self, params: EvictParams, tracker: Tracker) -> None:
        """Oldest leaf first. A leaf hands its age to its parent: if that made the parent a leaf, it is the oldest one now."""
        rank, accounts = params.dp_rank or 0, self.cache.accounts
        leaf: UnifiedTreeNode | None = None
        while tracker[FULL] < params.num_tokens:
            leaf = leaf or accounts.oldest_leaf(rank)
            if leaf is None:
                return
            age = leaf.access_time
            parent = self.cache._evict_device_leaf(leaf, tracker)
            leaf = parent if parent.access_time == age and accounts.is_leaf(parent) else None

    def acquire_component_lock(
        self, node: UnifiedTreeNode, result: IncLockRefResult, lock_host: bool = False
    ) -> IncLockRefResult:
        """Every node up to the root. ``delta``: minus the tokens that became protected."""
        result.delta = -self.cache.accounts.lock_path(node)
        return result

    def release_component_lock(
        self, node: UnifiedTreeNode, params: DecLockRefParams | None, lock_host: bool = False
    ) -> None:
        """FULL needs no receipt: the path of a locked node cannot change."""
        self.cache.accounts.unlock_path(node)
