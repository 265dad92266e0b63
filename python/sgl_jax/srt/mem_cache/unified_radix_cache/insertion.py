"""Insert as mechanism: walk down, let the components heal, attach the rest; report what nobody took.

For a key of ``n`` tokens of which the tree holds ``m`` (``p = prev_prefix_len``)::

    [0, p)     tree's already, not looked at by the applier
    [p, m)     per node: consumed by a component (healed) or duplicate → reported, the core frees it once
    [m, n)     new leaf → tree; or reported, when a leaf could never end a match
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from sgl_jax.srt.mem_cache.base_prefix_cache import InsertParams, InsertResult
from sgl_jax.srt.mem_cache.errors import TreeInvariantError
from sgl_jax.srt.mem_cache.radix_tree.key import RadixKey
from sgl_jax.srt.mem_cache.unified_cache_components.component_types import ComponentType, LRURefreshPhase
from sgl_jax.srt.mem_cache.unified_cache_components.node import UnifiedTreeNode
from sgl_jax.srt.mem_cache.unified_cache_components.tree_component import TreeComponent, overriders
from sgl_jax.srt.mem_cache.unified_radix_cache.tree import PrefixTree

IntArray = npt.NDArray[np.int32]
FULL = ComponentType.FULL


@dataclass(slots=True)
class InsertFacts:
    """``end``: node at the end of the inserted key; ``surrendered``: FULL slots (of the value) that nobody took."""

    result: InsertResult
    end: UnifiedTreeNode
    surrendered: list[IntArray] = field(default_factory=list)


class Inserter:
    """Inserts into one tree. Touches only nodes at or below the start node."""

    def __init__(self, tree: PrefixTree, components: Sequence[TreeComponent]) -> None:
        self._tree = tree
        self._components = tuple(components)
        self._walkers = tuple(c for c in components if c.refreshes_on_walk)
        self._cutters = overriders(components, "leaf_cuts")
        self._leaf_skippers = overriders(components, "should_skip_leaf_creation")
        self._parent_watchers = overriders(components, "on_parent_gains_child")

    def run(
        self, key: RadixKey, params: InsertParams, start: UnifiedTreeNode, keep_leaf: bool
    ) -> InsertFacts:
        """Insert ``params.value`` for ``key`` (page aligned) below ``start``, whose path spells the key's beginning.

        ``keep_leaf``: the request goes on, so even a leaf that cannot end a match yet is created (DECISIONS 8).
        """
        tree = self._tree
        facts = InsertFacts(InsertResult(), start)
        node, offset, length = start, start.path_len(), key.length
        slot = None
        while offset < length:
            slot = tree.child_key(key, start=offset)
            child = tree.enter(node, slot, key, offset)
            if child is None:
                break
            size = child.key.length
            self._overlap(child, offset, size, params, facts)
            for component in self._walkers:
                component.refresh_lru(LRURefreshPhase.WALKDOWN, child, tree.root)
            offset += size
            node = child
        facts.result.prefix_len = offset
        facts.end = self._finish(node, slot, key, params, keep_leaf, facts)
        if facts.end is not tree.root:
            for component in self._components:
                component.refresh_lru(LRURefreshPhase.INSERT_END, facts.end, tree.root)
        return facts

    def _overlap(
        self, node: UnifiedTreeNode, offset: int, size: int, params: InsertParams, facts: InsertFacts
    ) -> None:
        """Minimum consumed boundary over the components; what lies below it and is the request's is a duplicate."""
        assert params.value is not None
        part = params.value[offset : offset + size]
        if node.full_data.value is None:
            self._unevict(node, offset, size, params)
            return
        consumed = size
        for component in self._components:
            taken = component.update_component_on_insert_overlap(node, size, offset, part, params)
            if not 0 <= taken <= size:
                raise TreeInvariantError(
                    f"{component.component_type} consumed from {taken} of a node of {size} tokens"
                )
            consumed = min(consumed, taken)
        duplicate_from = max(0, params.prev_prefix_len - offset)
        if len(self._components) > 1 and duplicate_from < consumed:
            facts.surrendered.append(part[duplicate_from:consumed])

    def _unevict(self, node: UnifiedTreeNode, offset: int, size: int, params: InsertParams) -> None:
        """A FULL tombstone takes the fresh slots: auxiliary components recover once, then FULL commits."""
        assert params.value is not None
        for component in self._components:
            if component.component_type is not FULL:
                component.recover_after_unevict(node, size, offset, params)
        at = node
        while at.path_len() > offset:
            value = params.value[at.start : at.path_len()].copy()
            self._tree.accounts.set_value(at, FULL, value)
            at = at.parent

    def _finish(
        self,
        node: UnifiedTreeNode,
        slot: Any,
        key: RadixKey,
        params: InsertParams,
        keep_leaf: bool,
        facts: InsertFacts,
    ) -> UnifiedTreeNode:
        """Attach what is not in the tree below ``node``, in ``slot``, or surrender it; returns the node the insert ends at."""
        assert params.value is not None
        offset, length = facts.result.prefix_len, key.length
        is_new = offset < length
        if (
            is_new
            and not keep_leaf
            and any(c.should_skip_leaf_creation(offset, length, params) for c in self._leaf_skippers)
        ):
            facts.surrendered.append(params.value[max(offset, params.prev_prefix_len) : length])
            return node
        if is_new:
            return self._attach(node, slot, key, params, facts.result)
        if node is not self._tree.root:
            for component in self._components:
                component.commit_insert_component_data(node, False, params, facts.result)
        return node

    def _attach(
        self, node: UnifiedTreeNode, slot: Any, key: RadixKey, params: InsertParams, result: InsertResult
    ) -> UnifiedTreeNode:
        """A new leaf over ``[result.prefix_len, len(key))``, cut where the components want it; returns its last piece."""
        tree = self._tree
        start = result.prefix_len
        cuts: list[int] = []
        for component in self._cutters:
            cuts += component.leaf_cuts(start, key.length, params)
        for component in self._parent_watchers:
            component.on_parent_gains_child(node)
        for end in (*sorted(cuts), key.length):
            node = tree.attach_leaf(node, key.part(start, end), slot)
            start, slot = end, None
        for component in self._components:
            component.commit_insert_component_data(node, True, params, result)
        return node
